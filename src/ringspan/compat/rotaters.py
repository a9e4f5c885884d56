"""torch's rotaters and merger: the parts of a ring of one's own.

ringspan's attention does not use them. Its transports exchange keys, and its kernels merge partial results; these
classes give both under torch's names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.compat.options import _cp_options, _RotateMethod
from ringspan.errors import InputError
from ringspan.kernels import Partial, merge
from ringspan.transports import PostExchange, ProcessGroupTransport, RankGenerator, WaitExchange


class _RingRotater(ABC):
    """Passes a buffer around the ring: after ``i`` exchanges a rank has the first buffer of rank ``rank - i``."""

    @abstractmethod
    def __init__(self, pg: dist.ProcessGroup, seq_dim: int) -> None: ...

    @abstractmethod
    def exchange_buffers(self, curr_buffer: Tensor) -> None:
        """Start to send the buffer to the next rank."""

    @abstractmethod
    def next_buffer(self) -> Tensor:
        """Return the buffer of the previous rank."""


class _AllToAllRotater(_RingRotater):
    """Sends the buffer to the next rank in each exchange. All buffers have the same size."""

    def __init__(self, pg: dist.ProcessGroup, seq_dim: int) -> None:
        self._group = ProcessGroupTransport(pg)
        self._received: Tensor | None = None

    def exchange_buffers(self, curr_buffer: Tensor) -> None:
        (self._received,) = self._group.run([self._exchange(curr_buffer.contiguous())])

    def next_buffer(self) -> Tensor:
        return _exchanged(self._received)

    def _exchange(self, sent: Tensor) -> RankGenerator[Tensor]:
        rank, world, received = self._group.rank, self._group.world, torch.empty_like(sent)
        if world == 1:
            return sent
        sends, recvs = (((rank + 1) % world, sent),), (((rank - 1) % world, received),)
        yield WaitExchange((yield PostExchange("an exchange of a rotater", sends, recvs)))
        return received


class _AllGatherRotater(_RingRotater):
    """Gathers the buffers of all ranks in the first exchange. All buffers have the same size."""

    def __init__(self, pg: dist.ProcessGroup, seq_dim: int) -> None:
        self._group = ProcessGroupTransport(pg)
        self._gathered: list[Tensor] = []
        self._exchanges = 0

    def exchange_buffers(self, curr_buffer: Tensor) -> None:
        self._exchanges += 1
        if not self._gathered:
            rows = [len(curr_buffer)] * self._group.world
            self._gathered = self._group.all_gather_rows(curr_buffer.contiguous(), rows, label="an exchange of a rotater")

    def next_buffer(self) -> Tensor:
        source = (self._group.rank - self._exchanges) % self._group.world
        return _exchanged(self._gathered[source] if self._gathered else None)


def _create_rotater(pg: dist.ProcessGroup, seq_dim: int, method: _RotateMethod | None = None) -> _RingRotater:
    """Return a rotater of a method; None is the one of ``set_rotate_method``."""
    method = _cp_options.rotate_method if method is None else method
    kinds: dict[object, type[_RingRotater]] = {
        _RotateMethod.ALL_TO_ALL: _AllToAllRotater,
        _RotateMethod.ALL_GATHER: _AllGatherRotater,
    }
    if method not in kinds:
        raise NotImplementedError(f"there is no rotate method {method!r}: use a member of _RotateMethod")
    return kinds[method](pg, seq_dim)


class _SDPAMerger:
    """Merges partial results over different keys, by their log-sum-exp.

    ``convert_to_f32`` merges in float32 and rounds the result once. ``partial`` says that a part is of the second half
    of the queries only, as in the later steps of a ring in head-tail order. ``lse`` can have a last dim of 1, as
    cuDNN's has.
    """

    def __init__(self, convert_to_f32: bool, seq_dim: int) -> None:
        self._convert_to_f32, self._seq_dim = convert_to_f32, seq_dim
        self._merged: Partial | None = None
        self._dtypes = torch.float32, torch.float32
        self._lse_has_last_dim = False

    def step(self, out: Tensor, lse: Tensor, partial: bool) -> None:
        self._dtypes, self._lse_has_last_dim = (out.dtype, lse.dtype), lse.ndim == out.ndim
        part = Partial(out, lse.squeeze(-1) if self._lse_has_last_dim else lse)
        if self._convert_to_f32:
            part = Partial(part.out.float(), part.lse.float())
        if self._merged is None:
            self._merged = part
        elif not partial:
            self._merged = merge(self._merged, part)
        else:
            firsts, seconds = zip(*(x.chunk(2, dim=self._seq_dim) for x in self._merged), strict=True)
            halves = zip(firsts, merge(Partial(*seconds), part), strict=True)
            self._merged = Partial(*(torch.cat(pair, dim=self._seq_dim) for pair in halves))

    def results(self) -> tuple[Tensor, Tensor]:
        if self._merged is None:
            raise InputError("no part has been merged: call step first")
        out, lse = (x.to(dtype) for x, dtype in zip(self._merged, self._dtypes, strict=True))
        return out, lse.unsqueeze(-1) if self._lse_has_last_dim else lse


def _exchanged(buffer: Tensor | None) -> Tensor:
    if buffer is None:
        raise InputError("no buffer has been exchanged: call exchange_buffers first")
    return buffer
