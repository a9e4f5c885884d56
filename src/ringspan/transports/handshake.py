"""The handshake: an all-gather in which the ranks of a group compare the arguments of an attention call.

It runs for every call whose plan, shapes, dtype or score_mod are new to the group. If the ranks disagree, every rank
with valid inputs raises :class:`~ringspan.errors.PeerMismatch` with the same message. A rank that cannot make the call
(invalid inputs, no kernel for them) takes part and raises its own error. Without the handshake, NCCL would hang, and
gloo would abort the process or receive wrong data without an error.

A call has two plan digests. ``RankSignature.fitted_digest`` is that of the plan fitted to the number of heads
(``plan.for_heads``), which is the plan that runs. ``user_plan_digest`` is that of the user's plan before ``for_heads``.
It is known even if the inputs are invalid, so a rank uses it to find out whether the group has agreed on a call of that
plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ringspan.errors import PeerFailed, PeerMismatch
from ringspan.transports.process_group import ProcessGroupTransport

# The version of RankSignature. Raise it when a field changes its meaning: ranks that run different releases of ringspan
# then disagree in the handshake.
VERSION = 2
# Sent in place of VERSION by a rank that cannot make the call, before it raises. So no peer waits for that rank.
REFUSED = -1


class RankSignature(NamedTuple):
    """The arguments of one rank as integers. All fields but ``queries`` and ``keys`` must agree on all ranks."""

    version: int
    fitted_digest: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: int
    score_mod: int
    queries: int
    keys: int


COMPARED_FIELDS = tuple(field for field in RankSignature._fields if field not in ("queries", "keys"))

# The signatures that a group has agreed on, each with its user_plan_digest. The signatures of two ranks differ in
# queries and keys, but all ranks add an entry at the same call and clear all entries at the same call. Therefore either
# all ranks skip the handshake or none does.
Agreements: TypeAlias = dict[RankSignature, str]

# The agreements of each torch process group, by the global ranks of the transport in rank order. Two meshes can share a
# process group and number its ranks differently.
_agreements: WeakKeyDictionary[Any, dict[tuple[int, ...], Agreements]] = WeakKeyDictionary()
MAX_AGREED = 4096

LABEL = "the handshake"

log = logging.getLogger("ringspan.transports")

# What to do about tensors of a wrong length. ringspan.compat names its own functions instead.
SHARD_ADVICE = "shard with cp.shard, or make a plan for these lengths"
# RankSignature.dtype is an index into this tuple.
DTYPES = ("float16", "bfloat16", "float32", "float64")
NO_SCORE_MOD = 0

# How error messages name the fields whose own names are not plain words.
FIELD_NAMES = {"fitted_digest": "plan", "kv_heads": "kv heads", "head_dim": "head dim", "v_dim": "v dim"}


def agreements(group: ProcessGroupTransport) -> Agreements:
    """Return the agreements of the group so far. A call whose signature is among them needs no handshake."""
    return _agreements.setdefault(group.group, {}).setdefault(tuple(group.global_ranks), {})


def check_agreement(
    group: ProcessGroupTransport,
    signature: RankSignature,
    lengths: Iterable[tuple[int, int]],
    device: torch.device,
    *,
    user_plan_digest: str,
    plan_text: str = "",
) -> None:
    """Compare this rank's signature with those of all other ranks. This is a collective call.

    ``lengths`` has the number of queries and of keys that the plan gives each rank, and ``plan_text`` describes the
    plan in an error message.
    """
    signatures = [RankSignature(*values) for values in group.all_gather_ints(signature, device, label=LABEL)]
    for rank, other in enumerate(signatures):
        if other.version == REFUSED:
            cause = group.describe_failure(rank) or "see the error it raised itself"
            raise PeerFailed(f"rank {rank} cannot make this call: {cause}")
    if plan_text and any(other.fitted_digest != signature.fitted_digest for other in signatures):
        texts = _all_gather_text(group, plan_text, device)
        rank = next(r for r, other in enumerate(signatures) if other.fitted_digest != signatures[0].fitted_digest)
        raise PeerMismatch(
            f"the ranks disagree on the plan: rank 0 has {texts[0]}, rank {rank} has {texts[rank]}. All ranks must make "
            "ContextParallel with the same mask (the same documents), layout, strategy, hardware, shape and dkv_dtype"
        )
    problem = first_disagreement(signatures, lengths)
    if problem:
        raise PeerMismatch(problem)
    log.info("rank %d: the ranks agree on %s", group.rank, plan_text or user_plan_digest)
    agreed = agreements(group)
    if len(agreed) >= MAX_AGREED:
        agreed.clear()
    agreed[signature] = user_plan_digest


def report_refusal(group: ProcessGroupTransport, error: BaseException, device: torch.device) -> None:
    """Take part in the handshake as a rank that cannot make the call, so that the other ranks raise instead of
    waiting."""
    group.report_error(error)
    group.all_gather_ints(RankSignature(REFUSED, *[0] * (len(RankSignature._fields) - 1)), device, label=LABEL)


TEXT_BYTES = 512


def _all_gather_text(group: ProcessGroupTransport, text: str, device: torch.device) -> list[str]:
    """Return the text of every rank, shortened. This is a collective call."""
    encoded = list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b" "))
    return [bytes(values).decode(errors="replace").rstrip() for values in group.all_gather_ints(encoded, device, label=LABEL)]


def first_disagreement(signatures: Sequence[RankSignature], lengths: Iterable[tuple[int, int]]) -> str | None:
    """Return an error message for the first field that differs, the same on every rank; None if the ranks agree."""
    first = signatures[0]
    for rank, other in enumerate(signatures):
        for field in COMPARED_FIELDS:
            expected, actual = getattr(first, field), getattr(other, field)
            if actual != expected:
                name = FIELD_NAMES.get(field, field)
                return (
                    f"the ranks disagree: rank 0 has {name} {_as_text(field, expected)}, rank {rank} has "
                    f"{_as_text(field, actual)}. "
                    "All ranks must call attention with the same plan, shapes, dtype and score_mod"
                )
    for rank, (other, (queries, keys)) in enumerate(zip(signatures, lengths, strict=True)):
        for name, actual, planned in (("queries", other.queries, queries), ("keys", other.keys, keys)):
            if actual != planned:
                return f"rank {rank} has {actual} {name} where the plan says {planned}: {SHARD_ADVICE}"
    return None


def digest_as_int64(digest: str) -> int:
    """Convert a digest of sixteen hex digits to a signed 64-bit integer.

    >>> int64_as_digest(digest_as_int64("9f2c00000000001a"))
    '9f2c00000000001a'
    """
    return int(digest, 16) - 2**63


def int64_as_digest(value: int) -> str:
    """Convert the integer of :func:`digest_as_int64` back to the digest."""
    return f"{value + 2**63:016x}"


def _as_text(field: str, value: int) -> str:
    if field == "score_mod" and value == NO_SCORE_MOD:
        return "None"
    if field in ("fitted_digest", "score_mod"):
        return int64_as_digest(value)
    return DTYPES[value] if field == "dtype" else str(value)
