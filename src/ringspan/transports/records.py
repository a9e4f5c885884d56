"""Records of the ranks in the store of their process group: in which call each rank is, and how it failed.

A rank writes its record only if a call fails or makes no progress for about a second, so the store is not used in
normal operation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from ringspan.transports.calls import CallDescription, Failure, GroupCalls, waiting_seconds

PREFIX = "ringspan"


class CallRecord(NamedTuple):
    """A call as other ranks see it."""

    description: CallDescription
    thread: str


class RankRecord(NamedTuple):
    """The call and the step that a rank is in."""

    number: int
    """The number of its last call."""
    label: str
    """The step that it is in; empty between calls."""
    waits_for: tuple[int, ...]
    """The ranks that it waits for."""
    waited: float
    """Seconds."""
    calls: dict[int, CallRecord]
    """Its last calls by number."""
    failure: Failure | None
    written: int
    """How many records the rank has written. A rank that makes no progress writes one every few seconds."""

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> RankRecord:
        data = json.loads(text)
        return cls(
            number=data["number"],
            label=data["label"],
            waits_for=tuple(data["waits_for"]),
            waited=data["waited"],
            calls={int(n): _call_record(*call) for n, call in data["calls"].items()},
            failure=None if data["failure"] is None else Failure(*data["failure"]),
            written=data["written"],
        )

    def where(self) -> str:
        """Describe where the rank is, for an error message."""
        if self.failure is not None and self.failure.number == self.number:
            return f"raised {self.failure.kind} in call {self.number}: {self.failure.text}"
        last = self.calls.get(self.number)
        call = f"call {self.number}" + (f", {last.description}" if last else "")
        if not self.label:
            return f"is in no call; its last was {call}" if self.number else "has made no call"
        if self.waits_for:
            names = ", ".join(map(str, self.waits_for))
            return f"waits for rank{'s' * (len(self.waits_for) > 1)} {names} in {self.label} of {call}"
        return f"is in {self.label} of {call}"


def record_of(calls: GroupCalls, written: int = 0) -> RankRecord:
    """Return the record of this rank."""
    current = calls.current
    return RankRecord(
        number=calls.number,
        label=current.label if current else "",
        waits_for=current.peers if current and current.waiting_since else (),
        waited=waiting_seconds(current),
        calls={call.number: CallRecord(call.description, call.thread) for call in list(calls.recent)},
        failure=calls.failure,
        written=written,
    )


def _call_record(description: list[Any], thread: str) -> CallRecord:
    kind, plan, scale, dtype, shape = description
    return CallRecord(CallDescription(kind, plan, scale, dtype, tuple(shape)), thread)


class Records:
    """The records of the ranks of one group. Every method may raise an error of the store."""

    def __init__(self, store: Any, global_ranks: tuple[int, ...], rank: int) -> None:
        self._store, self._rank = store, rank
        # The store is that of the process group. Meshes that number its ranks differently have records of their own.
        self._prefix = f"{PREFIX}/{'-'.join(map(str, global_ranks))}"
        self._written = 0

    def clear(self) -> None:
        """Delete a record that an earlier group of the same name may have left."""
        with suppress(RuntimeError, OSError, NotImplementedError):
            self._store.delete_key(f"{self._prefix}/{self._rank}")

    def write(self, calls: GroupCalls) -> None:
        self._written += 1
        self._store.set(f"{self._prefix}/{self._rank}", record_of(calls, self._written).to_json())

    def read(self, ranks: Iterable[int]) -> dict[int, RankRecord]:
        """Read the records of some ranks. Those that have written none are left out."""
        found = {}
        for rank in ranks:
            key = f"{self._prefix}/{rank}"
            if self._store.check([key]):  # get() would wait for the key
                found[rank] = RankRecord.from_json(self._store.get(key).decode())
        return found


def records_of(group: dist.ProcessGroup, global_ranks: tuple[int, ...], rank: int) -> Records | None:
    """Return the records of a group, or None if its backend has no store."""
    try:
        store = group.get_group_store()
    except (AttributeError, RuntimeError):
        return None
    return Records(store, global_ranks, rank)
