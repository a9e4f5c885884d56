"""The handshake: before a plan is first used on a group, all ranks compare what they came with.

Without it a rank that differs makes gloo abort the process, or read garbage without a word. With it every rank raises
the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ringspan.errors import PeerMismatch
from ringspan.transports.process_group import ProcessGroup

VERSION = 2
INVALID = -1  # the version of a rank whose tensors are no good: it says so before it raises, lest the others wait for it


class Hello(NamedTuple):
    """What a rank says of itself: fixed in size, whole numbers only. All but the rows must be alike on all ranks."""

    version: int
    digest: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: int
    score_mod: int
    queries: int
    keys: int


# What each torch group has agreed on, for each order in which its ranks are counted. All ranks fill theirs alike, and
# so they empty it alike when it is full.
_agreed: WeakKeyDictionary[Any, dict[tuple[int, ...], set[Hello]]] = WeakKeyDictionary()
MOST = 4096

# The dtypes that attention is computed in, by their numbers in a Hello.
DTYPES = ("float16", "bfloat16", "float32", "float64")
NO_FUNCTION = 0


def shake_hands(group: ProcessGroup, hello: Hello, rows: Iterable[tuple[int, int]], device: torch.device) -> None:
    """Compare with all ranks unless it was done before; ``rows`` are the queries and keys that each rank should have."""
    agreed = _agreed.setdefault(group.group, {}).setdefault(tuple(group.ranks), set())
    if hello in agreed:
        return
    everyone = [Hello(*numbers) for numbers in group.gather_numbers(hello, device)]
    problem = compare(everyone, rows)
    if problem:
        raise PeerMismatch(problem)
    if len(agreed) >= MOST:
        agreed.clear()
    agreed.add(hello)


def tell_invalid(group: ProcessGroup, device: torch.device) -> None:
    """Say that this rank's tensors are no good, so that ranks which shake hands now raise too instead of waiting."""
    group.gather_numbers(Hello(INVALID, *[0] * (len(Hello._fields) - 1)), device)


def compare(everyone: Sequence[Hello], rows: Iterable[tuple[int, int]]) -> str | None:
    """The first thing that does not fit, in words that are the same on every rank."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other.version == INVALID:
            return f"rank {rank} came with q, k and v that do not go together; its own error says why"
        for field in Hello._fields[:-2]:
            mine, theirs = getattr(first, field), getattr(other, field)
            if mine != theirs:
                shown = [_shown(field, x) for x in (mine, theirs)]
                what = {"digest": "plan", "score_mod": "score_mod"}.get(field, field.replace("_", " "))
                return (
                    f"the ranks disagree: rank 0 came with {what} {shown[0]}, rank {rank} with {shown[1]}. "
                    "All ranks must call attention with the same plan, shapes, dtype and score_mod"
                )
    for rank, (other, (queries, keys)) in enumerate(zip(everyone, rows, strict=True)):
        for what, came, planned in (("queries", other.queries, queries), ("keys", other.keys, keys)):
            if came != planned:
                return (
                    f"rank {rank} came with {came} {what} where the plan says {planned}: "
                    "shard with cp.shard, or make a plan for these lengths"
                )
    return None


def digest_number(digest: str) -> int:
    """Sixteen hex digits as a number that fits int64."""
    return int(digest, 16) - 2**63


def _shown(field: str, number: int) -> str:
    if field == "score_mod" and number == NO_FUNCTION:
        return "None"
    if field in ("digest", "score_mod"):
        return f"{number + 2**63:016x}"
    return DTYPES[number] if field == "dtype" else str(number)
