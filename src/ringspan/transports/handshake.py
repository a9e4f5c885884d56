"""The handshake: before a plan is first used on a group, all ranks compare what they came with.

Without it a rank that differs makes gloo abort the process, or read garbage without a word. With it every rank raises
the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ringspan.errors import PeerMismatch
from ringspan.transports.process_group import ProcessGroup

VERSION = 1


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
    queries: int
    keys: int


_agreed: WeakKeyDictionary[ProcessGroup, set[Hello]] = WeakKeyDictionary()


def shake_hands(group: ProcessGroup, hello: Hello, rows: Sequence[tuple[int, int]], device: torch.device) -> None:
    """Compare with all ranks unless it was done before; ``rows`` are the queries and keys that each rank should have."""
    agreed = _agreed.setdefault(group, set())
    if hello in agreed:
        return
    everyone = [Hello(*numbers) for numbers in group.gather_numbers(hello, device)]
    problem = compare(everyone, rows)
    if problem:
        raise PeerMismatch(problem)
    agreed.add(hello)


def compare(everyone: Sequence[Hello], rows: Sequence[tuple[int, int]]) -> str | None:
    """The first thing that does not fit, in words that are the same on every rank."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for field in Hello._fields[:-2]:
            mine, theirs = getattr(first, field), getattr(other, field)
            if mine != theirs:
                shown = [f"{x & (2**64 - 1):016x}" if field == "digest" else str(x) for x in (mine, theirs)]
                what = {"digest": "plan", "dtype": "dtype number"}.get(field, field.replace("_", " "))
                return (
                    f"the ranks disagree: rank 0 came with {what} {shown[0]}, rank {rank} with {shown[1]}. "
                    "All ranks must call attention with the same plan, shapes and dtype"
                )
    for rank, (other, (queries, keys)) in enumerate(zip(everyone, rows, strict=True)):
        for what, came, planned in (("queries", other.queries, queries), ("keys", other.keys, keys)):
            if came != planned:
                return (
                    f"rank {rank} came with {came} {what} where the plan says {planned}: "
                    "shard with cp.shard, or make a plan for these lengths"
                )
    return None
