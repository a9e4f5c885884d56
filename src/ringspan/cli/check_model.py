"""``ringspan check --model config.json``: a model of transformers over processes of this machine, against one process.

The model is made from its config with random weights, in float64, by default with a few small layers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.errors import InputError, RingspanError, UnplannedAttention
from ringspan.testing.workers import Pool

LAYERS, HEADS, HEAD_DIM, WINDOW = 2, 4, 8, 8
# key of a config -> the largest value of a small model
SMALL = {
    "vocab_size": 128,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a model of transformers (needs transformers)")
    group.add_argument("--model", metavar="CONFIG", help="compare the model of this config.json with one process, no cases")
    group.add_argument("--tokens", type=int, default=32, help="length of the sequence (default: %(default)s)")
    group.add_argument("--layout", default="zigzag", help="layout of the tokens (default: %(default)s)")
    group.add_argument("--full-size", action="store_true", help="do not make the model of the config smaller")


def run(args: argparse.Namespace) -> int:
    if find_spec("transformers") is None:
        raise InputError("--model needs transformers: pip install transformers")
    world = 2 if args.world is None else args.world
    if args.tokens < world or world < 1:
        raise InputError(f"--tokens {args.tokens} on --world {world}: give each rank at least one token")
    config = read_config(args.model)
    config = config if args.full_size else smaller(config)
    make_config(config)
    with Pool(world) as pool:
        parity = pool.run(compare, config, args.tokens, args.layout)[0]
    if isinstance(parity, str):
        raise UnplannedAttention(parity)
    print(parity)
    if args.json:
        print(parity.to_json())
    return 0 if parity.ok else 1


def read_config(path: str) -> dict[str, Any]:
    """Return the config in a file, or in the config.json of a directory.

    Of a model with several parts, such as a vision tower, it is that of the language model.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--model {path} cannot be read as a config.json: {error}") from error
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict) or "model_type" not in config:
        raise InputError(f"--model {path} has no model_type: give the config.json of a model of transformers")
    if not isinstance(config["model_type"], str):
        raise InputError(f"--model {path}: model_type must be text; got {config['model_type']!r}")
    return config


def smaller(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model of the same kind with two layers and small dims.

    The number of query heads for each key head stays, up to four.

    >>> smaller({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    ...     "num_key_value_heads": 8, "vocab_size": 128256})
    {'model_type': 'llama', 'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4,
     'num_key_value_heads': 1, 'vocab_size': 128}
    """
    for key in (*SMALL, "num_attention_heads", "num_key_value_heads", "num_hidden_layers"):
        if not isinstance(config.get(key), (int, type(None))):
            raise InputError(f"{key} of the model must be a whole number; got {config[key]!r}")
    small = {key: min(value, SMALL[key]) if key in SMALL and value else value for key, value in config.items()}
    heads = config.get("num_attention_heads")
    if heads:
        small["num_attention_heads"] = min(heads, HEADS)
        if config.get("num_key_value_heads"):
            small["num_key_value_heads"] = max(1, small["num_attention_heads"] * config["num_key_value_heads"] // heads)
        small["hidden_size"] = small["num_attention_heads"] * HEAD_DIM
        if config.get("head_dim"):
            small["head_dim"] = HEAD_DIM
    if config.get("num_hidden_layers"):
        small["num_hidden_layers"] = min(config["num_hidden_layers"], LAYERS)
    kinds = config.get("layer_types")
    if kinds:  # one layer of each kind, as far as there are layers
        distinct = list(dict.fromkeys(kinds))
        small["layer_types"] = [distinct[i % len(distinct)] for i in range(small["num_hidden_layers"])]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if key in small and not (isinstance(small[key], int) and small[key] < small.get("vocab_size", 0)):
            small[key] = None
    return small


def make_config(config: Mapping[str, Any]) -> Any:
    """Return the config of transformers. Raise if it is not that of a causal language model."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config["model_type"]
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(
            f"{model_type} is no causal language model of the installed transformers, and --model takes no other: call "
            "rs.check_parity in a script with your model, its inputs and a step"
        )
    options = {key: x for key, x in config.items() if key not in ("model_type", "architectures", "torch_dtype", "dtype")}
    try:
        made = AutoConfig.for_model(model_type, **options)
    except Exception as error:  # each model has validators of its own
        raise InputError(f"transformers refuses this config of {model_type}: {error}") from error
    if not hasattr(made, "vocab_size"):
        raise InputError(
            f"this config of {model_type} has no vocab_size: give --model that of the language model in it, with a model_type "
            "of its own"
        )
    return made


def compare(rank: int, config: Mapping[str, Any], tokens: int, layout: str) -> rs.Parity | str:
    """Compare the model on this rank. A job for all workers of a pool. Returns why a model is refused."""
    from transformers import AutoModelForCausalLM

    from ringspan.integrations.transformers import prepare
    from ringspan.integrations.transformers.refusals import refuse_config

    torch.manual_seed(0)
    made = make_config(config)
    model = AutoModelForCausalLM.from_config(made, experts_implementation="eager")
    try:
        refuse_config(prepare(model).config)
    except RingspanError as error:
        return str(error)
    cp = rs.ContextParallel(None, rs.causal(tokens), layout=layout)
    ids = torch.randint(made.vocab_size, (1, tokens))
    if made.pad_token_id is not None:  # some models count the tokens that are no padding
        ids[ids == made.pad_token_id] = (made.pad_token_id + 1) % made.vocab_size
    return rs.check_parity(model, ids, cp, step=step, without_cp=loss_of_transformers)


def step(model: Any, ids: Tensor, cp: rs.ContextParallel) -> Tensor:
    from ringspan.integrations.transformers.refusals import first_position

    mine, labels = cp.shard(ids, rs.shift_labels(ids), dim=1)
    given = {"input_ids": mine}
    if "position_ids" in signature(model.forward).parameters:
        given["position_ids"] = cp.positions()[None] + first_position(model.config)
    with cp:
        logits = model(**given, use_cache=False).logits
    return cp.mean(F.cross_entropy(logits.mT, labels, reduction="none"), labels >= 0)


def loss_of_transformers(model: Any, ids: Tensor) -> Tensor:
    """Compute the same loss without ringspan, by the attention that transformers has for every model."""
    from ringspan.integrations.transformers import prepare

    model.set_attn_implementation("eager")
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        prepare(model)
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:])
