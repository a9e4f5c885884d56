"""The slots of a rank while it executes a plan: buffers of rows, and how transfers read and write them.

Slots and messages are rows first, (rows, batch, heads, dim).

Legend: S rows, B batch, H heads, E value dim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.caching.by_stream import cache_by_stream, copy_to_device
from ringspan.engine.messages import StepMessages
from ringspan.engine.packing import unpack_upstream
from ringspan.kernels import GradientAccumulator, OutputAccumulator, ReceivedRows
from ringspan.kernels.accumulators import RowAccumulator, Tensors
from ringspan.kernels.rows import copy_rows_
from ringspan.plans import Transfer
from ringspan.plans.problem import Rows
from ringspan.plans.shape import upstream_bytes
from ringspan.transports import PostExchange

# A transfer that ends on this rank, and its message. Rows that were received in place have none.
Arrived = tuple[Transfer, Tensor | None]

# The types of devices on which the gradients of a step are added in one pass over memory.
ADDED_TOGETHER = {"cuda"}
# A message of more ranges of rows is added by one operation: each range would need launches of its own.
MAX_RANGES = 4


class Slots:
    """Buffers and accumulators by what they hold, each a list with one entry for each slot.

    What arrives overwrites ``rows`` ("q", "dout", "kv"), is added to ``gradients`` ("dq", "dkv") or merged into
    ``outputs``. Complete results are copied there. When other rows overwrite a row, the accumulators of that row
    (``_row_accumulators``) clear it.

    ``dtype`` is that of the tensors, in which complete results are sent. ``dkv_dtype`` is that of "dkv" in messages to
    and from other ranks (None: that of the accumulators, or of the tensors).
    """

    def __init__(
        self,
        rows: dict[str, list[Tensor]],
        *,
        dtype: torch.dtype,
        outputs: list[OutputAccumulator] | None = None,
        gradients: dict[str, list[GradientAccumulator]] | None = None,
        dkv_dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype, self._dkv_dtype = dtype, dkv_dtype
        self.rows, self.outputs, self.gradients = rows, outputs or [], gradients or {}
        self._row_accumulators: dict[str, Sequence[Any]] = {
            "q": self.outputs or self.gradients.get("dq", []),
            "dout": self.gradients.get("dq", []),
            "kv": self.gradients.get("dkv", []),
        }
        self._in_flight: deque[list[Arrived]] = deque()

    def begin(self, messages: StepMessages, label: str) -> PostExchange:
        """Return the exchange of a step: payloads to send, buffers to receive into.

        Record its arrivals for `apply_arrivals`.
        """
        arriving: list[Arrived] = []
        self._in_flight.append(arriving)
        payloads: list[Tensor] = []
        complete: dict[tuple[str, int], Tensor] = {}
        for t, packed in messages.payloads:
            if t.complete:
                payloads.append(self._pack_complete(t, complete))
            else:
                payloads.append(self._pack(t) if packed else _heads(self._rows_of(t), t))
        recv_buffers: dict[int, Tensor] = {}
        for run in messages.receive_runs:
            rows = self.rows[run.what][run.slot][run.start : run.stop]
            recv_buffers.update(zip(run.recvs, rows.split_with_sizes(run.sizes), strict=True))
        for t, payload, buffer in messages.arrivals:
            if payload is not None:
                arriving.append((t, payloads[payload]))
            elif buffer is not None:
                recv_buffers[buffer] = self._new_buffer(t)
                arriving.append((t, recv_buffers[buffer]))
            elif self._row_accumulators[t.what]:
                arriving.append((t, None))  # received in place: only accumulators are cleared
        if self._dkv_dtype is not None:  # not for messages of this rank to itself, which are in `arriving` already
            for n in {n for _, n in messages.sends}:
                if (dtype := self._rounded_dtype(messages.payloads[n].transfer)) is not None:
                    payloads[n] = payloads[n].to(dtype)
        sends, recvs = [], []
        for peer, payload in messages.sends:
            sends.append((peer, payloads[payload]))
        for n, t in enumerate(messages.recvs):
            recvs.append((t.peer, recv_buffers[n]))
        return PostExchange(label, tuple(sends), tuple(recvs))

    def apply_arrivals(self, *, is_last: bool = False) -> None:
        """Copy, merge or add the messages of the oldest exchange that were not received in place, and release their
        buffers.

        Clear the accumulators of rows that were overwritten. ``is_last`` says that no exchange and no task follow.
        """
        to_add: list[tuple[Transfer, Tensor]] = []  # gradients that are added together
        for t, message in self._in_flight.popleft():
            if message is not None and _is_added_together(t, message):
                to_add.append((t, message))
                continue
            self._add_together(to_add)
            to_add = []
            if t.what in self.rows:
                self._overwrite(t, message)
            elif message is not None and (t.complete or t.what == "out"):
                self._merge(t, message)
            elif message is not None:
                self._add(t, message)
        self._add_together(to_add, is_last=is_last)

    def _pack(self, t: Transfer) -> Tensor:
        """Gather the rows (and heads) of the transfer into one contiguous tensor. An output is sent as [out | lse]."""
        if t.what != "out":
            return _gather(self._rows_of(t), t)
        payload = self._new_buffer(t)
        at = 0
        for start, stop in t.rows:
            out, lse = self.outputs[t.slot].accumulated(start, stop)
            rows = payload[at : at + stop - start]
            rows[..., :-1], rows[..., -1] = _heads(out, t), _heads(lse, t)
            at += stop - start
        return payload

    def _new_buffer(self, t: Transfer) -> Tensor:
        """Allocate a buffer for the message, outside the slot. The last column of an output is its lse."""
        if t.what in self.rows:
            like, (_, batch, heads, width) = self.rows[t.what][t.slot], self.rows[t.what][t.slot].shape
        else:
            like, (_, batch, heads, width) = self._accumulator(t).like, self._accumulator(t).shape
        heads = heads if t.heads is None else t.heads[1] - t.heads[0]
        dtype = self._rounded_dtype(t)
        if not t.complete:
            return like.new_empty((t.count, batch, heads, width + (t.what == "out")), dtype=dtype)
        if t.what == "out":
            width = upstream_bytes(width, self._dtype.itemsize) // self._dtype.itemsize
        return like.new_empty((t.count, batch, heads, width), dtype=dtype or self._dtype)

    def _rounded_dtype(self, t: Transfer) -> torch.dtype | None:
        """Return the dtype to which a message to another rank is rounded, None if it is not. Complete results are not
        rounded to a dtype that takes as many bytes as theirs."""
        if t.what != "dkv" or self._dkv_dtype is None:
            return None
        return None if t.complete and self._dkv_dtype.itemsize >= self._dtype.itemsize else self._dkv_dtype

    def _pack_complete(self, t: Transfer, slots: dict[tuple[str, int], Tensor]) -> Tensor:
        """Return complete results in the dtype of the tensors, as one contiguous tensor.

        All rows of a slot are packed once for all messages of a step (``slots``). A message of all heads of one range
        is a view of them.
        """
        of_slot = slots.get((t.what, t.slot))
        if of_slot is None:
            of_slot = slots[t.what, t.slot] = self._complete_slot(t)
        rows = of_slot[slice(*_extent(t.rows))]
        return rows if len(t.rows) == 1 and t.heads is None else _gather(rows, t)

    def _complete_slot(self, t: Transfer) -> Tensor:
        """Return the results of all rows of a slot in the dtype of the tensors.

        An output is packed with its lse, as dout with dlse are.
        """
        accumulator = self._accumulator(t)
        count, *_, width = accumulator.shape
        rows = accumulator.complete_rows(0, count)
        if len(rows) == 1 and rows[0].dtype == self._dtype and rows[0].is_contiguous():
            return rows[0]
        if t.what == "out":
            width = upstream_bytes(width, self._dtype.itemsize) // self._dtype.itemsize
        packed = accumulator.like.new_empty((*accumulator.shape[:3], width), dtype=self._dtype)
        if t.what == "out":
            packed[..., accumulator.shape[-1] :].zero_()
        accumulator.copy_complete(self._parts(t, packed))
        return packed

    def _parts(self, t: Transfer, message: Tensor) -> Tensors:
        """Return the tensors of a message of results: out and lse, or a gradient."""
        if t.what != "out":
            return (message,)
        return unpack_upstream(message, self._accumulator(t).shape[-1]) if t.complete else (message[..., :-1], message[..., -1])

    def _accumulator(self, t: Transfer) -> RowAccumulator:
        return self.outputs[t.slot] if t.what == "out" else self.gradients[t.what][t.slot]

    def _merge(self, t: Transfer, message: Tensor) -> None:
        """Merge outputs with those of their rows so far, or write complete results, the first of their rows."""
        accumulator, parts, at = self._accumulator(t), self._parts(t, message), 0
        heads = (0, accumulator.shape[2]) if t.complete and t.heads is None else t.heads
        for start, stop in t.rows:
            rows = [x[at : at + stop - start] for x in parts]
            if heads is None:
                accumulator.add(start, stop, *rows)
            else:
                accumulator.add_to_heads(start, stop, heads, *rows)
            at += stop - start

    def _add(self, t: Transfer, message: Tensor) -> None:
        if len(t.rows) > 1:
            rows = _heads(self._rows_of(t), t)
            rows.index_add_(0, _index(t.rows, message.device), message.to(rows.dtype))
        elif t.heads is not None:
            self.gradients[t.what][t.slot].add_to_heads(*t.rows[0], t.heads, message)
        elif message.dtype == self.gradients[t.what][t.slot].like.dtype:
            self.gradients[t.what][t.slot].add(*t.rows[0], message)
        else:  # a rounded message is not a kernel's result: the accumulator must not keep it as it is
            self._rows_of(t).add_(message)

    def _add_together(self, arrived: Sequence[tuple[Transfer, Tensor]], *, is_last: bool = False) -> None:
        messages: dict[tuple[str, int], list[ReceivedRows]] = {}
        for t, message in arrived:
            at = 0
            for start, stop in t.rows:
                messages.setdefault((t.what, t.slot), []).append(ReceivedRows(start, stop, message[at : at + stop - start]))
                at += stop - start
        for (what, slot), of_slot in messages.items():
            self.gradients[what][slot].add_together(of_slot, is_last=is_last)

    def _overwrite(self, t: Transfer, message: Tensor | None) -> None:
        if message is not None:
            rows = _heads(self._rows_of(t), t)
            copy_rows_(rows, message) if len(t.rows) == 1 else rows.index_copy_(0, _index(t.rows, message.device), message)
        for accumulator in self._row_accumulators[t.what][t.slot : t.slot + 1]:
            for start, stop in t.rows:
                accumulator.clear(start, stop)

    def _rows_of(self, t: Transfer) -> Tensor:
        """Return a view of the contiguous row range that covers the transfer's rows, with any rows between them."""
        start, stop = t.rows[0] if len(t.rows) == 1 else _extent(t.rows)
        if t.what in self.rows:
            return self.rows[t.what][t.slot][start:stop]
        (rows,) = self.gradients[t.what][t.slot].accumulated(start, stop)
        return rows


def _is_added_together(t: Transfer, message: Tensor) -> bool:
    """Return whether the message has gradients that are added with those of other messages, in one pass over memory."""
    is_gradient = t.what in ("dq", "dkv") and t.heads is None and not t.complete and len(t.rows) <= MAX_RANGES
    return is_gradient and message.device.type in ADDED_TOGETHER


def _heads(x: Tensor, t: Transfer) -> Tensor:
    return x if t.heads is None else x[:, :, slice(*t.heads)]


def _gather(rows: Tensor, t: Transfer) -> Tensor:
    """Copy the rows and heads of a transfer into a contiguous tensor. ``rows`` are those of the range around them."""
    rows = _heads(rows, t)
    if len(t.rows) > 1:
        return rows.index_select(0, _index(t.rows, rows.device))
    message = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)  # a plain copy is faster
    copy_rows_(message, rows)
    return message


def _extent(rows: Rows) -> tuple[int, int]:
    return min(start for start, _ in rows), max(stop for _, stop in rows)


@cache_by_stream(256)
def _index(rows: Rows, device: torch.device) -> Tensor:
    """Return the row indices of a transfer, relative to the start of the range that `_rows_of` returns."""
    first, _ = _extent(rows)
    return copy_to_device(np.concatenate([np.arange(start - first, stop - first) for start, stop in rows]), device)
