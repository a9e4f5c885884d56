"""Tiny models with random weights, of every language model of transformers: causal, masked, or with an encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

# Kind of model -> model type -> the name of its class.
KINDS: dict[str, dict[str, str]] = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
VOCABULARY = 96
MAX_PARAMETERS = 5_000_000

# The size of every option that makes a model large, by its name in the config.
WIDTH, HEADS = 32, 4
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "word_embed_proj_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("dim", "input_embedding_size", "output_embedding_size", "backbone_hidden_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "dff", "d_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_channels", "swa_head_dim", "dim_head", "d_head", "global_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("attention_head_dim", "attention_head_size"), 8),
    "qk_head_dim": 16,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size", "local_attention"), 8),
    **dict.fromkeys(("attention_window_size", "local_attention_window_len"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "router_hidden_size", "adapter_rank"), 8),
    **dict.fromkeys(
        ("mlp_dim", "audio_embed_dim", "mm_embed_dim", "output_proj_dims", "output_channels", "projection_dim"), 16
    ),
    **dict.fromkeys(("nemo_conv_channels", "ext_pw_out_channel", "depthwise_separable_out_channel"), 16),
    **dict.fromkeys(("mm_posemb_size", "max_source_positions", "position_embedding_size"), 64),
    **dict.fromkeys(("image_size", "crop_size"), 28),
    **dict.fromkeys(("patch_size",), 14),
    **dict.fromkeys(("num_blocks", "depth"), 1),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads"), 4),
    "hidden_size_global": WIDTH,
    "encoder_hash_byte_group_vocab": 64,
    "num_kv_shared_layers": 2,
    "rotary_dim": 4,
    "pronunciation_vocab_size": VOCABULARY,
    "shape_vocab_size": VOCABULARY,
    "zero_expert_num": 2,
    "max_window_layers": 2,
    **dict.fromkeys(("attention_dropout", "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "activation_dropout"), 0.0),
}
MASKED = ("full_attention", "sliding_attention")
MIXED = ["conv", "full_attention"] * 2
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2}
# What a model or a part of one needs besides, or instead. None for a part that is left out.
SPECIAL: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "blt": {"patching_threshold": 4.15},  # with random weights, by default every byte would be a patch
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in MASKED}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": WIDTH},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    "dots3_note_text": {
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), HEADS),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim", "shared_experts_intermediate_size"), 16),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim", "index_head_dim"), 8),
        "index_n_heads": 2,
    },
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
    "gemma3n": {"vision_config": None},
    "gemma4": {"vision_config": None, "audio_config": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "layer_types": ...},
    "inkling2_text": {"n_layers_per_attn_res_block": 2, "unpadded_vocab_size": VOCABULARY},
    "lfm2": {"layer_types": MIXED},
    "lfm2_moe": {"layer_types": MIXED},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mpt": {"attn_config": {"attn_pdrop": 0}, "max_seq_len": 64},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "qwen4_exp_text": {**INDEXER, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "recurrent_gemma": {"layer_types": ...},
    "reformer": {"axial_pos_embds": False},
    "xlm": {"causal": True},  # by default it is an encoder
    "xlnet": {"attn_type": "uni"},  # by default a token sees those after it
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "layer_types": ...},
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(cls: Any, model_type: str, kind: str = "causal", *, is_part: bool = False) -> Any:
    """Return a tiny config of a class, with tiny configs of its parts."""
    fields = {field.name for field in dataclasses.fields(cls)}
    options: dict[str, Any] = {name: value for name, value in SMALL.items() if name in fields}
    for name, spec in (cls.sub_configs_defaults or {}).items():
        part = CONFIG_MAPPING[spec.model_type] if spec.config_class is AutoConfig else spec.config_class
        if dataclasses.is_dataclass(part):
            options[name] = small_config(part, spec.model_type, kind, is_part=True)
    if "qk_rope_head_dim" in fields:  # multi-head latent attention
        options.pop("head_dim", None)
        options["num_key_value_heads"] = HEADS
    kinds = set(_default(cls, "layer_types") or ())
    if len(kinds) > 1:  # the first layers of a large model are often of one kind
        options["layer_types"] = (sorted(kinds, reverse=True) * 4)[:4]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"):
        if name in fields:
            options[name] = 1
    if kind == "causal" and not is_part and "is_decoder" in fields:
        options["is_decoder"] = True
    options.update(SPECIAL.get(model_type, {}))
    return cls(**{name: value for name, value in options.items() if value is not ...})


def _default(cls: Any, option: str) -> Any:
    """The default of an option; None for a config that has none or cannot be made without arguments."""
    try:
        return getattr(cls(), option, None)
    except Exception:
        return None


@contextmanager
def without_timm() -> Iterator[None]:
    """Leave out vision towers of the package timm, which cannot be made small. Text does not go through them."""
    original = AutoModel.from_config

    def from_config(config: Any, **options: Any) -> Any:
        return nn.Identity() if config.model_type == "gemma3n_vision" else original(config, **options)

    with mock.patch.object(AutoModel, "from_config", from_config):
        yield


def small_model(model_type: str, kind: str = "causal") -> nn.Module:
    """Return a model in float64, the same in every process. No parameter is zero."""
    config = small_config(CONFIG_MAPPING[model_type], model_type, kind)
    torch.manual_seed(0)
    cls = getattr(transformers, KINDS[kind][model_type])
    accepted = cls.config_class
    if accepted is not None and not isinstance(config, accepted):
        parts = [getattr(config, name) for name in config.sub_configs]
        # A model type without a model of its own has the attributes of that model's config: InternLM 3 is a Llama.
        config = next((part for part in parts if isinstance(part, accepted)), config)
    with torch.device("meta"), without_timm():
        size = sum(x.numel() for x in cls(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"the tiny config has {size:,} parameters: give it smaller parts in SPECIAL")
    torch.manual_seed(0)
    with without_timm():
        model: nn.Module = cls(config).double().eval()
    model.set_experts_implementation("eager")  # others are not for float64
    with torch.no_grad():
        for name, x in model.named_parameters():  # zeros would hide errors; a bias or a sink is often zero
            if not x.any():
                x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return model
