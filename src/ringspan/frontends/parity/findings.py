"""What a rank has found, as plain data that is sent to the other ranks, and what all ranks have found together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.parity.comparison import (
    Cut,
    Multiple,
    TokenMultiples,
    cut_of,
    difference,
    is_positions,
    largest,
    multiple,
    token_multiples,
)
from ringspan.frontends.parity.trace import NOT_INTERCEPTED, Place, Trace

# A gradient smaller than this part of the largest one is compared with the largest one: it may be zero but for
# rounding.
SMALL_GRADIENT = 1e-2


class StepRun(NamedTuple):
    """A step that was run: what was recorded, the loss, and the gradients of the parameters."""

    trace: Trace
    loss: float
    gradients: dict[str, Tensor | None]


class TensorFinding(NamedTuple):
    """A tensor of the run. ``cut`` is whether the rank has its tokens of it, else it has the whole tensor."""

    place: int
    """its number in the order of time"""
    cut: bool
    is_float: bool
    is_positions: bool
    error: float
    token: int


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def compare_tensors(sharded: Trace, whole: Trace, cp: ContextParallel) -> tuple[list[TensorFinding], dict[Place, Cut]]:
    """Compare the tensors of both runs, in the order of the run in one process. Also returns how they are cut."""
    findings, cuts = [], {}
    for number, (place, expected) in enumerate(whole.tensors.items()):
        x = sharded.tensors.get(place)
        cut = None if x is None else cut_of(expected.shape, x.shape, cp)
        if x is None or (cut is None and x.shape != expected.shape):
            continue
        if cut is not None:
            cuts[place] = cut
        is_float = expected.is_floating_point()
        counts = not is_float and cut is not None and is_positions(expected, cut)
        findings.append(TensorFinding(number, cut is not None, is_float, counts, *difference(x, expected, cut)))
    return findings, cuts


def compare_output_gradients(sharded: Trace, whole: Trace, cp: ContextParallel, tolerance: float) -> TokenMultiples | None:
    """Compare the gradients of the loss with respect to the last output; None if they cannot be compared."""
    if sharded.last_gradient is None or whole.last_gradient is None:
        return None
    place, actual = sharded.last_gradient
    same, expected = whole.last_gradient
    cut = cut_of(expected.shape, actual.shape, cp)
    if place != same or cut is None:
        return None
    return token_multiples(actual, expected, cut, tolerance)


def compare_gradients(sharded: Mapping[str, Tensor | None], whole: Mapping[str, Tensor | None]) -> list[Multiple | None]:
    """Compare the gradient of each parameter. None if only one of the runs has one."""
    scale = max((largest(g) for g in whole.values() if g is not None), default=0.0)
    found: list[Multiple | None] = []
    for name, expected in whole.items():
        actual = sharded[name]
        if actual is None or expected is None:
            found.append(Multiple(0.0, 1.0, 0.0) if actual is expected else None)
        else:
            found.append(multiple(actual, expected, max(largest(expected), SMALL_GRADIENT * scale)))
    return found


class RankFindings(NamedTuple):
    """All that a rank has found."""

    tensors: list[TensorFinding]
    outputs: TokenMultiples | None
    gradients: list[Multiple | None]
    loss: float
    calls: dict[str, int]
    unseen: list[int]
    """Attention calls that no block intercepted, by their places."""

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> RankFindings:
        tensors, outputs, gradients, loss, calls, unseen = data
        return cls(
            [TensorFinding(*x) for x in tensors],
            None if outputs is None else TokenMultiples(*outputs),
            [None if x is None else Multiple(*x) for x in gradients],
            loss,
            calls,
            unseen,
        )


class GroupTensor(NamedTuple):
    """A tensor that all ranks have compared. ``errors`` are those of the ranks."""

    place: int
    cut: bool
    is_float: bool
    is_positions: bool
    errors: tuple[float, ...]
    token: int
    """the token with the largest error of all ranks"""


def merge_tensors(ranks: Sequence[RankFindings]) -> list[GroupTensor]:
    """Return the tensors that all ranks have, all of them cut or all whole."""
    by_place: dict[int, list[TensorFinding]] = {}
    for rank in ranks:
        for finding in rank.tensors:
            by_place.setdefault(finding.place, []).append(finding)
    merged = []
    for found in by_place.values():
        if len(found) == len(ranks) and len({x.cut for x in found}) == 1:
            errors = tuple(x.error for x in found)
            worst = found[errors.index(max(errors))]
            merged.append(GroupTensor(*worst[:4], errors, worst.token))
    return sorted(merged, key=lambda x: x.place)


def not_intercepted(sharded: Trace, whole: Trace) -> list[int]:
    """Return the places, in the run of one process, of attention calls that no block intercepted."""
    return [n for n, place in enumerate(whole.tensors) if place[0].kind in NOT_INTERCEPTED and place in sharded.tensors]
