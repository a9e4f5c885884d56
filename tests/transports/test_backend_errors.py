"""Which messages of gloo, NCCL and the store mean a lost peer, which a time-out, and which neither."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.transports.backend_errors import error_class_of, is_backend_error, shortened

NCCL_REMOTE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:94, remote process exited or there was a network "
    "error, NCCL version 2.20.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer\n"
)
NCCL_REFUSED = (
    "NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
    "ncclSystemError: System call failed\nLast error:\nconnect to 10.0.0.2<1234> failed : Connection refused"
)
NCCL_WATCHDOG = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=SEND, NumelIn=112, NumelOut=112, "
    "Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out."
)
NCCL_OUT_OF_MEMORY = (
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'\n"
    "Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):\nframe #0: c10d::checkTimeout"
)
NCCL_INVALID = "NCCL error: invalid usage (WorkNCCL SeqNum=19, OpType=RECV, NumelIn=26, Timeout(ms)=60000)"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp"

CASES = [
    (RuntimeError(f"{GLOO}/pair.cc:547] Connection closed by peer [10.0.0.2]:1234"), rs.PeerLost),
    (RuntimeError(f"{GLOO}/pair.cc:538] Read error [10.0.0.2]:1234: Connection reset by peer"), rs.PeerLost),
    (RuntimeError(f"{GLOO}/pair.cc:300] writev [10.0.0.2]:1234: Broken pipe"), rs.PeerLost),
    (dist.DistBackendError(NCCL_REMOTE), rs.PeerLost),
    (dist.DistBackendError(NCCL_REFUSED), rs.PeerLost),
    (dist.DistNetworkError("failed to recv, got 0 bytes"), rs.PeerLost),
    (RuntimeError(f"{GLOO}/unbound_buffer.cc:129] Timed out waiting 1000ms for recv operation to complete"), rs.PeerTimeout),
    (RuntimeError(f"{GLOO}/pair.cc:521] Application timeout caused pair closure"), rs.PeerTimeout),
    (dist.DistBackendError(NCCL_WATCHDOG), rs.PeerTimeout),
    (
        dist.DistBackendError(f"NCCL communicator was aborted on rank 3.  Original reason for failure was: {NCCL_WATCHDOG}"),
        rs.PeerTimeout,
    ),
    (dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cpu//0/rank_1"), rs.PeerTimeout),
    (RuntimeError("Invalid scalar type"), rs.TransportError),
    (RuntimeError("No backend type associated with device type meta"), rs.TransportError),
    (RuntimeError("input tensor has to be contiguous"), rs.TransportError),
    (dist.DistBackendError(NCCL_OUT_OF_MEMORY), rs.TransportError),
    (dist.DistBackendError(NCCL_INVALID), rs.TransportError),
    (dist.DistBackendError("NCCL communicator was aborted on rank 0."), rs.TransportError),
]


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda x: shortened(x)[-50:] if isinstance(x, Exception) else "")
def test_kind_of_a_backend_error(error: RuntimeError, kind: type[Exception]) -> None:
    assert is_backend_error(error)
    assert error_class_of(error) is kind


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, NotImplementedError, RecursionError], ids=lambda kind: kind.__name__)
def test_other_runtime_errors_are_not_the_backends(kind: type[RuntimeError]) -> None:
    assert not is_backend_error(kind("CUDA out of memory. The operation timed out"))


def test_the_advice_of_gloo_is_left_out() -> None:
    advice = "This is typically caused by a remote worker crashing. Check the logs before reporting an error. GLHF!"
    error = RuntimeError(f"{GLOO}/pair.cc:537] Read error [10.0.0.2]:1234: Connection reset by peer. {advice}")
    assert shortened(error) == "Read error [10.0.0.2]:1234: Connection reset by peer"
    assert shortened(dist.DistBackendError(NCCL_REMOTE)) == NCCL_REMOTE.splitlines()[0]


def test_the_first_line_of_an_empty_message_is_the_type() -> None:
    assert shortened(RuntimeError()) == "RuntimeError"
    assert shortened(RuntimeError("one\ntwo")) == "one"
