"""Numbered calls: what ties a message to the call that sent it.

Each pass of attention and each collective is one *call* of a group. Every rank counts its calls. The number of a call
and its description (kind, plan, scale, dtype, shape) go into the tag of each of its messages. So a message can only be
received by the same call of its peer. If one rank skips a call, makes another one or uses another scale, its messages
match nothing::

    rank 0   call 7 forward, plan A      call 8 backward, plan A     waits: no message has its tag
    rank 1   call 7 forward, plan A      call 8 forward, plan B      waits: no message has its tag

:mod:`ringspan.transports.watchdog` then compares the descriptions and both ranks raise.
"""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple
from weakref import WeakSet, ref

from ringspan.errors import InputError, TransportError

HISTORY = 64  # calls, and exchanges, that a rank remembers
LARGEST_TAG = 2**31 - 1
CHECKSUM_CALLS = 16  # calls between two checksums of a group without tags
CHECKSUMS = 256  # that a rank keeps
NUMBERED = re.compile(r"^(Thread|Dummy|ThreadPoolExecutor|asyncio)[-_]\d+(_\d+)?")  # the names that Python gives to threads


class CallDescription(NamedTuple):
    """What must be equal on all ranks of a call."""

    kind: str
    """"forward", "backward", "unshard", …"""
    plan: str = ""
    """The digest of the plan."""
    scale: float | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """The sizes that are equal on all ranks."""
    options: str = ""
    """What else must be equal, in words: the layout of an unshard, the parameters of sum_gradients, …"""
    score_mod: str = ""
    """The digest of its code and constants."""
    forward_call: int = 0
    """Of a backward pass: the number of the call whose gradients it computes. 0: unknown, in compiled code and
    under a dispatch mode."""
    values: str = ""
    """Under ``RINGSPAN_DEBUG=1``, the digest of the tensors and globals that a score_mod or mask_mod uses."""

    def __str__(self) -> str:
        parts = [self.kind]
        if self.forward_call:
            parts.append(f"of call {self.forward_call},")
        if self.plan:
            parts.append(f"of plan {self.plan}")
        details = [f"scale {self.scale:.6g}"] if self.scale is not None else []
        details += [x for x in (self.options, self.dtype) if x]
        if self.plan and len(self.shape) == 5:
            batch, heads, kv_heads, head_dim, v_dim = self.shape
            details.append(f"batch {batch}, {heads} heads, {kv_heads} kv heads, head dim {head_dim}, value dim {v_dim}")
        elif self.shape:
            details.append(f"shape {'×'.join(map(str, self.shape))}")
        details += [f"score_mod {self.score_mod}"] if self.score_mod else []
        if self.values:
            details.append(f"values of its functions {self.values}")
        return " ".join(parts) + (f" ({', '.join(details)})" if details else "")


class CallPair:
    """A forward pass, and the backward passes that follow from it: ties these to the number of its call.

    Layers can be equal, and a rank could differentiate them in another order than its peers.
    """

    forward_call = 0
    """0: the forward pass has not begun."""


class ExchangeRecord:
    """One exchange of this rank, for the flight recorder."""

    __slots__ = ("done", "label", "number", "peers", "posted", "received", "sent")

    def __init__(self, number: int, label: str, peers: list[int], sent: int, received: int) -> None:
        self.number, self.label, self.peers = number, label, peers
        self.sent, self.received = sent, received
        """Bytes."""
        self.posted, self.done = time.time(), 0.0
        """Seconds since the epoch, so that the records of several ranks can be merged. 0.0: it has not ended."""


class Failure(NamedTuple):
    """An error that ended a call on one rank."""

    number: int
    """The number of the call."""
    kind: str
    """The name of the exception class."""
    text: str
    is_final: bool
    """Whether the connections of the group are closed: no later call can succeed."""


class Call:
    """One call on this rank."""

    __slots__ = ("__dict__", "description", "error", "label", "number", "peers", "thread", "waiting_since")

    def __init__(self, number: int, description: CallDescription, thread: str) -> None:
        self.number, self.description, self.thread = number, description, thread
        self.label = str(description.kind)
        self.peers: tuple[int, ...] = ()
        self.error: str | None = None
        self.waiting_since: float | None = None

    @cached_property
    def checksum(self) -> int:
        return zlib.crc32(f"{self.number} {tuple(self.description)} {self.thread}".encode())

    def tag(self, label: str, nbytes: int) -> int:
        """Return the tag of a message of this call. It depends on the size: gloo aborts if a message is too long."""
        return (zlib.crc32(label.encode(), self.checksum) + nbytes) % LARGEST_TAG


class _Refusal(threading.local):
    reason: str | None = None


_refusal = _Refusal()


@contextmanager
def refuse_calls(reason: str) -> Iterator[None]:
    """Raise an :class:`InputError` with this reason at every call that this thread makes on a group of several
    ranks."""
    _refusal.reason = reason
    try:
        yield
    finally:
        _refusal.reason = None


class GroupCalls:
    """The calls that this process makes on one group, one at a time."""

    def __init__(self) -> None:
        self.number = 0
        self.current: Call | None = None
        self.recent: deque[Call] = deque(maxlen=HISTORY)
        self.exchanges: deque[ExchangeRecord] = deque(maxlen=HISTORY)
        self.failure: Failure | None = None
        """The last error of this rank."""
        self.group_error: TransportError | None = None
        """Why the group can no longer be used."""
        self.checksums: deque[tuple[int, int]] | None = None
        """For a backend without tags: the number of a call, and a checksum of all calls up to it."""
        self.checksum = 0
        """That of all calls which have ended, for a backend without tags."""
        self._first_thread: ref[threading.Thread] | None = None
        # By the name that other ranks know: the last thread of that name, its own name, and the threads that lived when it
        # made its call. Held weakly: a thread can hold tensors.
        self._threads: dict[str, tuple[ref[threading.Thread], str, WeakSet[threading.Thread]]] = {}
        self._lock = threading.Lock()

    def keep_checksums(self) -> None:
        """Keep checksums of the calls from now on, to be compared with those of other ranks."""
        self.checksums = deque(maxlen=CHECKSUMS)

    def begin(self, description: CallDescription) -> Call:
        """Count a call. Raises if the group has failed before, or if another thread is in a call of it."""
        if _refusal.reason is not None:
            raise InputError(_refusal.reason)
        with self._lock:
            thread, namesake = self._name_of_thread()
            if self.group_error is not None:
                raise type(self.group_error)(f"{self.group_error}. This group cannot be used any more: make a new one")
            name, wrong = threading.current_thread().name, ""
            if self.current is not None:
                wrong = (
                    f"thread {name} begins {description} while another thread is in {self.current.description} on the same "
                    "process group: their messages could be mixed up. Give each thread a group of its own (dist.new_group)"
                )
            elif namesake is not None:
                wrong = (
                    f"thread {name} begins {description}, and thread {namesake} has used the same process group: other ranks "
                    "cannot tell them apart (numbers that Python gives to threads do not count), and may make their calls in "
                    "another order. Use one thread (an executor with max_workers=1), or give the threads different names, the "
                    "same on all ranks, or each a group of its own (dist.new_group)"
                )
            if wrong:
                error = InputError(wrong)
                # The other ranks may have begun this call, so that no later one can match.
                self.group_error = TransportError(str(error))
                self.failure = Failure(self.number + 1, "InputError", str(error), is_final=True)
                raise error
            self.number += 1
            self.current = call = Call(self.number, description, thread)
            self.recent.append(call)
        return call

    def _name_of_thread(self) -> tuple[str, str | None]:
        """Return a name of this thread that is the same on all ranks, and another thread that cannot be told from it.

        The name is empty for the first thread that uses the group. Others are told apart by their names, without the
        numbers that Python gives to threads as they are started. Two threads of one name can make their calls in
        another order on each rank, unless the one has ended, and the other was not yet started when it made its last
        call. PyTorch's own threads, of the backward pass, are one for each device.
        """
        thread, namesake = threading.current_thread(), None
        if self._first_thread is None:
            self._first_thread = ref(thread)
        name = NUMBERED.sub(r"\1", thread.name)
        if thread is not threading.main_thread() and name != "Dummy":
            last, last_name, lived = self._threads.get(name, (ref(thread), "", ()))
            self._threads[name] = ref(thread), thread.name, WeakSet(threading.enumerate())
            other = last()
            if other is not thread and (thread in lived or (other is not None and other.is_alive())):
                namesake = last_name
        return "" if self._first_thread() is thread else name, namesake

    def end(self) -> None:
        """End the current call. One that failed is no part of the checksums: a rank that refuses a call may not know
        all of its description."""
        call, self.current = self.current, None
        if self.checksums is not None and call is not None and call.error is None:
            self.checksum = self.checksum_with(call)
            if call.number % CHECKSUM_CALLS == 0:
                self.checksums.append((call.number, self.checksum))

    def checksum_with(self, call: Call) -> int:
        """Return the checksum of all calls that have ended, and this one."""
        return zlib.crc32(call.checksum.to_bytes(4, "little"), self.checksum)

    def fail(self, call: Call, error: BaseException, *, is_final: bool = False) -> None:
        """Remember an error, for the other ranks."""
        self.failure = Failure(call.number, type(error).__name__, _first_line(error), is_final)
        call.error = f"{self.failure.kind}: {self.failure.text}"
        _mark(error)

    def fail_next(self, error: BaseException) -> None:
        """Remember an error that ends the next call."""
        self.failure = Failure(self.number + 1, type(error).__name__, _first_line(error), is_final=False)
        _mark(error)


def waiting_seconds(call: Call | None) -> float:
    """Return how long a call has waited for its peers; 0.0 while it computes."""
    since = None if call is None else call.waiting_since
    return 0.0 if since is None else time.monotonic() - since


def is_known_to_peers(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, has ended a call of a group or came from its communication."""
    while error is not None:
        if isinstance(error, TransportError) or getattr(error, "ringspan_reported", False):
            return True
        error = error.__cause__
    return False


def _mark(error: BaseException) -> None:
    error.ringspan_reported = True  # type: ignore[attr-defined]


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else ""
