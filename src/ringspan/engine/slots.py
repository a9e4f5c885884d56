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
from ringspan.kernels import GradientAccumulator, OutputAccumulator, ReceivedRows
from ringspan.plans import Transfer
from ringspan.plans.problem import Rows
from ringspan.transports import PostExchange

# The types of devices on which the gradients of a step are added in one pass over memory.
ADDED_TOGETHER = {"cuda"}
# A message of more ranges of rows is added by one operation: each range would need launches of its own.
MAX_RANGES = 4


class Slots:
    """Buffers and accumulators by what they hold, each a list with one entry for each slot.

    What arrives overwrites ``rows`` ("q", "dout", "kv"), is added to ``gradients`` ("dq", "dkv") or merged into
    ``outputs``. When other rows overwrite a row, the accumulators of that row (``_row_accumulators``) clear it.
    ``dkv_dtype`` is the dtype of "dkv" in messages to and from other ranks (None: that of the accumulators).
    """

    def __init__(
        self,
        rows: dict[str, list[Tensor]],
        *,
        outputs: list[OutputAccumulator] | None = None,
        gradients: dict[str, list[GradientAccumulator]] | None = None,
        dkv_dtype: torch.dtype | None = None,
    ) -> None:
        self._dkv_dtype = dkv_dtype
        self.rows, self.outputs, self.gradients = rows, outputs or [], gradients or {}
        self._row_accumulators: dict[str, Sequence[Any]] = {
            "q": self.outputs or self.gradients.get("dq", []),
            "dout": self.gradients.get("dq", []),
            "kv": self.gradients.get("dkv", []),
        }
        self._in_flight: deque[list[tuple[Transfer, Tensor | None]]] = deque()  # the arrivals of each exchange

    def begin(self, messages: StepMessages, label: str) -> PostExchange:
        """Return the exchange of a step: payloads to send, buffers to receive into.

        Record its arrivals for `apply_arrivals`.
        """
        arriving: list[tuple[Transfer, Tensor | None]] = []
        self._in_flight.append(arriving)
        payloads: list[Tensor] = []
        for t, packed in messages.payloads:
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
            for n in {n for _, n in messages.sends if messages.payloads[n].transfer.what == "dkv"}:
                payloads[n] = payloads[n].to(self._dkv_dtype)
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
            elif message is not None:
                self._merge(t, message) if t.what == "out" else self._add(t, message)
        self._add_together(to_add, is_last=is_last)

    def _pack(self, t: Transfer) -> Tensor:
        """Gather the rows (and heads) of the transfer into one contiguous tensor. An output is sent as [out | lse]."""
        if t.what != "out":
            rows = _heads(self._rows_of(t), t)
            if len(t.rows) == 1:  # some of the heads of one range: a plain copy is faster
                return rows.clone(memory_format=torch.contiguous_format)
            return rows.index_select(0, _index(t.rows, rows.device))
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
            accumulator = self.outputs[t.slot] if t.what == "out" else self.gradients[t.what][t.slot]
            like, (_, batch, heads, width) = accumulator.like, accumulator.shape
        heads = heads if t.heads is None else t.heads[1] - t.heads[0]
        dtype = self._dkv_dtype if t.what == "dkv" else None
        return like.new_empty((t.count, batch, heads, width + (t.what == "out")), dtype=dtype)

    def _merge(self, t: Transfer, message: Tensor) -> None:
        at = 0
        for start, stop in t.rows:
            rows = message[at : at + stop - start]
            out, lse = rows[..., :-1], rows[..., -1]
            if t.heads is None:
                self.outputs[t.slot].add(start, stop, out, lse)
            else:
                self.outputs[t.slot].add_to_heads(start, stop, t.heads, out, lse)
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
            rows.copy_(message) if len(t.rows) == 1 else rows.index_copy_(0, _index(t.rows, message.device), message)
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
    is_gradient = t.what in ("dq", "dkv") and t.heads is None and len(t.rows) <= MAX_RANGES
    return is_gradient and message.device.type in ADDED_TOGETHER


def _heads(x: Tensor, t: Transfer) -> Tensor:
    return x if t.heads is None else x[:, :, slice(*t.heads)]


def _extent(rows: Rows) -> tuple[int, int]:
    return min(start for start, _ in rows), max(stop for _, stop in rows)


@cache_by_stream(256)
def _index(rows: Rows, device: torch.device) -> Tensor:
    """Return the row indices of a transfer, relative to the start of the range that `_rows_of` returns."""
    first, _ = _extent(rows)
    return copy_to_device(np.concatenate([np.arange(start - first, stop - first) for start, stop in rows]), device)
