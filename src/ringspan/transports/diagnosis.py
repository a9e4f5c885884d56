"""Diagnose why a rank waits: compare its record with those of the ranks that it waits for."""

from __future__ import annotations

from collections.abc import Mapping

from ringspan.errors import PeerFailed, PeerLost, PeerMismatch, PeerTimeout, TransportError
from ringspan.transports.calls import CallDescription
from ringspan.transports.records import CallRecord, RankRecord

# Errors that a rank passes on as they are, since they name the rank that caused them.
PASSED_ON = {cls.__name__: cls for cls in (PeerFailed, PeerLost, PeerMismatch, PeerTimeout)}

STORE_IS_LOST = (
    "the store of the process group does not answer either: the process that hosts it, that of rank 0 unless a launcher "
    "does, has probably ended, and the rank named here may only have closed its connections"
)

NO_FORWARD_CALL = (
    ". Compiled code, or a dispatch mode such as FlopCounterMode, does not know the forward call of a backward pass: run it on "
    "all ranks or on none"
)


def diagnose(rank: int, own: RankRecord, peers: Mapping[int, RankRecord]) -> TransportError | None:
    """Return an error if a peer will never send what this rank waits for; None if it may only be late.

    Two things are certain: a peer has raised in this call, or has closed its connections; or a call that both have
    counted is not the same call. A peer that is merely behind is no error.
    """
    for peer, record in sorted(peers.items()):
        failure = record.failure
        if failure is not None and (failure.number == own.number or (failure.is_final and failure.number < own.number)):
            return _error_of_peer(peer, record)
        call = record.calls.get(own.number)
        if call is not None and call.error is not None:  # the peer has raised again since
            return PeerFailed(f"rank {peer} raised in call {own.number} ({call.description}): {call.error}")
    for peer, record in sorted(peers.items()):
        difference = _first_difference(rank, own, peer, record)
        if difference is not None:
            return PeerMismatch(difference)
    return None


def _first_difference(rank: int, own: RankRecord, peer: int, record: RankRecord) -> str | None:
    for number in sorted(own.calls.keys() & record.calls.keys()):
        (low, mine), (high, theirs) = sorted([(rank, own.calls[number]), (peer, record.calls[number])])
        refused = [x.failure.number for x in (own, record) if x.failure is not None]
        if mine == theirs or number in refused or mine.error or theirs.error:
            continue  # a rank that refuses a call may not know all of its description
        return describe_difference(number, low, mine, high, theirs)
    return None


def describe_difference(number: int, rank: int, call: CallRecord, other_rank: int, other: CallRecord) -> str:
    """Return the error message for two ranks whose calls of this number differ."""
    pairs = zip((*call.description, call.thread), (*other.description, other.thread), strict=True)
    fields = [
        f.replace("forward_call", "the forward call")
        for f, (a, b) in zip((*CallDescription._fields, "thread"), pairs, strict=True)
        if a != b
    ]
    if fields[0] == "kind":  # the others mean something else for each kind
        del fields[1:]
    is_unknown = fields == ["the forward call"] and 0 in (call.description.forward_call, other.description.forward_call)
    return (
        f"the ranks make different calls: call {number} is {call.description} on rank {rank}, and {other.description} on "
        f"rank {other_rank}; they differ in {' and '.join(fields)}. All ranks must make the same calls in the same order"
        f"{NO_FORWARD_CALL * is_unknown}"
    )


def _error_of_peer(peer: int, record: RankRecord) -> TransportError:
    failure = record.failure
    assert failure is not None
    if failure.kind in PASSED_ON:
        text = failure.text if ": " in failure.text else f"rank {peer}: {failure.text}"
        return PASSED_ON[failure.kind](text)
    call = record.calls.get(failure.number)
    return PeerFailed(
        f"rank {peer} raised {failure.kind} in call {failure.number}{f' ({call.description})' if call else ''}: {failure.text}"
    )


def describe_ranks(records: Mapping[int, RankRecord], silent: Mapping[int, float | None]) -> str:
    """Describe where each rank is, one line a rank.

    ``silent`` has the ranks without a recent record, with the seconds since their last one, or None.
    """
    lines = [f"  rank {peer} {record.where()}" for peer, record in records.items() if peer not in silent]
    for peer, seconds in silent.items():
        since = "has written no record" if seconds is None else f"has written no record for {seconds:.0f} s"
        lines.append(f"  rank {peer} {since}: it has made no call yet, makes progress, or its process has ended or is stopped")
    return "\n".join(sorted(lines))
