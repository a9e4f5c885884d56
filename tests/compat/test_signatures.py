"""Every name shared with torch has the signature of the installed torch: argument names, kinds, order and defaults."""

from __future__ import annotations

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
PLACES = [theirs, *(module for name, module in sys.modules.items() if name.startswith(MOVED_TO))]

FUNCTIONS = [
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_LoadBalancer._generate_indices",
    "_PTRRLoadBalancer",
    "_PTRRLoadBalancer.ptrr_scheduling",
    "_PerDocumentHeadTailLoadBalancer",
    "_ContextParallel",
    "_ContextParallel._apply",
    "_context_parallel_shard",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "_is_causal_behavior",
    "context_parallel",
    "context_parallel_unshard",
    "set_rotate_method",
]
ENUMS = ["_CausalBehavior", "_RotateMethod", "_ContextParallel.AttentionType"]


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
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments(name: str) -> None:
    assert parameters(ours(name)) == parameters(torchs(name))


@pytest.mark.parametrize("name", ENUMS)
def test_members(name: str) -> None:
    assert {x.name: x.value for x in ours(name)} == {x.name: x.value for x in torchs(name)}


def test_the_operator() -> None:
    mine, other = (x._opoverload._schema for x in (compat.flex_cp_allgather, torchs("flex_cp_allgather")))
    assert [(x.name, str(x.type)) for x in mine.arguments] == [(x.name, str(x.type)) for x in other.arguments]


def test_the_settings() -> None:
    def settings(place: Any) -> dict[str, Any]:
        return {name: getattr(x, "name", x) for name, x in vars(place._cp_options).items()}

    assert settings(compat) == settings(theirs)


def test_every_public_name_is_compared() -> None:
    compared = {name.split(".")[0] for name in (*FUNCTIONS, *ENUMS)} | {"flex_cp_allgather", "_cp_options"}
    assert compared == set(compat.__all__)
