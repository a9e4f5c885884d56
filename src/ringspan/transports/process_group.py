"""A transport with one process per rank, over a torch.distributed process group (gloo, NCCL, …).

A *rank* is an index within the group. A *global rank* is an index within the default group, as ``dist.get_rank()``
returns it. ``label`` names the operation in error messages. It is part of the tag of each message, so it must be
equal on all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.debugging.settings import settings
from ringspan.errors import InputError, PeerLost, PeerTimeout, RingspanError, TransportError
from ringspan.torch_private.process_groups import own_global_rank
from ringspan.transports.backend_errors import described_error, error_class_of, is_backend_error
from ringspan.transports.call_comparison import PendingComparison, apply_comparison, start_comparison
from ringspan.transports.calls import Call, CallDescription, CallPair, ExchangeRecord, is_known_to_peers
from ringspan.transports.collectives import all_gather_by_messages, all_reduce_by_messages
from ringspan.transports.comm_debug import count_messages_in_comm_debug_mode
from ringspan.transports.flight_record import record_failure
from ringspan.transports.group_argument import DESTROYED, group_and_ranks, is_destroyed, time_limit
from ringspan.transports.pending import PendingExchange
from ringspan.transports.requests import PostExchange, RankGenerator, Traffic
from ringspan.transports.watchdog import group_state

T = TypeVar("T")

log = logging.getLogger("ringspan.transports")

DEBUG_COMPARISON_LIMIT = timedelta(minutes=30)  # for comparing calls under RINGSPAN_DEBUG=1, if timeout is None


class ProcessGroupTransport:
    """The ranks of a process group, and this process's rank among them.

    ``group`` is a ``torch.distributed`` process group (None: the default group) or a one-axis ``DeviceMesh``. Ranks of
    a mesh are numbered along its axis, which may differ from the numbering of its process group. ``timeout`` is the
    number of seconds to wait for an exchange (None: the time limit of the group).
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None, *, timeout: float | None = None) -> None:
        given, self.global_ranks = group_and_ranks(group)
        global_rank = own_global_rank()
        if global_rank not in self.global_ranks:
            raise InputError(f"global rank {global_rank} is not a member of the group of global ranks {self.global_ranks}")
        self.rank = self.global_ranks.index(global_rank)
        self.world = len(self.global_ranks)
        self.timeout = time_limit(timeout)
        self.traffic = Traffic()
        # Held weakly: PyTorch keeps a group until it is destroyed. A group that lived longer would end its threads only
        # when the interpreter ends, which can abort the process.
        self._group = ref(given)
        self._state = group_state(given, tuple(self.global_ranks), self.rank)

    def with_timeout(self, timeout: float) -> ProcessGroupTransport:
        """Return a transport for the same ranks with another time limit."""
        other = copy(self)
        other.timeout, other.traffic = time_limit(timeout), Traffic()
        return other

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None or self.is_destroyed:
            raise InputError(DESTROYED)
        return group

    @property
    def is_destroyed(self) -> bool:
        """Whether ``destroy_process_group`` has ended the group."""
        return is_destroyed(self._group())

    def run(
        self,
        generators: Sequence[RankGenerator[T]],
        description: CallDescription | None = None,
        *,
        device: torch.device | None = None,
        pair: CallPair | None = None,
    ) -> list[T]:
        """Run the generator of this process's rank to the end and return its result in a list of one.

        ``description`` is what must be equal on all ranks. If it is not, the ranks raise PeerMismatch. ``device`` is
        that of the messages. With it, a rank without messages takes part in the comparison of calls at once; the
        messages of other ranks wait for it. The first call with a ``pair`` is a forward pass, and later ones are its
        backward passes.
        """
        (generator,) = generators
        if self.world == 1:
            try:
                while True:
                    next(generator)  # the exchanges of a single rank are empty
            except StopIteration as end:
                return [end.value]
        description = description or CallDescription("a call")
        if pair is not None and pair.forward_call:
            description = description._replace(forward_call=pair.forward_call)
        with self._call(description) as call:
            if pair is not None and not pair.forward_call:
                pair.forward_call = call.number
            if settings.debug:
                self._compare(call)
            handle: Any = None
            comparison = self._start_comparison(device, call)
            try:
                while True:
                    request = generator.send(handle)
                    if isinstance(request, PostExchange):
                        if comparison is None:  # it precedes all messages on every rank: NCCL requires one order
                            messages = request.sends or request.recvs
                            comparison = self._start_comparison(messages[0][1].device if messages else None, call)
                        handle = self._post(request, call)
                    else:
                        self._wait(request.pending, call)
                        handle = None
                    del request  # frees the messages of this step before the next step packs its own
            except StopIteration as end:
                self._apply_comparison(comparison, end.value, call)
                return [end.value]

    def _run_without_traffic(self, generator: RankGenerator[T], description: CallDescription) -> T:
        """Run a collective as a numbered call, without adding its bytes to ``traffic``."""
        sent, received = self.traffic.sent, self.traffic.received
        try:
            return self.run([generator], description)[0]
        finally:
            self.traffic.sent, self.traffic.received = sent, received

    def describe_failure(self, rank: int) -> str | None:
        """Describe the last error of another rank, if that rank has reported one."""
        return self._state.describe_failure(rank)

    def report_error(self, error: BaseException) -> None:
        """Publish an error under the number of this rank's next call. Peers that wait in that call can then read it."""
        self._state.calls.fail_next(error)
        self._state.report_failure()

    def refuse(self, description: CallDescription, error: BaseException) -> None:
        """Begin and fail a call that this rank cannot make, so that the peers that wait for it learn the error.

        A rank that raises counts the call as its peers do, so that later calls match if all ranks raise and go on.
        Errors that have ended a call, and errors of communication, are known to the peers already.
        """
        if self.world > 1 and not is_known_to_peers(error):
            log.warning("rank %d refuses %s: %s: %s", self.rank, description, type(error).__name__, error)
            with suppress(RingspanError), self._call(description) as call:
                self._fail(call, error)
                record_failure(self._state, error)

    @contextmanager
    def _call(self, description: CallDescription) -> Iterator[Call]:
        """Begin the next numbered call. An error that is raised in it is reported to the other ranks."""
        calls = self._state.calls
        try:
            call = calls.begin(description)
        except InputError:
            self._state.report_failure()
            raise
        try:
            yield call
        except BaseException as error:
            if calls.group_error is None:
                self._fail(call, error)
            record_failure(self._state, error)
            raise
        finally:
            calls.end()

    def _fail(self, call: Call, error: BaseException) -> None:
        self._state.calls.fail(call, error)
        self._state.report_failure()

    def _compare(self, call: Call) -> None:
        """Compare a call with those of all other ranks, under ``RINGSPAN_DEBUG=1``."""
        call.peers = tuple(self._other_ranks)
        call.waiting_since, call.label = time.monotonic(), "the comparison of calls"
        seconds = (DEBUG_COMPARISON_LIMIT if self.timeout is None else self.timeout).total_seconds()
        self._state.compare_call(call, seconds)
        call.waiting_since, call.label = None, call.description.kind

    def _post(self, request: PostExchange, call: Call) -> PendingExchange:
        peers, operations, staged, group = [], [], [], self.group
        call.label = request.label
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
                    tag = call.tag(request.label, message.nbytes)
                    operations.append(dist.P2POp(operation, message, self.global_ranks[peer], group, tag))
            sent_and_received.append(total)
        self.traffic.sent += sent_and_received[0]
        self.traffic.received += sent_and_received[1]
        if not operations:
            return PendingExchange(request, [], [], None)
        count_messages_in_comm_debug_mode()
        record = ExchangeRecord(call.number, request.label, peers, *sent_and_received)
        self._state.calls.exchanges.append(record)
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            self._raise(error, request.label, peers)
        # NCCL returns one work handle for the whole batch, gloo one for each operation.
        peers_of_works = [[peer] for peer in peers] if len(works) == len(peers) else [peers] * len(works)
        return PendingExchange(request, list(zip(peers_of_works, works, strict=True)), staged, record)

    def _wait(self, pending: PendingExchange, call: Call) -> None:
        for peers, work in pending.works:
            call.peers, call.waiting_since = tuple(peers), time.monotonic()
            try:
                work.wait() if self.timeout is None else work.wait(self.timeout)
            except RuntimeError as error:
                try:
                    self._raise(error, pending.request.label, peers)
                finally:
                    pending.end()
        call.waiting_since = None
        if pending.record is not None:
            pending.record.done = time.time()
        for buffer, received in pending.staged:
            buffer.copy_(received)

    @cached_property
    def _backends(self) -> dict[str, str]:
        """The backend for each type of device, as in ``{"cpu": "gloo", "cuda": "nccl"}``."""
        return dict(entry.split(":") for entry in dist.get_backend_config(self.group).split(","))

    @property
    def device(self) -> torch.device:
        """A device whose tensors all ranks of the group can exchange, for values that are on no device."""
        return torch.device("cpu") if "cpu" in self._backends else torch.device("cuda", torch.cuda.current_device())

    @cached_property
    def _stages_through_host(self) -> bool:
        """Whether tensors on a GPU are copied through host memory, because the group uses gloo for GPUs."""
        return self._backends.get("cuda") == "gloo"

    def _check_not_capturing(self, request: PostExchange) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise TransportError(
                f"rank {self.rank}: {request.label} is being captured in a CUDA graph, but gloo copies GPU tensors through "
                "host memory, which a graph cannot replay: use NCCL"
            )

    def _raise(self, error: RuntimeError, label: str, peers: list[int]) -> NoReturn:
        """Raise a TransportError that names this rank, the operation and the peers. Other errors pass unchanged.

        The cause may be another one than the backend reports: the watchdog, or a peer that has failed, knows it.
        """
        if not is_backend_error(error):
            raise error
        state, ranks = self._state, tuple(dict.fromkeys(peers))
        kind = error_class_of(error)
        found = state.calls.group_error
        if found is None and kind is not TransportError:
            found = state.diagnose(ranks)
        if found is None and kind is PeerLost:
            found = state.await_failure(ranks)
        if found is None:
            named = {peer: self.global_ranks[peer] for peer in ranks}
            where = state.describe_peers(ranks) if kind is PeerTimeout else state.describe_lost(ranks)
            found = described_error(error, rank=self.rank, label=label, peers=named, where=where)
        if kind is not TransportError:
            state.fail_group(found)
        raise found from error

    def all_gather_ints(self, values: Sequence[int], device: torch.device, *, label: str) -> list[list[int]]:
        """All-gather a few integers, the same number on each rank. The result is in rank order."""
        local = torch.tensor(values, dtype=torch.int64, device=device)
        return [gathered.tolist() for gathered in self._all_gather(local, [len(local)] * self.world, label)]

    def all_gather_rows(self, x: Tensor, counts: Sequence[int], *, label: str, options: str = "") -> list[Tensor]:
        """All-gather tensors whose dim 0 has ``counts[rank]`` rows. The result is in rank order. ``options`` must be equal
        on all ranks."""
        return self._all_gather(x, counts, label, options)

    def all_reduce_sum(self, x: Tensor, *, label: str = "an all-reduce", options: str = "") -> Tensor:
        """Return the sum of ``x`` over all ranks. ``options`` must be equal on all ranks."""
        total = x.clone(memory_format=torch.contiguous_format)  # all-reduce adds memory in order, so strides must agree
        self.all_reduce_sum_(total, label=label, options=options)
        return total

    def all_reduce_sum_(
        self, x: Tensor, *, label: str = "an all-reduce", options: str = "", compare_calls: bool = True
    ) -> None:
        """Replace ``x`` by its sum over all ranks. ``x`` must be contiguous, and ``options`` equal on all ranks. Without
        ``compare_calls`` a backend without tags does not compare the calls before this one."""
        if self.world == 1:
            return
        description = CallDescription(label, dtype=_name(x.dtype), shape=tuple(x.shape), options=options)
        if self._has_tags(x.device):
            self._run_without_traffic(all_reduce_by_messages(x, self.rank, self.world, label), description)
        else:
            start = partial(dist.all_reduce, x, group=self.group, async_op=True)
            self._run_collective(start, [x] if compare_calls else [], description)

    def _all_gather(self, x: Tensor, counts: Sequence[int], label: str, options: str = "") -> list[Tensor]:
        description = CallDescription(label, dtype=_name(x.dtype), shape=tuple(x.shape[1:]), options=options)
        if self._has_tags(x.device):
            return self._run_without_traffic(all_gather_by_messages(x, counts, self.rank, label), description)
        padded = x.new_zeros((max(counts), *x.shape[1:]))
        padded[: len(x)] = x
        gathered = [torch.empty_like(padded) for _ in self.global_ranks]
        start = partial(dist.all_gather, gathered, padded, group=self.group, async_op=True)
        self._run_collective(start, gathered, description)
        # all_gather returns the rank order of the process group, which may differ from that of the mesh.
        by_global_rank = dict(zip(dist.get_process_group_ranks(self.group), gathered, strict=True))
        ordered = [by_global_rank[global_rank] for global_rank in self.global_ranks]
        return [rows[:count] for rows, count in zip(ordered, counts, strict=True)]

    def _has_tags(self, device: torch.device) -> bool:
        """Whether messages of the backend have tags, so that collectives are made of messages."""
        return self._backends.get(device.type) == "gloo"

    def _compares_calls(self, device: torch.device) -> bool:
        """Whether the calls of all ranks are compared. Messages with tags match equal calls only. The ranks of
        PyTorch's fake backend exist in this process alone."""
        return not self._has_tags(device) and self._backends.get(device.type) != "fake"

    def _run_collective(self, start: Callable[[], Any], compared: Sequence[Tensor], description: CallDescription) -> None:
        """Run a collective of the backend. ``compared`` are results that become invalid after different calls."""
        with self._call(description) as call:
            if settings.debug:
                self._compare(call)
            try:
                work = start()
            except RuntimeError as error:
                self._raise(error, description.kind, self._other_ranks)
            comparison = self._start_comparison(compared[0].device if compared else None, call)
            self._wait_for_all(work, call)
            self._apply_comparison(comparison, compared, call)

    def _start_comparison(self, device: torch.device | None, call: Call) -> PendingComparison | None:
        """Start to compare this call, and those before it, with the calls of all ranks, unless the device is
        unknown."""
        if device is None or not self._compares_calls(device):
            return None
        checksum = self._state.calls.checksum_with(call)
        try:
            return start_comparison(checksum, self.rank, self.world, device, self.group)
        except RuntimeError as error:
            self._raise(error, call.label, self._other_ranks)

    def _apply_comparison(self, comparison: PendingComparison | None, results: object, call: Call) -> None:
        """End the comparison of a call with these results. A rank that had no messages starts it here."""
        tensors = [x for x in (results if isinstance(results, tuple | list) else [results]) if isinstance(x, Tensor)]
        comparison = comparison or self._start_comparison(tensors[0].device if tensors else None, call)
        if comparison is not None:
            self._wait_for_all(comparison.work, call)
            apply_comparison(comparison, tensors, call.description.kind)

    @property
    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def _wait_for_all(self, work: Any, call: Call) -> None:
        """Wait for a collective of the backend."""
        call.peers, call.waiting_since = tuple(self._other_ranks), time.monotonic()
        try:
            work.wait() if self.timeout is None else work.wait(self.timeout)
        except RuntimeError as error:
            self._raise(error, call.label, self._other_ranks)
        call.waiting_since = None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_transport(
    group: ProcessGroupTransport | dist.ProcessGroup | DeviceMesh | None, timeout: float | None = None
) -> ProcessGroupTransport:
    """Return the transport for the arguments ``group=`` and ``timeout=`` of the public API."""
    if not isinstance(group, ProcessGroupTransport):
        return ProcessGroupTransport(group, timeout=timeout)
    return group if timeout is None else group.with_timeout(timeout)
