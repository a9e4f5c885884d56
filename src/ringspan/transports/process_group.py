"""A transport with one process per rank, over a torch.distributed process group (gloo, NCCL, …).

A *rank* is an index within the group. A *global rank* is an index within the default group, as ``dist.get_rank()`` returns
it. ``label`` names the operation in error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.errors import InputError, PeerLost, PeerTimeout, TransportError
from ringspan.transports.backend_errors import error_class_of, first_line, is_backend_error
from ringspan.transports.requests import PostExchange, RankGenerator, Traffic

T = TypeVar("T")


class PendingExchange(NamedTuple):
    """A posted exchange.

    ``works`` has pairs of (peers, work handle of the backend). ``staged`` has pairs of (receive buffer on a GPU, host
    tensor into which the backend receives).
    """

    request: PostExchange
    works: list[tuple[list[int], Any]]
    staged: list[tuple[Tensor, Tensor]]


class ProcessGroupTransport:
    """The ranks of a process group, and this process's rank among them.

    ``group`` is a ``torch.distributed`` process group (None: the default group) or a one-axis ``DeviceMesh``. Ranks of
    a mesh are numbered along its axis, which may differ from the numbering of its process group. ``timeout`` is the
    number of seconds to wait for an exchange (None: the time limit of the group).
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None, *, timeout: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised: start with torchrun and call dist.init_process_group(), "
                "or use ringspan.LocalWorld(n), which needs no processes"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                axes = " and ".join(map(repr, group.mesh_dim_names)) if group.mesh_dim_names else f"{group.ndim} axes"
                raise InputError(f"a mesh of one axis is needed, this one has {axes}: pass mesh[axis], as in mesh['cp']")
            self.global_ranks: list[int] = group.mesh.tolist()
            self.group: dist.ProcessGroup = group.get_group()
        else:
            # new_group returns an integer instead of a group to processes that are not members.
            given: Any = dist.group.WORLD if group is None else group
            if given is dist.GroupMember.NON_GROUP_MEMBER:
                raise InputError(f"global rank {dist.get_rank()} is not a member of this group")
            if not isinstance(given, dist.ProcessGroup):
                raise InputError(
                    f"group must be a process group, a one-axis DeviceMesh, or None for all processes; not {group!r}"
                )
            self.group = given
            self.global_ranks = dist.get_process_group_ranks(self.group)
        if dist.get_rank() not in self.global_ranks:
            raise InputError(f"global rank {dist.get_rank()} is not a member of the group of global ranks {self.global_ranks}")
        self.rank = self.global_ranks.index(dist.get_rank())
        self.world = len(self.global_ranks)
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        self.traffic = Traffic()

    @property
    def is_destroyed(self) -> bool:
        """Whether ``destroy_process_group`` has ended the group."""
        try:
            dist.get_backend(self.group)
        except (AssertionError, RuntimeError, ValueError):
            return True
        return False

    def run(self, generators: Sequence[RankGenerator[T]]) -> list[T]:
        """Run the generator of this process's rank to the end and return its result in a list of one."""
        (generator,) = generators
        handle: Any = None
        try:
            while True:
                request = generator.send(handle)
                if isinstance(request, PostExchange):
                    handle = self._post(request)
                else:
                    self._wait(request.pending)
                    handle = None
                del request  # frees the messages of this step before the next step packs its own
        except StopIteration as end:
            return [end.value]

    def _post(self, request: PostExchange) -> PendingExchange:
        peers, operations, staged = [], [], []
        sent_and_received = []
        for operation, messages in ((dist.isend, request.sends), (dist.irecv, request.recvs)):
            total = 0
            for peer, tensor in messages:
                total += tensor.nbytes
                if tensor.numel():
                    message = tensor
                    if tensor.is_cuda and self._stages_through_host:
                        self._check_not_capturing(request)
                        if operation is dist.isend:
                            message = tensor.cpu()
                        else:
                            message = torch.empty_like(tensor, device="cpu")
                            staged.append((tensor, message))
                    peers.append(peer)
                    operations.append(dist.P2POp(operation, message, self.global_ranks[peer], self.group, _tag(message)))
            sent_and_received.append(total)
        self.traffic.sent += sent_and_received[0]
        self.traffic.received += sent_and_received[1]
        if not operations:
            return PendingExchange(request, [], [])
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            self._raise_with_rank_and_label(error, request.label, peers)
        # NCCL returns one work handle for the whole batch, gloo one for each operation.
        peers_of_works = [[peer] for peer in peers] if len(works) == len(peers) else [peers] * len(works)
        return PendingExchange(request, list(zip(peers_of_works, works, strict=True)), staged)

    def _wait(self, pending: PendingExchange) -> None:
        for peers, work in pending.works:
            try:
                work.wait() if self.timeout is None else work.wait(self.timeout)
            except RuntimeError as error:
                self._raise_with_rank_and_label(error, pending.request.label, peers)
        for buffer, received in pending.staged:
            buffer.copy_(received)

    @cached_property
    def _stages_through_host(self) -> bool:
        """Whether tensors on a GPU are copied through host memory, because the group uses gloo for GPUs."""
        backends = dist.get_backend_config(self.group)  # "cpu:gloo,cuda:nccl"
        return dict(entry.split(":") for entry in backends.split(",")).get("cuda") == "gloo"

    def _check_not_capturing(self, request: PostExchange) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise TransportError(
                f"rank {self.rank}: {request.label} is being captured in a CUDA graph, but gloo copies GPU tensors through "
                "host memory, which a graph cannot replay: use NCCL"
            )

    def _raise_with_rank_and_label(self, error: RuntimeError, label: str, peers: list[int]) -> NoReturn:
        """Raise a TransportError that names this rank, the operation and the peers. Other errors pass unchanged."""
        if not is_backend_error(error):
            raise error
        names = " or ".join(f"rank {peer} (global rank {self.global_ranks[peer]})" for peer in dict.fromkeys(peers))
        kind = error_class_of(error)
        if kind is PeerTimeout:
            text = f"timed out in {label} waiting for {names}: that rank hangs or is in another call ({first_line(error)})"
        elif kind is PeerLost:
            text = f"lost the connection to {names} in {label}: see the error of that process first ({first_line(error)})"
        else:
            text = f"{label} failed: {first_line(error)}"
        raise kind(f"rank {self.rank}: {text}") from error

    def all_gather_ints(self, values: Sequence[int], device: torch.device, *, label: str) -> list[list[int]]:
        """All-gather a few integers, the same number on each rank. The result is in rank order."""
        local = torch.tensor(values, dtype=torch.int64, device=device)
        return [gathered.tolist() for gathered in self._all_gather(local, label)]

    def all_gather_rows(self, x: Tensor, counts: Sequence[int], *, label: str) -> list[Tensor]:
        """All-gather tensors whose dim 0 has ``counts[rank]`` rows. The result is in rank order."""
        padded = x.new_zeros((max(counts), *x.shape[1:]))
        padded[: len(x)] = x
        return [rows[:count] for rows, count in zip(self._all_gather(padded, label), counts, strict=True)]

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks."""
        total = x.clone(memory_format=torch.contiguous_format)  # all-reduce adds memory in order, so strides must agree
        self.all_reduce_sum_(total)
        return total

    def all_reduce_sum_(self, x: Tensor) -> None:
        """Replace ``x`` by its sum over all ranks. ``x`` must be contiguous."""
        self._run_collective(lambda: dist.all_reduce(x, group=self.group, async_op=True), "an all-reduce")

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        gathered = [torch.empty_like(x) for _ in self.global_ranks]
        self._run_collective(lambda: dist.all_gather(gathered, x, group=self.group, async_op=True), label)
        # all_gather returns the rank order of the process group, which may differ from that of the mesh.
        by_global_rank = dict(zip(dist.get_process_group_ranks(self.group), gathered, strict=True))
        return [by_global_rank[global_rank] for global_rank in self.global_ranks]

    def _run_collective(self, start: Callable[[], Any], label: str) -> None:
        try:
            work = start()
            work.wait() if self.timeout is None else work.wait(self.timeout)
        except RuntimeError as error:
            peers = [rank for rank in range(self.world) if rank != self.rank]
            self._raise_with_rank_and_label(error, label, peers)


def _tag(message: Tensor) -> int:
    """Return the tag of a message, which is its size in bytes, reduced to the range of a tag.

    If one rank makes a call fewer than the others, its messages can meet receives of another size. gloo aborts the
    process when a message is too long, and accepts one that is too short without an error. With the size as the tag,
    such messages do not match, and the wait ends in a PeerTimeout. NCCL ignores tags.
    """
    return message.nbytes % (2**31 - 1)


def as_transport(group: ProcessGroupTransport | dist.ProcessGroup | DeviceMesh | None) -> ProcessGroupTransport:
    """Return the transport for a ``group=`` argument of the public API."""
    return group if isinstance(group, ProcessGroupTransport) else ProcessGroupTransport(group)
