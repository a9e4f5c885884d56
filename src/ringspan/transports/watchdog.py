"""The watchdog: a thread that diagnoses calls in which a rank makes no progress.

A rank that waits for a message cannot do anything else. So one background thread per process checks the calls of all
groups twice a second. It acts only on a group whose rank has made no progress for a second: it writes the record of the
rank to the store of the group. If the rank waits for peers, it also reads their records. If these show that a message
will never come, the thread closes the connections of the group, which ends the wait with an error, here and on the
peers. The error says what the thread has found::

    main thread        call 7, waits for rank 1 ────────────────────────────── raises PeerMismatch
    watchdog                        1 s later: write, read ── diagnose ── close ┘
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from contextlib import suppress
from datetime import timedelta
from weakref import WeakSet, ref

import torch
import torch.distributed as dist

from ringspan.errors import PeerLost, TransportError
from ringspan.transports.calls import GroupCalls, waiting_seconds
from ringspan.transports.diagnosis import describe_ranks, diagnose
from ringspan.transports.records import RankRecord, Records, record_of, records_of

PATIENCE = 1.0  # seconds without progress before a rank writes its record
PERIOD = 0.4  # seconds between two checks
REPEAT = 2.0  # seconds between two records of a rank that makes no progress
SILENT = 6.0  # seconds without a record after which a rank that makes no progress is called silent

CLOSING = 1  # the tag of a receive that is meant to time out

log = logging.getLogger("ringspan.transports")


class WatchedGroup:
    """A group whose calls the watchdog checks. Holds the process group weakly."""

    def __init__(self, group: dist.ProcessGroup, global_ranks: tuple[int, ...], rank: int, calls: GroupCalls) -> None:
        self.calls, self.rank, self.global_ranks = calls, rank, global_ranks
        self._group = ref(group)
        self._records: Records | None = records_of(group, global_ranks, rank)
        if self._records is not None:
            self._records.clear()
        self._lock = threading.Lock()  # the store is used by the watchdog, and by a rank that fails
        self._position: tuple[object, ...] = ()
        self._position_since = 0.0
        self._written_at = 0.0
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> the number of its last record, and when it was read

    # -- in the watchdog's thread ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Write a record if this rank makes no progress, and end a wait for a message that will never come."""
        calls, now = self.calls, time.monotonic()
        current = calls.current
        position = (calls.number, current.label if current else "", current.waiting_since if current else None, calls.failure)
        if position != self._position:
            self._position, self._position_since, self._written_at = position, now, 0.0
            return
        if now - self._position_since < PATIENCE - PERIOD or not calls.number:
            return
        if now - self._written_at >= REPEAT:
            self._written_at = now
            self._write()
        if current is not None and waiting_seconds(current) >= PATIENCE and calls.verdict is None:
            error = self.diagnose(current.peers)
            if error is not None and calls.current is current:
                self.give_up(error)

    def diagnose(self, peers: tuple[int, ...]) -> TransportError | None:
        """Return an error if one of these ranks will never send its message."""
        try:
            return diagnose(self.rank, record_of(self.calls), self._read(peers))
        except (RuntimeError, OSError) as error:
            host = "the process that hosts it has ended or cannot be reached"
            return PeerLost(f"rank {self.rank}: the store of the process group does not respond: {host} ({error})")

    # -- in either thread --------------------------------------------------------------------------------------------

    def give_up(self, error: TransportError) -> None:
        """Make ``error`` the error of the group, tell the other ranks, and close the connections."""
        calls = self.calls
        if calls.verdict is None:
            calls.verdict = error
            if calls.current is not None:
                calls.fail(calls.current, error, is_final=True)
            self._write()
            self.close_connections()

    def report_failure(self) -> None:
        """Tell the other ranks that this rank has raised."""
        self._write()

    def describe_peers(self, peers: tuple[int, ...]) -> str:
        """Describe where these ranks are, one line a rank."""
        try:
            found = self._read(peers)
        except (RuntimeError, OSError):
            return ""
        now = time.monotonic()
        missing: dict[int, float | None] = {}
        for peer in peers:
            if peer not in found:
                missing[peer] = None
            elif now - self._heard[peer][1] > SILENT:
                missing[peer] = now - self._heard[peer][1]
        return describe_ranks(found, missing)

    def close_connections(self) -> None:
        """Close the connections of gloo to all peers, so that no rank waits for this one any longer.

        A receive that times out makes gloo close them. One from a peer whose connection is closed already fails at once
        and leaves the others open, so all peers are tried.
        """
        group = self._group()
        if group is None or dist.get_backend(group) != "gloo":
            return
        for peer in self.global_ranks:
            if peer != self.global_ranks[self.rank]:
                with suppress(RuntimeError, ValueError):
                    work = dist.irecv(torch.empty(1), peer, group=group, tag=CLOSING)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))

    def _write(self) -> None:
        if self._records is not None:
            with self._lock, suppress(RuntimeError, OSError):
                self._records.write(self.calls)

    def _read(self, peers: tuple[int, ...]) -> dict[int, RankRecord]:
        if self._records is None:
            return {}
        with self._lock:
            found = self._records.read(peers)
        now = time.monotonic()
        for peer, record in found.items():
            if self._heard.get(peer, (None, 0.0))[0] != record.written:
                self._heard[peer] = (record.written, now)
        return found


class Watchdog:
    """The thread, started when the first group is added."""

    def __init__(self) -> None:
        self._groups: WeakSet[WatchedGroup] = WeakSet()
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, group: WatchedGroup) -> None:
        """Check a group as long as it is referenced elsewhere."""
        with self._lock:
            self._groups.add(group)
            if self._thread is None or not self._thread.is_alive():  # a forked process has no threads
                self._thread = threading.Thread(target=self._loop, name="ringspan-watchdog", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Stop the thread, before the interpreter ends. A thread that returned from C++ later would abort the
        process."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _loop(self) -> None:
        while not self._ends.wait(PERIOD):
            with self._lock:
                groups = list(self._groups)
            for group in groups:
                try:
                    group.look()
                except Exception:  # the watchdog must outlive an error of one group
                    log.exception("the watchdog failed")
            del groups


watchdog = Watchdog()
atexit.register(watchdog.end)
