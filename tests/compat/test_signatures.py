"""Every name shared with torch has the signature of the installed torch: argument names, kinds, order and defaults."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch
from torch.distributed.tensor import experimental

from ringspan import compat

theirs: Any = pytest.importorskip("torch.distributed.tensor.experimental._attention")
# Newer versions have moved some names to this package.
MOVED_TO = f"{experimental.__name__}._context_parallel"
importlib.import_module(f"{MOVED_TO}._sharding_rules")
PLACES = [theirs, *(module for name, module in sys.modules.items() if name.startswith(MOVED_TO))]

FUNCTIONS = [
    "_AllGatherRotater",
    "_AllGatherRotater.exchange_buffers",
    "_AllGatherRotater.next_buffer",
    "_AllToAllRotater",
    "_AllToAllRotater.exchange_buffers",
    "_AllToAllRotater.next_buffer",
    "_ContextParallelOptions",
    "_RingRotater",
    "_SDPAMerger",
    "_SDPAMerger.results",
    "_SDPAMerger.step",
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_LoadBalancer._generate_indices",
    "_PTRRLoadBalancer",
    "_PTRRLoadBalancer.ptrr_scheduling",
    "_PerDocumentHeadTailLoadBalancer",
    "_ContextParallel",
    "_ContextParallel._apply",
    "_ContextParallel.flex_input_fn",
    "_ContextParallel.sdpa_input_fn",
    "_ContextParallel.sdpa_output_fn",
    "_PerDocumentHeadTailLoadBalancer._generate_indices_for_batch",
    "_context_parallel_shard",
    "_create_cp_block_mask",
    "_create_default_load_balancer",
    "_create_rotater",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "_is_causal_behavior",
    "_templated_ring_attention",
    "_templated_ring_attention_backward",
    "context_parallel",
    "context_parallel_unshard",
    "register_cp_sharding_rules",
    "set_rotate_method",
    "unregister_cp_sharding_rules",
]
ENUMS = ["_CausalBehavior", "_DispatchMode", "_RotateMethod", "_ContextParallel.AttentionType"]
OPERATORS = ["flex_cp_allgather", "flex_cp_allgather_backward"]


def torchs(name: str) -> Any:
    first, *inner = name.split(".")
    found = next((getattr(place, first) for place in PLACES if hasattr(place, first)), None)
    for part in inner:
        found = getattr(found, part, None)
    if found is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    return found


def ours(name: str) -> Any:
    found: Any = compat
    for part in name.split("."):
        found = getattr(found, part)
    return found


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, getattr(p.default, "name", p.default)) for p in found]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments(name: str) -> None:
    assert parameters(ours(name)) == parameters(torchs(name))


@pytest.mark.parametrize("name", ENUMS)
def test_members(name: str) -> None:
    assert {x.name: x.value for x in ours(name)} == {x.name: x.value for x in torchs(name)}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    mine, other = (x._opoverload._schema for x in (ours(name), torchs(name)))
    assert [(x.name, str(x.type)) for x in mine.arguments] == [(x.name, str(x.type)) for x in other.arguments]


def test_the_settings() -> None:
    def settings(place: Any) -> dict[str, Any]:
        return {name: getattr(x, "name", x) for name, x in vars(place._cp_options).items()}

    assert settings(compat) == settings(theirs)


def test_every_public_name_is_compared() -> None:
    compared = {name.split(".")[0] for name in (*FUNCTIONS, *ENUMS, *OPERATORS)} | {"_cp_options", "_dispatch_mode"}
    assert compared == set(compat.__all__)
