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

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ringspan.errors import PeerFailed, PeerMismatch
from ringspan.transports.process_group import ProcessGroupTransport
from ringspan.version import __version__

# What must be equal on all ranks before anything else: the release of ringspan.
VERSION = int.from_bytes(__version__.encode()[:7], "big")
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

MAX_LISTED = 8  # ranks, or values, that an error message lists


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
    plan_parts: Mapping[str, str],
) -> None:
    """Compare this rank's signature with those of all other ranks. This is a collective call.

    ``lengths`` has the number of queries and of keys that the plan gives each rank, and ``plan_parts`` describes what
    the plan was made from, by names, for an error message.
    """
    signatures = [RankSignature(*values) for values in group.all_gather_ints(signature, device, label=LABEL)]
    for rank, other in enumerate(signatures):
        if other.version == REFUSED:
            cause = group.describe_failure(rank) or "see the error it raised itself"
            raise PeerFailed(f"rank {rank} cannot make this call: {cause}")
    same_release = all(other.version == VERSION for other in signatures)
    if same_release and any(other.fitted_digest != signature.fitted_digest for other in signatures):
        raise PeerMismatch(plan_disagreement(_all_gather_parts(group, plan_parts, device)))
    problem = first_disagreement(signatures, lengths)
    if problem:
        raise PeerMismatch(problem)
    log.info("rank %d: the ranks agree on %s", group.rank, ", ".join(f"{name} {x}" for name, x in plan_parts.items()))
    agreed = agreements(group)
    if len(agreed) >= MAX_AGREED:
        agreed.clear()
    agreed[signature] = user_plan_digest


def report_refusal(group: ProcessGroupTransport, error: BaseException, device: torch.device) -> None:
    """Take part in the handshake as a rank that cannot make the call, so that the other ranks raise instead of
    waiting."""
    group.report_error(error)
    group.all_gather_ints(RankSignature(REFUSED, *[0] * (len(RankSignature._fields) - 1)), device, label=LABEL)


PART_LENGTH = 256  # characters of a part of a plan, in an error message
TEXT_BYTES = 4096  # of all parts, six of ASCII characters, of which JSON writes some as two


def _all_gather_parts(group: ProcessGroupTransport, parts: Mapping[str, str], device: torch.device) -> list[dict[str, str]]:
    """Return what the plan of each rank was made from. This is a collective call."""
    ascii_parts = {name: part.encode("ascii", "backslashreplace").decode()[:PART_LENGTH] for name, part in parts.items()}
    text = json.dumps(ascii_parts)
    encoded = list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b" "))
    gathered = group.all_gather_ints(encoded, device, label=LABEL)
    return [json.loads(bytes(values).decode(errors="replace")) for values in gathered]


def first_disagreement(signatures: Sequence[RankSignature], lengths: Iterable[tuple[int, int]]) -> str | None:
    """Return an error message for the first field that differs, the same on every rank; None if the ranks agree."""
    if len({of_rank.version for of_rank in signatures}) > 1:
        who = ranks_by_value([_release(of_rank.version) for of_rank in signatures])
        return f"the ranks run different releases of ringspan ({who}): install the same on all"
    for field in COMPARED_FIELDS:
        values = [_as_text(field, getattr(of_rank, field)) for of_rank in signatures]
        if len(set(values)) > 1:
            who = ranks_by_value([f"{FIELD_NAMES.get(field, field)} {value}" for value in values])
            return f"the ranks disagree: {who}. All ranks must call attention with the same plan, shapes, dtype and score_mod"
    for rank, (other, (queries, keys)) in enumerate(zip(signatures, lengths, strict=True)):
        for name, actual, planned in (("queries", other.queries, queries), ("keys", other.keys, keys)):
            if actual != planned:
                return f"rank {rank} has {actual} {name} where the plan says {planned}: {SHARD_ADVICE}"
    return None


def plan_disagreement(parts: Sequence[Mapping[str, str]]) -> str:
    """Return an error message for ranks whose plans differ. ``parts`` says for each rank what its plan was made from."""
    names = dict.fromkeys(name for of_rank in parts for name in of_rank)
    differing = [name for name in names if len({of_rank.get(name) for of_rank in parts}) > 1]
    by_name = [
        f"on the {name}: {ranks_by_value([of_rank.get(name, 'none') for of_rank in parts])}"
        for name in [name for name in differing if name != "plan"] or differing
    ]
    return (
        f"the ranks disagree {', and '.join(by_name)}. All ranks must make ContextParallel with the same mask (the same "
        "documents), layout, strategy, hardware, shape and dkv_dtype"
    )


def ranks_by_value(values: Sequence[str]) -> str:
    """Say which ranks have which value: first what most of them have, so that the others are the odd ones.

    >>> ranks_by_value(["heads 8", "heads 8", "heads 4", "heads 8"])
    'ranks 0, 1 and 3 have heads 8, rank 2 has heads 4'
    """
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    texts = []
    for value, having in sorted(ranks.items(), key=lambda item: -len(item[1])):
        listed = having if len(having) <= MAX_LISTED else [*having[: MAX_LISTED - 1], f"{len(having) - MAX_LISTED + 1} more"]
        who = f"rank {having[0]} has" if len(having) == 1 else f"ranks {', '.join(listed[:-1])} and {listed[-1]} have"
        texts.append(f"{who} {value}")
    return ", ".join(texts if len(texts) <= MAX_LISTED else [*texts[:MAX_LISTED], f"and {len(texts) - MAX_LISTED} more values"])


def digest_as_int64(digest: str) -> int:
    """Convert a digest of sixteen hex digits to a signed 64-bit integer.

    >>> int64_as_digest(digest_as_int64("9f2c00000000001a"))
    '9f2c00000000001a'
    """
    return int(digest, 16) - 2**63


def int64_as_digest(value: int) -> str:
    """Convert the integer of :func:`digest_as_int64` back to the digest."""
    return f"{value + 2**63:016x}"


def _release(version: int) -> str:
    """Return the beginning of a release from the integer that ranks compare."""
    return version.to_bytes(8, "big").strip(b"\0").decode(errors="replace")


def _as_text(field: str, value: int) -> str:
    if field == "score_mod" and value == NO_SCORE_MOD:
        return "None"
    if field in ("fitted_digest", "score_mod"):
        return int64_as_digest(value)
    return DTYPES[value] if field == "dtype" else str(value)
