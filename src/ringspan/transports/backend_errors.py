"""Classify errors of a communication backend: the connection to a peer is lost, a wait has timed out, or neither.

gloo raises a plain ``RuntimeError``, NCCL and the store a ``torch.distributed.DistError``. Both describe the cause only
in their message. Examples, gloo's as seen with torch 2.13, NCCL's from public bug reports:

    lost     [...pair.cc:547] Connection closed by peer [10.0.0.2]:1234
             [...pair.cc:538] Read error [10.0.0.2]:1234: Connection reset by peer
             NCCL error in: ..., remote process exited or there was a network error, NCCL version 2.20.5
    timeout  [...unbound_buffer.cc:129] Timed out waiting 1000ms for recv operation to complete
             [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, ..., Timeout(ms)=600000) ran for
             600011 milliseconds before timing out.
    neither  Invalid scalar type
             No backend type associated with device type meta
             NCCL error in: ..., unhandled cuda error, NCCL version 2.20.5
             NCCL communicator was aborted on rank 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch.distributed as dist

from ringspan.errors import PeerLost, PeerTimeout, TransportError

# NCCL prints the time limit, "Timeout(ms)=600000", whatever the error is.
TIMED_OUT = re.compile(r"timed out|timing out|\btimeout\b(?!\(ms\))", re.IGNORECASE)

CONNECTION_LOST = re.compile(
    r"connection (was |likely )*closed|connection reset|connection refused|connection aborted|broken pipe|socket closed"
    r"|remote process exited|ncclRemoteError|network is unreachable|no route to host|not connected",
    re.IGNORECASE,
)


# gloo adds advice to its errors, such as to look for bugs in the application.
GLOO_MESSAGE = re.compile(r"\[\S+gloo\S+:\d+\] (.+?)(?:\. [A-Z].*)?$")

PROCESS_ENDED = (
    "that process was killed (often for lack of memory), has raised an error, or has ended after fewer calls than this rank: "
    "look at its log"
)


def is_backend_error(error: RuntimeError) -> bool:
    """Return whether a backend may have raised the error.

    Backends raise no other subclasses of RuntimeError, such as OutOfMemoryError.
    """
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def error_class_of(error: RuntimeError) -> type[TransportError]:
    """Return the exception class for the error: PeerLost, PeerTimeout, or TransportError for all other causes.

    >>> error_class_of(RuntimeError("[pair.cc:547] Connection closed by peer [10.0.0.2]:1234")).__name__
    'PeerLost'
    >>> error_class_of(RuntimeError("Invalid scalar type")).__name__
    'TransportError'
    """
    # Ignore the C++ stack trace, because it contains names such as checkTimeout.
    message = str(error).partition("Exception raised from")[0]
    if isinstance(error, dist.DistNetworkError) or CONNECTION_LOST.search(message):
        return PeerLost
    return PeerTimeout if TIMED_OUT.search(message) else TransportError


def described_error(
    error: RuntimeError, *, rank: int, label: str, peers: Mapping[int, int], where: str | None = None
) -> TransportError:
    """Return an error that says which operation failed on this rank, and which peers it waited for.

    ``peers`` are their ranks and global ranks. ``where`` says what they do, if that is known, or why it is not.

    >>> print(described_error(RuntimeError("Connection closed by peer"), rank=0, label="forward step 2", peers={1: 5}))
    rank 0: lost the connection to rank 1 (global rank 5) in forward step 2: that process was killed (often for lack of \
memory), has raised an error, or has ended after fewer calls than this rank: look at its log (Connection closed by peer)
    """
    kind, cause = error_class_of(error), shortened(error)
    names = " or ".join(f"rank {peer} (global rank {global_rank})" for peer, global_rank in peers.items())
    if kind is PeerTimeout:
        text = f"timed out in {label} waiting for {names}: that rank hangs or is in another call ({cause})"
        text += f"\n{where}" if where else ""
    elif kind is PeerLost:
        text = f"lost the connection to {names} in {label}: {PROCESS_ENDED} ({cause})"
        text += f"\n{where}" if where else ""
    else:
        text = f"{label} failed: {cause}"
    return kind(f"rank {rank}: {text}")


def shortened(error: RuntimeError) -> str:
    """Return the first line of an error; of gloo's only the first sentence, without the place in its source.

    >>> shortened(RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:1234. This is typically …. GLHF!"))
    'Connection closed by peer [10.0.0.2]:1234'
    """
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    gloo = GLOO_MESSAGE.match(line)
    return gloo[1] if gloo else line
