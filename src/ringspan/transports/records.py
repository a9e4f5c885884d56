"""Records of the ranks in the store of their process group: in which call each rank is, and how it failed.

A rank writes its record when a call fails, and every two seconds while it makes no progress: in a call that waits, or
between calls. While calls follow each other within a second the store is not used.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist

from ringspan.transports.calls import Call, CallDescription, Failure, GroupCalls, waiting_seconds

PREFIX = "ringspan"


class CallRecord(NamedTuple):
    """A call as other ranks see it."""

    description: CallDescription
    thread: str
    error: str | None = None
    """The error that ended it on this rank."""


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
    generation: int
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
            generation=data["generation"],
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


def record_of(calls: GroupCalls, written: int = 0, generation: int = 0) -> RankRecord:
    """Return the record of this rank."""
    current = calls.current
    return RankRecord(
        number=calls.number,
        label=current.label if current else "",
        waits_for=current.peers if current and current.waiting_since else (),
        waited=waiting_seconds(current),
        calls={call.number: CallRecord(call.description, call.thread, call.error) for call in list(calls.recent)},
        failure=calls.failure,
        generation=generation,
        written=written,
    )


def _call_record(description: list[Any], thread: str, error: str | None) -> CallRecord:
    read = CallDescription(*description)
    return CallRecord(read._replace(shape=tuple(read.shape)), thread, error)


class Records:
    """The records of the ranks of one group. Reading and writing may raise an error of the store.

    ``generation`` counts the groups that have had the same name in this store, as after a restart. Records of another
    generation are ignored.
    """

    def __init__(self, group: dist.ProcessGroup, global_ranks: tuple[int, ...], rank: int) -> None:
        self._group, self._rank = ref(group), rank
        # Meshes that number the ranks of a process group differently have records of their own.
        self._prefix = f"{PREFIX}/{'-'.join(map(str, global_ranks))}"
        self._generation = int(self._store().add(f"{self._prefix}/{rank}/generation", 1))
        self._written = 0
        self._written_calls: deque[int] = deque()  # the numbers of those that are still in the store

    @classmethod
    def of(cls, group: dist.ProcessGroup, global_ranks: tuple[int, ...], rank: int) -> Records | None:
        """Return the records of a group, or None if its backend has no store."""
        try:
            return cls(group, global_ranks, rank)
        except (AttributeError, RuntimeError, OSError):
            return None

    def write(self, calls: GroupCalls) -> None:
        self._written += 1
        self._store().set(f"{self._prefix}/{self._rank}", record_of(calls, self._written, self._generation).to_json())

    def read(self, ranks: Iterable[int]) -> dict[int, RankRecord]:
        """Read the records of some ranks. Those that have written none are left out."""
        store, found = self._store(), {}
        for rank in ranks:
            key = f"{self._prefix}/{rank}"
            if store.check([key]):  # get() would wait for the key
                record = RankRecord.from_json(store.get(key).decode())
                if record.generation == self._generation:
                    found[rank] = record
        return found

    def exchange_checksums(self, own: list[tuple[int, int]], peer: int) -> list[tuple[int, int]]:
        """Write the checksums of this rank, and read those of another; none if it has written none yet."""
        store, key = self._store(), f"{self._prefix}/%d/{self._generation}/checksums"
        store.set(key % self._rank, json.dumps(own))
        return [(n, checksum) for n, checksum in json.loads(store.get(key % peer))] if store.check([key % peer]) else []

    def write_call(self, call: Call) -> None:
        """Write the description of a call, and delete the one that was written before the last.

        The last may still be needed: this rank has read those of all ranks, but another rank may not have read this
        rank's. It has read the one before, because it wrote the last after that.
        """
        store, record = self._store(), CallRecord(call.description, call.thread)
        store.set(self._call_key(call.number, self._rank), json.dumps(record))
        self._written_calls.append(call.number)
        if len(self._written_calls) > 2:
            store.delete_key(self._call_key(self._written_calls.popleft(), self._rank))

    def read_call(self, number: int, rank: int) -> CallRecord | None:
        """Read the description of a call of another rank, or None if that rank has not begun it."""
        store, key = self._store(), self._call_key(number, rank)
        return _call_record(*json.loads(store.get(key).decode())) if store.check([key]) else None

    def _call_key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{rank}/{self._generation}/call {number}"

    def _store(self) -> Any:
        """Return the store of the group. It is not held: a new group on the same port would find the old store."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group.get_group_store()
