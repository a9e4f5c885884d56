"""Tiny models of transformers with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MIXED = ["sliding_attention", "full_attention"] * 2
DEEPSEEK: dict[str, Any] = {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}

DECODER = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
BART: dict[str, Any] = {
    **DECODER,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "dropout": 0.0,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
NEO: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
FALCON: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


NO_DROPOUT = {"attn_pdrop": 0}
BYTES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


CLIP: dict[str, Any] = {**SIZES, "num_key_value_heads": None, "projection_dim": 8}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


def _gemma3_with_images(transformers: Any) -> Any:
    text = {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "layer_types": MIXED}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    return transformers.Gemma3Config(text_config=text, vision_config=vision)


def _paligemma(transformers: Any) -> Any:
    text = {**SIZES, "num_hidden_layers": 2, "head_dim": 8, "model_type": "gemma"}
    return transformers.PaliGemmaConfig(text_config=text, vision_config=VISION, projection_dim=32, image_token_index=61)


def _t5gemma(transformers: Any) -> Any:
    part = {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "layer_types": MIXED}
    part.update(attention_dropout=0.0, dropout_rate=0.0)
    return transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=VOCABULARY)


# name -> the class of the model, and its config
MODELS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "llama": ("LlamaForCausalLM", lambda t: t.LlamaConfig(**SIZES)),
    "qwen3": ("Qwen3ForCausalLM", lambda t: t.Qwen3Config(**SIZES, head_dim=8)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", lambda t: t.Qwen3MoeConfig(**SIZES, **MOE, head_dim=8, num_experts=4)),
    "mistral": ("MistralForCausalLM", lambda t: t.MistralConfig(**SIZES, sliding_window=8)),
    "gemma with two directions": (
        "GemmaForCausalLM",
        lambda t: t.GemmaConfig(**SIZES, head_dim=8, use_bidirectional_attention=True),
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        lambda t: t.Gemma2Config(
            **SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=8, attn_logit_softcapping=2.0, layer_types=MIXED
        ),
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        lambda t: t.Gemma3TextConfig(**SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=8, layer_types=MIXED),
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        lambda t: t.Gemma4TextConfig(
            **SIZES,
            head_dim=8,
            global_head_dim=8,
            sliding_window=8,
            layer_types=MIXED,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
        ),
    ),
    "olmo3": ("Olmo3ForCausalLM", lambda t: t.Olmo3Config(**SIZES, sliding_window=8, layer_types=MIXED)),
    "llama4": (
        "Llama4ForCausalLM",
        lambda t: t.Llama4TextConfig(
            **SIZES, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=8, no_rope_layer_interval=2
        ),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        lambda t: t.GptOssConfig(
            **SIZES, head_dim=8, sliding_window=8, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2
        ),
    ),
    "phi3": ("Phi3ForCausalLM", lambda t: t.Phi3Config(**SIZES, sliding_window=8)),
    "llama with dynamic RoPE": (
        "LlamaForCausalLM",
        lambda t: t.LlamaConfig(
            **{**SIZES, "max_position_embeddings": 16},
            rope_parameters=DYNAMIC_ROPE,
        ),
    ),
    "phi3 with LongRoPE": (
        "Phi3ForCausalLM",
        lambda t: t.Phi3Config(**SIZES, original_max_position_embeddings=24, rope_parameters=LONG_ROPE),
    ),
    "cohere2": ("Cohere2ForCausalLM", lambda t: t.Cohere2Config(**SIZES, sliding_window=8, layer_types=MIXED)),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        lambda t: t.DeepseekV3Config(**{**SIZES, **DEEPSEEK}, **MOE, **LATENT, first_k_dense_replace=1),
    ),
    "smollm3": ("SmolLM3ForCausalLM", lambda t: t.SmolLM3Config(**SIZES, no_rope_layer_interval=2)),
    # these need prepare(model): they count positions, or write attention out in their layers
    "bart": ("BartForCausalLM", lambda t: t.BartConfig(**BART, is_decoder=True)),
    "bart with encoder": ("BartForConditionalGeneration", lambda t: t.BartConfig(**BART, encoder_layers=2)),
    "m2m_100 with encoder": ("M2M100ForConditionalGeneration", lambda t: t.M2M100Config(**BART, encoder_layers=2)),
    "mvp with encoder": ("MvpForConditionalGeneration", lambda t: t.MvpConfig(**BART, encoder_layers=2)),
    "t5": ("T5ForConditionalGeneration", lambda t: t.T5Config(**T5)),
    "mt5": ("MT5ForConditionalGeneration", lambda t: t.MT5Config(**T5)),
    "umt5": ("UMT5ForConditionalGeneration", lambda t: t.UMT5Config(**T5)),
    "t5 encoder": ("T5EncoderModel", lambda t: t.T5Config(**T5)),
    "pop2piano": ("Pop2PianoForConditionalGeneration", lambda t: t.Pop2PianoConfig(**T5)),
    "bigbird_pegasus with encoder": (
        "BigBirdPegasusForConditionalGeneration",
        lambda t: t.BigBirdPegasusConfig(**BART, encoder_layers=2, block_size=4, num_random_blocks=1),
    ),
    "clap": ("ClapTextModel", lambda t: t.ClapTextConfig(**SIZES)),
    "esm with RoPE": (
        "EsmForMaskedLM",
        lambda t: t.EsmConfig(
            **{**SIZES, "num_key_value_heads": None}, position_embedding_type="rotary", token_dropout=False, mask_token_id=3
        ),
    ),
    "deberta": ("DebertaForMaskedLM", lambda t: t.DebertaConfig(**{**SIZES, "num_key_value_heads": None})),
    "llama for classification": ("LlamaForSequenceClassification", lambda t: t.LlamaConfig(**SIZES)),
    "llama for answers": ("LlamaForQuestionAnswering", lambda t: t.LlamaConfig(**SIZES)),
    "wav2vec2": ("Wav2Vec2Model", lambda t: t.Wav2Vec2Config(**SIZES, num_conv_pos_embedding_groups=4)),
    "mpnet": (
        "MPNetForMaskedLM",
        lambda t: t.MPNetConfig(**{**SIZES, "num_key_value_heads": None}, attention_probs_dropout_prob=0.0),
    ),
    "gptj": ("GPTJForCausalLM", lambda t: t.GPTJConfig(**GPT, rotary_dim=4, n_positions=64)),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        lambda t: t.GPTNeoConfig(**NEO, max_position_embeddings=64, attention_types=[[["global", "local"], 1]], window_size=8),
    ),
    "bloom": ("BloomForCausalLM", lambda t: t.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)),
    "falcon": ("FalconForCausalLM", lambda t: t.FalconConfig(**FALCON)),
    "falcon with alibi": (
        "FalconForCausalLM",
        lambda t: t.FalconConfig(**FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    ),
    "falcon with wide heads": (
        "FalconForCausalLM",
        lambda t: t.FalconConfig(
            **{**FALCON, "hidden_size": 512, "num_hidden_layers": 1},
            alibi=True,
            multi_query=False,
            parallel_attn=False,
            bias=True,
        ),
    ),
    "mpt": (
        "MptForCausalLM",
        lambda t: t.MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, attn_config=NO_DROPOUT),
    ),
    "openai-gpt": ("OpenAIGPTLMHeadModel", lambda t: t.OpenAIGPTConfig(**GPT, n_positions=64)),
    "lfm2": (
        "Lfm2ForCausalLM",
        lambda t: t.Lfm2Config(**{**SIZES, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"]),
    ),
    "bert": (
        "BertLMHeadModel",
        lambda t: t.BertConfig(**{**SIZES, "num_key_value_heads": None}, is_decoder=True, attention_probs_dropout_prob=0.0),
    ),
    "roberta": (
        "RobertaForCausalLM",
        lambda t: t.RobertaConfig(**{**SIZES, "num_key_value_heads": None}, is_decoder=True, attention_probs_dropout_prob=0.0),
    ),
    "blt": (
        "BltForCausalLM",
        lambda t: t.BltConfig(
            vocab_size=VOCABULARY,
            patching_threshold=3.78,  # between the entropies of bytes
            max_patch_length=6,
            encoder_hash_byte_group_size=[3, 5],
            encoder_hash_byte_group_vocab=32,
            patcher_config={**BYTES, "sliding_window": 12},
            encoder_config={**BYTES, "hidden_size_global": 32, "num_hidden_layers": 2, "cross_attn_all_layers": True},
            decoder_config={**BYTES, "hidden_size_global": 32, "num_hidden_layers": 2},
            global_config={x: y for x, y in BYTES.items() if x != "vocab_size"},
            local_attention_window_len=8,  # since transformers 5.23
        ),
    ),
    "cpmant": (
        "CpmAntForCausalLM",
        lambda t: t.CpmAntConfig(
            **{**FALCON, "num_hidden_layers": 2}, dim_head=8, dim_ff=48, prompt_length=3, position_bias_max_distance=16
        ),
    ),
    "doge": ("DogeForCausalLM", lambda t: t.DogeConfig(**{**SIZES, "num_hidden_layers": 2}, keep_window_size=32)),
    "git": (
        "GitForCausalLM",
        lambda t: t.GitConfig(
            **{**FALCON, "num_attention_heads": 4}, intermediate_size=48, max_position_embeddings=64, vision_config=VISION
        ),
    ),
    "inkling": (
        "InklingForCausalLM",
        lambda t: t.InklingTextConfig(
            **{**SIZES, **MOE, "num_hidden_layers": 2},
            head_dim=8,
            swa_head_dim=8,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            n_routed_experts=4,
            d_rel=4,
            rel_extent=12,
            sliding_window_size=8,
            log_scaling_n_floor=32,
            layer_types=["hybrid", "hybrid_sliding"],
        ),
    ),
    "inkling2": (
        "Inkling2ForCausalLM",
        lambda t: t.Inkling2TextConfig(
            **{**SIZES, **MOE, "num_hidden_layers": 2, "intermediate_size": 16},
            unpadded_vocab_size=VOCABULARY,
            head_dim=8,
            swa_head_dim=8,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            n_routed_experts=4,
            d_rel=4,
            rel_extent=12,
            sliding_window_size=8,
            log_scaling_n_floor=6,
            n_layers_per_attn_res_block=2,
            layer_types=["hybrid_sliding", "hybrid"],
        ),
    ),
    "prophetnet": (
        "ProphetNetForCausalLM",
        lambda t: t.ProphetNetConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_decoder_layers=2,
            num_decoder_attention_heads=4,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            num_buckets=8,
            relative_max_distance=16,
            ngram=3,
        ),
    ),
    "xlm": (
        "XLMWithLMHeadModel",
        lambda t: t.XLMConfig(
            vocab_size=VOCABULARY, emb_dim=32, n_layers=2, n_heads=4, causal=True, max_position_embeddings=64, pad_index=0
        ),
    ),
    "xlnet": (
        "XLNetLMHeadModel",
        lambda t: t.XLNetConfig(vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=48, attn_type="uni"),
    ),
    "zaya": (
        "ZayaForCausalLM",
        lambda t: t.ZayaConfig(
            **{**SIZES, "num_hidden_layers": 2},
            head_dim=8,
            num_experts=2,
            sliding_window=8,
            layer_types=["hybrid", "hybrid_sliding"],
        ),
    ),
    "gemma3 with images": ("Gemma3ForConditionalGeneration", _gemma3_with_images),
    "paligemma": ("PaliGemmaForConditionalGeneration", _paligemma),
    "t5gemma": ("T5GemmaForConditionalGeneration", _t5gemma),
    "mamba": (
        "MambaForCausalLM",
        lambda t: t.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
    ),
    "bert for pretraining": ("BertForPreTraining", lambda t: t.BertConfig(**{**SIZES, "num_key_value_heads": None})),
    "clip with projection": ("CLIPTextModelWithProjection", lambda t: t.CLIPTextConfig(**CLIP)),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", lambda t: t.RecurrentGemmaConfig(**SIZES, lru_width=32)),
    "qwen3_next": ("Qwen3NextForCausalLM", lambda t: t.Qwen3NextConfig(**SIZES, **MOE, head_dim=8, num_experts=4)),
}


def small_model(name: str) -> nn.Module:
    """Return a model in float64, the same on every rank. No parameter is zero, as sinks and biases are at first."""
    import transformers

    cls, config = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, cls)(config(transformers)).double().eval()
    model.set_experts_implementation("eager")  # the others are not for float64
    with torch.no_grad():
        for n, x in enumerate(model.parameters()):
            if not x.any():
                x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(n)) / 2)
    return model
