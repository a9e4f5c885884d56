"""The watchdog: a thread that checks calls in which a rank waits for long.

A rank that waits for a message cannot do anything else. So one background thread per process checks the calls of all
groups every 0.4 s. It acts only on a group whose rank has made no progress for a second: it writes the record of the
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
from functools import partial
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

from ringspan.errors import PeerMismatch, PeerTimeout, TransportError
from ringspan.transports.bounded import BoundedCalls
from ringspan.transports.calls import Call, Failure, GroupCalls, waiting_seconds
from ringspan.transports.diagnosis import STORE_IS_LOST, describe_difference, describe_ranks, diagnose
from ringspan.transports.records import CallRecord, RankRecord, Records, record_of

NO_PROGRESS_LIMIT = 1.0  # seconds without progress before a rank writes its record
PERIOD = 0.4  # seconds between two checks
REPEAT = 2.0  # seconds between two records of a rank that makes no progress
CHECKSUM_PERIOD = 2.0  # seconds between two comparisons of checksums, on a backend without tags
NO_RECORD_LIMIT = 6.0  # seconds after which the last record of a peer is too old to say where the peer is

STORE_LIMIT = 4.0  # seconds to wait for the store
RECORD_DELAY = 1.5  # seconds within which a rank whose wait has timed out writes its record
COMPARISON_PERIOD = 0.002  # seconds between two reads of the store, while calls are compared

CLOSING = 1  # the tag of a receive that is meant to time out

log = logging.getLogger("ringspan.transports")


class WatchedGroup:
    """A group whose calls the watchdog checks. Holds the process group weakly."""

    def __init__(self, group: dist.ProcessGroup, global_ranks: tuple[int, ...], rank: int, calls: GroupCalls) -> None:
        self.calls, self.rank, self.global_ranks = calls, rank, global_ranks
        self._group = ref(group)
        self._has_tags = all(entry.endswith("gloo") for entry in dist.get_backend_config(group).split(","))
        if not self._has_tags:
            calls.keep_checksums()
        self._records: Records | None = Records.of(group, global_ranks, rank)
        # The store is used by the watchdog, and by a rank that fails. It waits without a limit if the network is down.
        self._store = BoundedCalls("the store of the process group", STORE_LIMIT)
        self.store_answers = True
        """Whether the last attempt to read records has succeeded."""
        self._failing = threading.Lock()
        self._position: tuple[object, ...] = ()
        self._position_since = 0.0
        self._written_at = 0.0
        self._compared_at, self._compared_call = 0.0, 0  # when checksums were compared, and the number of the last
        self._last_records: dict[int, tuple[int, float]] = {}  # rank -> the number of its last record, and when it was read

    # -- in the watchdog's thread ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Write a record if this rank makes no progress, and end a wait for a message that will never come."""
        calls, now = self.calls, time.monotonic()
        if calls.checksums and now - self._compared_at >= self._checksum_period:
            self._compared_at = now
            self._compare_checksums(list(calls.checksums))
        current = calls.current
        position = (calls.number, current.label if current else "", current.waiting_since if current else None, calls.failure)
        if position != self._position:
            self._position, self._position_since, self._written_at = position, now, 0.0
            return
        if now - self._position_since < NO_PROGRESS_LIMIT - PERIOD or not calls.number:
            return
        if now - self._written_at >= REPEAT:
            self._written_at = now
            self._write()
        if current is not None and waiting_seconds(current) >= NO_PROGRESS_LIMIT and calls.group_error is None:
            error = self.diagnose(current.peers)
            if error is not None and calls.current is current:
                self.fail_group(error)
        elif calls.group_error is None and not self._has_tags:
            self._compare_past_calls()

    def _compare_past_calls(self) -> None:
        """Compare past calls on a backend without tags (NCCL), where a rank may have received messages of another call.

        Calls over NCCL return before their messages arrive. The host waits later, when the program synchronises with
        the device. The watchdog cannot end that wait, so the next call raises the error.
        """
        error = self.diagnose(tuple(rank for rank in range(len(self.global_ranks)) if rank != self.rank))
        if isinstance(error, PeerMismatch):
            self.fail_group(error)

    @property
    def _checksum_period(self) -> float:
        """Seconds between two comparisons. One store serves all ranks, so larger groups compare less often."""
        return max(CHECKSUM_PERIOD, len(self.global_ranks) / 100)

    def _compare_checksums(self, own: list[tuple[int, int]]) -> None:
        """Compare the checksums of the calls so far with those of the next rank, on a backend without tags.

        It finds calls that differed although their messages had equal sizes, so that no rank had to wait.
        """
        if self._records is None or self.calls.group_error is not None or own[-1][0] == self._compared_call:
            return
        peer = (self.rank + 1) % len(self.global_ranks)
        try:
            theirs = dict(self._store.run(partial(self._records.exchange_checksums, own, peer)))
        except (RuntimeError, OSError) as error:
            log.debug("rank %d cannot compare its calls: %s", self.rank, error)
            return
        same, common = 0, [(number, checksum == theirs[number]) for number, checksum in own if number in theirs]
        self._compared_call = max((number for number, _ in common), default=0)
        for number, is_same in common:
            if not is_same:
                low, high = sorted((self.rank, peer))
                since = f"after call {same}" if same else "at some time"
                text = (
                    f"rank {low} and rank {high} have made different calls {since}, and before call {number + 1}: results "
                    "since then are wrong. All ranks must make the same calls in the same order. RINGSPAN_DEBUG=1 names it"
                )
                self.fail_group(PeerMismatch(text), since=same)
                return
            same = number

    # -- in either thread --------------------------------------------------------------------------------------------

    def diagnose(self, peers: tuple[int, ...]) -> TransportError | None:
        """Return an error if one of these ranks will never send its message."""
        try:
            return diagnose(self.rank, record_of(self.calls), self._read(peers))
        except (RuntimeError, OSError) as error:  # the messages may still come
            log.debug("rank %d cannot read the store of the process group: %s", self.rank, error)
            return None

    def await_failure(self, peers: tuple[int, ...]) -> TransportError | None:
        """Return the error of a peer whose connection is lost, if it has closed the connection itself.

        gloo closes the connections of a rank whose wait times out, and that rank writes its record afterwards. Such a
        rank has already written a record which says that it waits. A rank that was killed has not: then there is
        nothing to wait for.
        """
        end = time.monotonic() + RECORD_DELAY
        while any(record.waits_for for record in self._try_read(peers).values()):
            error = self.diagnose(peers)
            if error is not None or time.monotonic() > end:
                return error
            time.sleep(PERIOD / 8)
        return self.diagnose(peers)

    def fail_group(self, error: TransportError, *, since: int | None = None) -> None:
        """Make ``error`` the error of the group, tell the other ranks, and close the connections.

        ``since`` is the last call that was not affected, if the error is not of the current call.
        """
        calls = self.calls
        with self._failing:
            if calls.group_error is not None:
                return
            # A copy: the traceback of the error that is raised holds the tensors of the call.
            calls.group_error = type(error)(str(error))
            current = calls.current
            if since is not None:
                calls.failure = Failure(since, type(error).__name__, str(error), is_final=True)
            elif current is not None:
                calls.fail(current, error, is_final=True)
        log.error("rank %d: %s: %s", self.rank, type(error).__name__, error)
        self._write()
        self.close_connections()

    def compare_call(self, call: Call, seconds: float) -> None:
        """Compare a call with the calls of this number on all other ranks. Every rank raises if two of them differ.

        It goes through the store, so that it does not depend on messages that may not match.
        """
        records, deadline = self._records, time.monotonic() + seconds
        if records is None:
            return
        own = CallRecord(call.description, call.thread)
        self._store.run(partial(records.write_call, call))
        found = {self.rank: own}
        while len(found) < len(self.global_ranks):
            for peer in call.peers:
                if peer not in found:
                    theirs = self._store.run(partial(records.read_call, call.number, peer))
                    if theirs is not None:
                        found[peer] = theirs
            if self.calls.group_error is not None:
                raise type(self.calls.group_error)(str(self.calls.group_error))
            if time.monotonic() > deadline:
                missing = tuple(peer for peer in call.peers if peer not in found)
                raise PeerTimeout(
                    f"rank {self.rank}: timed out comparing call {call.number} ({call.description}) with ranks "
                    f"{', '.join(map(str, missing))}\n{self.describe_peers(missing)}"
                )
            time.sleep(COMPARISON_PERIOD)
        for peer in sorted(found):
            if found[peer] != found[0]:
                raise PeerMismatch(describe_difference(call.number, 0, found[0], peer, found[peer]))

    def report_failure(self) -> None:
        """Tell the other ranks that this rank has raised."""
        self._write()

    def describe_failure(self, rank: int) -> str | None:
        """Describe the last error of another rank, if that rank has reported one."""
        record = self._try_read((rank,)).get(rank)
        failure = None if record is None else record.failure
        return None if failure is None else f"{failure.kind}: {failure.text}"

    def _try_read(self, peers: tuple[int, ...]) -> dict[int, RankRecord]:
        try:
            return self._read(peers)
        except (RuntimeError, OSError):
            return {}

    def describe_peers(self, peers: tuple[int, ...]) -> str:
        """Describe where these ranks are, one line a rank."""
        try:
            found = self._read(peers)
        except (RuntimeError, OSError):
            return ""
        now = time.monotonic()
        silent: dict[int, float | None] = {}
        for peer in peers:
            if peer not in found:
                silent[peer] = None
            elif now - self._last_records[peer][1] > NO_RECORD_LIMIT:
                silent[peer] = now - self._last_records[peer][1]
        return describe_ranks(found, silent)

    def describe_lost(self, peers: tuple[int, ...]) -> str:
        """Describe the last calls of ranks whose connection is lost, if they have written them, one line a rank.

        A rank that makes progress writes no record, so an old one says little: it may have made many calls since. A
        rank cannot have made many more calls than this one, so a record of a call before the last is old.
        """
        found = self._try_read(peers)
        if not self.store_answers:
            return STORE_IS_LOST
        own = self.calls.number
        when = f"in its last record; this rank is in call {own}"
        return "\n".join(f"  rank {peer} {x.where()} ({when})" for peer, x in found.items() if x.number >= own - 1)

    def close_connections(self) -> None:
        """Close the connections of gloo to all peers, so that no rank waits for this one any longer.

        A receive that times out makes gloo close them. One from a peer whose connection is closed already fails at once
        and leaves the others open, so all peers are tried.
        """
        group = self._group()
        if group is None or "gloo" not in dist.get_backend_config(group):
            return
        for peer in self.global_ranks:
            if peer != self.global_ranks[self.rank]:
                with suppress(RuntimeError, ValueError):
                    work = dist.irecv(torch.empty(1), peer, group=group, tag=CLOSING)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))

    def _write(self) -> None:
        if self._records is not None:
            with suppress(RuntimeError, OSError):
                self._store.run(partial(self._records.write, self.calls))

    def _read(self, peers: tuple[int, ...]) -> dict[int, RankRecord]:
        if self._records is None:
            return {}
        try:
            found = self._store.run(partial(self._records.read, peers))
        except (RuntimeError, OSError):
            self.store_answers = False
            raise
        self.store_answers = True
        now = time.monotonic()
        for peer, record in found.items():
            if self._last_records.get(peer, (None, 0.0))[0] != record.written:
                self._last_records[peer] = (record.written, now)
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

    def groups(self) -> list[WatchedGroup]:
        """Return the groups that are in use."""
        with self._lock:
            return list(self._groups)

    def end(self) -> None:
        """Stop the thread, before the interpreter ends. A thread that returned from C++ later would abort the
        process."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _loop(self) -> None:
        while not self._ends.wait(PERIOD):
            groups = self.groups()
            for group in groups:
                try:
                    group.check()
                except Exception:  # the watchdog must outlive an error of one group
                    log.exception("the watchdog failed")
                del group  # else the last one would be kept
            del groups


watchdog = Watchdog()
atexit.register(watchdog.end)


# By process group, and by the global ranks in rank order: two meshes can share a process group and number it
# differently.
_states: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], WatchedGroup]] = WeakKeyDictionary()
_states_lock = threading.Lock()


def group_state(group: dist.ProcessGroup, global_ranks: tuple[int, ...], rank: int) -> WatchedGroup:
    """Return the watched state of a group. All transports with the same group and order of ranks share it."""
    with _states_lock:
        by_ranks = _states.setdefault(group, {})
        if global_ranks not in by_ranks:
            by_ranks[global_ranks] = state = WatchedGroup(group, global_ranks, rank, GroupCalls())
            if len(global_ranks) > 1:
                watchdog.add(state)
        return by_ranks[global_ranks]
