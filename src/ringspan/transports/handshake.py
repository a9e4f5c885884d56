"""The handshake: before a group first runs a plan, its ranks check that they all call with the same plan and shapes.

Without this check a rank that differs makes gloo abort the process or receive wrong data without an error. With it
every rank raises the same :class:`~ringspan.errors.PeerMismatch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ringspan.errors import PeerMismatch
from ringspan.transports.process_group import ProcessGroupTransport

VERSION = 2
INVALID = -1  # the version of a rank with invalid inputs, which it sends before it raises, so that no peer waits for it


class RankSignature(NamedTuple):
    """The arguments of one rank as integers. All fields but ``queries`` and ``keys`` must agree on all ranks."""

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


# The signatures a group has agreed on, each with the digest of its plan. Every rank adds and clears the same entries at
# the same calls, so either all ranks skip the handshake or none does.
Agreements: TypeAlias = dict[RankSignature, str]

# Those of each torch process group, by the order of its ranks.
_agreed: WeakKeyDictionary[Any, dict[tuple[int, ...], Agreements]] = WeakKeyDictionary()
MAX_AGREED = 4096

# RankSignature.dtype is an index into this tuple.
DTYPES = ("float16", "bfloat16", "float32", "float64")
NO_SCORE_MOD = 0


def agreements(group: ProcessGroupTransport) -> Agreements:
    """What the ranks of the group have agreed on so far. A call whose signature is in it needs no handshake."""
    return _agreed.setdefault(group.group, {}).setdefault(tuple(group.ranks), {})


def check_agreement(
    group: ProcessGroupTransport,
    signature: RankSignature,
    rows: Iterable[tuple[int, int]],
    device: torch.device,
    *,
    plan_digest: str,
) -> None:
    """Compare this rank's signature with all others: a collective call.

    ``rows`` has the number of queries and keys that the plan gives each rank.
    """
    signatures = [RankSignature(*numbers) for numbers in group.gather_numbers(signature, device)]
    problem = first_disagreement(signatures, rows)
    if problem:
        raise PeerMismatch(problem)
    agreed = agreements(group)
    if len(agreed) >= MAX_AGREED:
        agreed.clear()
    agreed[signature] = plan_digest


def report_invalid_inputs(group: ProcessGroupTransport, device: torch.device) -> None:
    """Take part in the handshake as a rank with invalid inputs: the other ranks then raise too instead of waiting."""
    group.gather_numbers(RankSignature(INVALID, *[0] * (len(RankSignature._fields) - 1)), device)


def first_disagreement(signatures: Sequence[RankSignature], rows: Iterable[tuple[int, int]]) -> str | None:
    """An error message for the first field that differs, the same on every rank; None if the ranks agree."""
    first = signatures[0]
    for rank, other in enumerate(signatures):
        if other.version == INVALID:
            return f"rank {rank} was called with invalid q, k and v; see the error it raised itself"
        for field in RankSignature._fields[:-2]:
            a, b = getattr(first, field), getattr(other, field)
            if a != b:
                name = "plan" if field == "digest" else field.replace("_", " ") if field != "score_mod" else field
                return (
                    f"the ranks disagree: rank 0 has {name} {_as_text(field, a)}, rank {rank} has {_as_text(field, b)}. "
                    "All ranks must call attention with the same plan, shapes, dtype and score_mod"
                )
    for rank, (other, (queries, keys)) in enumerate(zip(signatures, rows, strict=True)):
        for name, actual, planned in (("queries", other.queries, queries), ("keys", other.keys, keys)):
            if actual != planned:
                return (
                    f"rank {rank} has {actual} {name} where the plan says {planned}: "
                    "shard with cp.shard, or make a plan for these lengths"
                )
    return None


def digest_as_int64(digest: str) -> int:
    """A digest of sixteen hex digits as a signed 64-bit integer."""
    return int(digest, 16) - 2**63


def _as_text(field: str, value: int) -> str:
    if field == "score_mod" and value == NO_SCORE_MOD:
        return "None"
    if field in ("digest", "score_mod"):
        return f"{value + 2**63:016x}"
    return DTYPES[value] if field == "dtype" else str(value)
