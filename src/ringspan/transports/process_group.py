"""Ranks in processes of their own, over a torch.distributed process group (gloo, NCCL, …)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.errors import InputError, PeerLost, PeerTimeout, TransportError
from ringspan.transports.requests import PostExchange, RankCoroutine, Traffic

T = TypeVar("T")


class PendingExchange(NamedTuple):
    """An exchange under way: what the back end is to be asked about, by peers, and what is then copied to the device."""

    request: PostExchange
    works: list[tuple[list[int], Any]]
    staged: list[tuple[Tensor, Tensor]]


class ProcessGroupTransport:
    """A group of ranks and this process's place in it.

    ``group`` is a ``torch.distributed`` process group (None: the default one) or a one-axis ``DeviceMesh``. The ranks
    of a mesh are counted along its axis, which need not be the order in which its process group counts them.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None, *, timeout: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised: start with torchrun and call dist.init_process_group(), "
                "or use ringspan.LocalWorld(n), which needs no processes"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                names = group.mesh_dim_names or f"{group.ndim} axes"
                raise InputError(f"a mesh of one axis is needed, this one has {names}: pass mesh[axis], as in mesh['cp']")
            self.ranks: list[int] = group.mesh.tolist()
            self.group: dist.ProcessGroup = group.get_group()
        else:
            # new_group gives a plain number, not a group, to processes that are not in it.
            whole: Any = dist.group.WORLD if group is None else group
            if whole is dist.GroupMember.NON_GROUP_MEMBER:
                raise InputError(f"process {dist.get_rank()} is not a member of this group")
            if not isinstance(whole, dist.ProcessGroup):
                raise InputError(
                    f"group must be a process group, a one-axis DeviceMesh, or None for all processes; not {group!r}"
                )
            self.group = whole
            self.ranks = dist.get_process_group_ranks(self.group)
        if dist.get_rank() not in self.ranks:
            raise InputError(f"process {dist.get_rank()} is not a member of the group of processes {self.ranks}")
        self.rank = self.ranks.index(dist.get_rank())
        self.world = len(self.ranks)
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        self.traffic = Traffic()

    def run(self, walks: Sequence[RankCoroutine[T]]) -> list[T]:
        """Run this process's rank to the end."""
        (walk,) = walks
        answer: Any = None
        try:
            while True:
                request = walk.send(answer)
                if isinstance(request, PostExchange):
                    answer = self._post(request)
                else:
                    self._wait(request.pending)
                    answer = None
                del request  # it holds the messages of its step, and the next step is about to pack its own
        except StopIteration as end:
            return [end.value]

    def _post(self, request: PostExchange) -> PendingExchange:
        peers, operations, staged = [], [], []
        for operation, messages in ((dist.isend, request.sends), (dist.irecv, request.recvs)):
            for peer, tensor in messages:
                if tensor.numel():
                    on_wire = tensor
                    if tensor.is_cuda and self._stages:
                        self._check_that_nobody_captures(request)
                        on_wire = tensor.cpu() if operation is dist.isend else torch.empty_like(tensor, device="cpu")
                        staged += [(tensor, on_wire)] if operation is dist.irecv else []
                    peers.append(peer)
                    operations.append(dist.P2POp(operation, on_wire, self.ranks[peer], self.group, _tag(on_wire)))
        self.traffic.sent += sum(tensor.nbytes for _, tensor in request.sends)
        self.traffic.received += sum(tensor.nbytes for _, tensor in request.recvs)
        if not operations:
            return PendingExchange(request, [], [])
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._named(error, request.label, peers) from error
        # One handle for all where the back end groups them (NCCL), one for each otherwise.
        each = [[peer] for peer in peers] if len(works) == len(peers) else [peers] * len(works)
        return PendingExchange(request, list(zip(each, works, strict=True)), staged)

    def _wait(self, ticket: PendingExchange) -> None:
        for peers, work in ticket.works:
            try:
                work.wait() if self.timeout is None else work.wait(self.timeout)
            except RuntimeError as error:
                raise self._named(error, ticket.request.label, peers) from error
        for tensor, arrived in ticket.staged:
            tensor.copy_(arrived)

    @cached_property
    def _stages(self) -> bool:
        """Whether messages of a GPU go through the host's memory: gloo sends only from there."""
        return self.group._get_backend(torch.device("cuda")).name() == "gloo"

    def _check_that_nobody_captures(self, request: PostExchange) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise TransportError(
                f"rank {self.rank}: {request.label} is being captured in a CUDA graph, but gloo carries what lies on a GPU "
                "through the host, which no graph can repeat: use NCCL"
            )

    def _named(self, error: RuntimeError, label: str, peers: list[int]) -> TransportError:
        """What the back end said, with the rank and the step it was said of."""
        names = " or ".join(f"rank {peer} (process {self.ranks[peer]})" for peer in dict.fromkeys(peers))
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "imed out" in said or "imeout" in said:
            return PeerTimeout(f"rank {self.rank}: {names} did not answer in {label}; stuck, or in another call ({said})")
        return PeerLost(f"rank {self.rank}: lost {names} in {label}; look at that process's own error first ({said})")

    def gather_numbers(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """The same few whole numbers from every rank, in the order of the ranks."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        return [theirs.tolist() for theirs in self._all_gather(mine, "the handshake")]

    def all_gather_rows(self, x: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Everyone's rows (``counts[rank]`` of them on dim 0), in the order of the ranks."""
        padded = x.new_zeros((max(counts), *x.shape[1:]))
        padded[: len(x)] = x
        return [theirs[:count] for theirs, count in zip(self._all_gather(padded, "unshard"), counts, strict=True)]

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)  # memory is summed as it lies, and must lie alike everywhere
        self._finish(lambda: dist.all_reduce(total, group=self.group, async_op=True), "a sum over all ranks")
        return total

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        everyone = [torch.empty_like(x) for _ in self.ranks]
        self._finish(lambda: dist.all_gather(everyone, x, group=self.group, async_op=True), label)
        # The group counts its ranks in an order of its own.
        by_process = dict(zip(dist.get_process_group_ranks(self.group), everyone, strict=True))
        return [by_process[process] for process in self.ranks]

    def _finish(self, begin: Callable[[], Any], label: str) -> None:
        try:
            work = begin()
            work.wait() if self.timeout is None else work.wait(self.timeout)
        except RuntimeError as error:
            others = [rank for rank in range(self.world) if rank != self.rank]
            raise self._named(error, label, others) from error


def _tag(message: Tensor) -> int:
    """By which a message and the room for it find each other: its size, as far as a tag can count.

    Where one rank has made a call fewer than the others, theirs may be of other sizes. Gloo would end the process for a message
    that is too long, and take one that is too short without a word; of another tag, it waits in vain, which is an error with a
    name. NCCL knows no tags.
    """
    return message.nbytes % (2**31 - 1)


def as_transport(group: ProcessGroupTransport | dist.ProcessGroup | DeviceMesh | None) -> ProcessGroupTransport:
    """What a user's ``group=`` means."""
    return group if isinstance(group, ProcessGroupTransport) else ProcessGroupTransport(group)
