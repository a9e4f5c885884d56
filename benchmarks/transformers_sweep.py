"""Every causal language model of the installed transformers, tiny, on 2 processes, against one process.

    python benchmarks/transformers_sweep.py                        # a table
    python benchmarks/transformers_sweep.py --json                 # one JSON line for each model
    python benchmarks/transformers_sweep.py --only llama gemma2

Random weights. The logits and the gradients of all parameters are compared with those of one process, with ``sdpa`` as
the reference where the model has it and ``eager`` where not. Differences are relative to the largest value. All is
computed in float64: where a model asks for float32 (norms, the softmax of eager attention, routers) it gets float64, in
one process and in two, since the rounding of float32 would hide errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import ringspan as rs
from ringspan.integrations.transformers import ringspan_attention
from ringspan.testing.float64 import Float64
from ringspan.testing.workers import Pool, WorkerFailed

TOKENS, BATCH = 29, 2  # 15 and 14 tokens on the two ranks; longer than the windows and chunks below
VOCABULARY = 96
TOLERANCE = 1e-10
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
    **dict.fromkeys(("attention_window_size",), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "router_hidden_size", "adapter_rank"), 8),
    "num_kv_shared_layers": 2,
    "rotary_dim": 4,
    "pronunciation_vocab_size": VOCABULARY,
    "shape_vocab_size": VOCABULARY,
    "zero_expert_num": 2,
    "max_window_layers": 2,
    **dict.fromkeys(("attention_dropout", "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "activation_dropout"), 0.0),
}
# What a model needs besides, or instead.
SPECIAL: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}, "ffn_config": {"ffn_hidden_size": 48, "hidden_size": WIDTH}},
    "dots1": {"n_shared_experts": 1},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
}


def small_config(cls: Any, model_type: str, *, is_part: bool = False) -> Any:
    """Return a tiny config of a class, with tiny configs of its parts."""
    fields = {field.name for field in dataclasses.fields(cls)}
    options: dict[str, Any] = {name: value for name, value in SMALL.items() if name in fields}
    for name, part in cls.sub_configs.items():
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            options[name] = small_config(part, part.model_type, is_part=True)
    if "qk_rope_head_dim" in fields:  # multi-head latent attention
        options.pop("head_dim", None)
        options["num_key_value_heads"] = HEADS
    kinds = set(_default(cls, "layer_types") or ())
    if len(kinds) > 1:  # the first layers of a large model are often of one kind
        options["layer_types"] = (sorted(kinds, reverse=True) * 4)[:4]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"):
        if name in fields:
            options[name] = 1
    if not is_part and "is_decoder" in fields:
        options["is_decoder"] = True
    options.update(SPECIAL.get(model_type, {}))
    return cls(**options)


def _default(cls: Any, option: str) -> Any:
    """The default of an option; None for a config that has none or cannot be made without arguments."""
    try:
        return getattr(cls(), option, None)
    except Exception:
        return None


def small_model(model_type: str) -> nn.Module:
    config = small_config(CONFIG_MAPPING[model_type], model_type)
    torch.manual_seed(0)
    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    accepted = cls.config_class
    if accepted is not None and not isinstance(config, accepted):
        config = config.get_text_config()
    with torch.device("meta"):
        size = sum(x.numel() for x in cls(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"the tiny config has {size:,} parameters: give it smaller parts in SPECIAL")
    torch.manual_seed(0)
    model: nn.Module = cls(config).double().eval()
    model.set_experts_implementation("eager")  # others are not for float64
    with torch.no_grad():
        for name, x in model.named_parameters():  # zeros would hide errors; a bias or a sink is often zero
            if not x.any():
                x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return model


def logits_and_gradients(model: nn.Module, inputs: dict[str, Any], weights: Tensor, cp: rs.ContextParallel | None) -> Any:
    model.zero_grad(set_to_none=True)
    with Float64():
        logits = model(**inputs, use_cache=False).logits
        (logits * weights[..., : logits.shape[-1]]).sum().backward()
    if cp is not None:
        cp.sum_gradients(model.parameters())
    return logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def compare(rank: int, model_type: str, layout: str) -> dict[str, Any]:
    """Run one model in one process and on all. Every worker does both, and compares its own tokens."""
    try:
        model = small_model(model_type)
    except Exception as error:
        return {"result": "not made", "why": _one_line(error)}
    ids = torch.randint(2, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(BATCH, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(2)).double()
    reference = "sdpa" if model._supports_sdpa else "eager"
    takes_positions = "position_ids" in signature(model.forward).parameters
    inputs = {"input_ids": ids, "position_ids": torch.arange(TOKENS).expand(BATCH, -1)}
    if not takes_positions:
        inputs.pop("position_ids")
    try:
        model.set_attn_implementation(reference)
        wanted, wanted_grads = logits_and_gradients(model, inputs, weights, None)
    except Exception as error:
        return {"result": "not made", "why": f"one process: {_one_line(error)}"}
    if not type(model)._can_set_attn_implementation():
        return {"result": "own attention", "why": "its layers do not call AttentionInterface"}
    cp = rs.ContextParallel(None, rs.causal(TOKENS), layout=layout, timeout=8)
    calls: list[str] = []
    try:
        model.set_attn_implementation("ringspan")
        with cp, record_calls(calls):
            logits, grads = logits_and_gradients(model, cp.shard(inputs, dim=1), cp.shard(weights, dim=1), cp)
    except rs.UnplannedAttention as error:
        return {"result": "refused", "why": _one_line(error)}
    except Exception as error:
        return {"result": "failed", "why": _one_line(error)}
    found = {"logits": _difference(logits, cp.shard(wanted, dim=1))}
    found["gradients"] = max(_difference(grads.get(name), x) for name, x in wanted_grads.items())
    if not calls:
        return {"result": "own attention", "why": "its layers do not call AttentionInterface"}
    is_exact = all(x <= TOLERANCE for x in found.values())
    return {"result": "exact" if is_exact else "wrong", "reference": reference, **found}


@contextmanager
def record_calls(calls: list[str]) -> Iterator[None]:
    """Add the name of each layer that calls attention by its registered name."""

    def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module).__name__)
        return ringspan_attention(module, *args, **kwargs)

    AttentionInterface.register("ringspan", recorded)
    try:
        yield
    finally:
        AttentionInterface.register("ringspan", ringspan_attention)


def _difference(found: Tensor | None, wanted: Tensor) -> float:
    if found is None or found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    worst = ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6)).item()
    return worst if worst == worst else float("inf")


def _one_line(error: Exception) -> str:
    return f"{'' if isinstance(error, rs.UnplannedAttention) else type(error).__name__ + ': '}{' '.join(str(error).split())}"


def sweep(types: list[str], layout: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    pool = Pool(2, timeout=240)
    for n, model_type in enumerate(types):
        if pool.is_closed:
            pool = Pool(2, timeout=240)
        try:
            both = pool.run(compare, model_type, layout)
            order = ["wrong", "refused", "failed", "not made", "own attention", "exact"]
            if any(found["result"] == "failed" for found in both):
                pool.close()  # the group cannot be used after a call that not all ranks have made
            row = min(both, key=lambda found: order.index(found["result"]))
            for key in ("logits", "gradients"):
                if key in row:
                    row[key] = max(found.get(key, float("inf")) for found in both)
        except WorkerFailed as error:
            row = {"result": "failed", "why": " ".join(str(error).split())[-300:]}
            both = []
        rows.append({"model": model_type, **row})
        print(f"{n + 1}/{len(types)} {model_type}: {both or row}", file=sys.stderr)
    pool.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="model types, as in config.model_type")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = sweep(options.only or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), options.layout)
    for row in rows:
        if options.json:
            print(json.dumps({**row, "transformers": transformers.__version__, "torch": torch.__version__}))
        else:
            figures = f"{row['reference']} {row['logits']:.1e} {row['gradients']:.1e}" if "logits" in row else row["why"]
            print(f"{row['model']:28} {row['result']:14} {figures}")
    print(dict(Counter(row["result"] for row in rows)), file=sys.stderr)


if __name__ == "__main__":
    main()
