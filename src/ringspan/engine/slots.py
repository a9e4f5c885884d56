"""A rank's slots while it walks: buffers of rows, and how a transfer is read from and written to them.

Legend: rows first everywhere. S queries, T keys, B batch, H query heads, G key heads, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringspan.caching.by_stream import cache_by_stream, on_device
from ringspan.engine.messages import Route
from ringspan.kernels import GradientAccumulator, OutputAccumulator, Partial
from ringspan.plans import Transfer
from ringspan.plans.problem import Rows
from ringspan.plans.shape import is_packed
from ringspan.transports import PostExchange


class Arrival(NamedTuple):
    """A message that will have come when the step is over; None where it is received in place."""

    transfer: Transfer
    message: Tensor | None


class Slots:
    """Buffers by what they hold. ``plain`` are overwritten by what arrives, ``sums`` added to, ``results`` merged into.

    When other queries or keys move in, what was gathered for those before them (``gathered[what]``) is forgotten.
    """

    def __init__(
        self,
        *,
        plain: dict[str, list[Tensor]],
        sums: dict[str, list[GradientAccumulator]] | None = None,
        results: list[OutputAccumulator] | None = None,
    ) -> None:
        self.plain, self.sums, self.results = plain, sums or {}, results or []
        self.gathered: dict[str, Sequence[OutputAccumulator | GradientAccumulator]] = {
            "q": self.results or self.sums.get("dq", []),
            "kv": self.sums.get("dkv", []),
        }

    def post(self, route: Route, label: str) -> tuple[PostExchange, list[Arrival]]:
        """The step's exchange, and what is to be taken in when it is over, in order."""
        parcels = [self._pack(t) if is_packed(t) else self._rows(t) for t in route.parcels]
        rooms: dict[int, Tensor] = {}
        for wall in route.walls:
            rows = self.plain[wall.what][wall.slot][wall.start : wall.stop]
            rooms.update(zip(wall.recvs, rows.split_with_sizes(wall.sizes), strict=True))
        arrivals = []
        for t, parcel, room in route.arrivals:
            if parcel is not None:
                arrivals.append(Arrival(t, parcels[parcel]))
            elif room is not None:
                rooms[room] = self._apart(t)
                arrivals.append(Arrival(t, rooms[room]))
            elif self.gathered[t.what]:
                arrivals.append(Arrival(t, None))
        sends = tuple([(peer, parcels[number]) for peer, number in route.sends])
        return PostExchange(label, sends, tuple([(t.peer, rooms[n]) for n, t in enumerate(route.recvs)])), arrivals

    def take(self, arrivals: Sequence[Arrival]) -> None:
        """Lay what has arrived where it belongs."""
        for t, message in arrivals:
            if t.what in self.plain:
                self._overwrite(t, message)
            elif message is not None:
                self._merge(t, message) if t.what == "out" else self._add(t, message)

    def _pack(self, t: Transfer) -> Tensor:
        """The rows, copied together into one message."""
        if t.what != "out":
            rows = self._rows(t)
            return _heads(rows, t).index_select(0, _index(t.rows, rows.device))
        message = self._apart(t)
        at = 0
        for start, stop in t.rows:
            out, lse = (_heads(x, t) for x in self.results[t.slot].wide(start, stop))
            part = message[at : at + stop - start]
            part[..., :-1], part[..., -1] = out, lse
            at += stop - start
        return message

    def _apart(self, t: Transfer) -> Tensor:
        """Room for the message outside the slot. A result's lse is its last column."""
        if t.what in self.plain:
            like, (_, batch, heads, width) = self.plain[t.what][t.slot], self.plain[t.what][t.slot].shape
        else:
            gathered = self.results[t.slot] if t.what == "out" else self.sums[t.what][t.slot]
            like, (_, batch, heads, width) = gathered.like, gathered.shape
        heads = heads if t.heads is None else t.heads[1] - t.heads[0]
        return like.new_empty((t.count, batch, heads, width + (t.what == "out")))

    def _merge(self, t: Transfer, message: Tensor) -> None:
        out_BHSE, lse_BHS = message[..., :-1].permute(1, 2, 0, 3), message[..., -1].permute(1, 2, 0)
        at = 0
        for start, stop in t.rows:
            here = slice(at, at + stop - start)
            self.results[t.slot].add(start, stop, Partial(out_BHSE[:, :, here], lse_BHS[:, :, here]), heads=t.heads)
            at += stop - start

    def _add(self, t: Transfer, message: Tensor) -> None:
        if is_packed(t):
            _heads(self._rows(t), t).index_add_(0, _index(t.rows, message.device), message)
        else:
            self.sums[t.what][t.slot].add(*t.rows[0], message)

    def _overwrite(self, t: Transfer, message: Tensor | None) -> None:
        if message is not None:
            _heads(self._rows(t), t).index_copy_(0, _index(t.rows, message.device), message)
        for gathered in self.gathered[t.what][t.slot : t.slot + 1]:
            for start, stop in t.rows:
                gathered.clear(start, stop)

    def _rows(self, t: Transfer) -> Tensor:
        """The rows from the first that the transfer names to the last, those between them included."""
        start, stop = t.rows[0] if len(t.rows) == 1 else _extent(t.rows)
        if t.what in self.plain:
            return self.plain[t.what][t.slot][start:stop]
        return self.sums[t.what][t.slot].wide(start, stop)


def _heads(x: Tensor, t: Transfer) -> Tensor:
    return x if t.heads is None else x[:, :, slice(*t.heads)]


def _extent(rows: Rows) -> tuple[int, int]:
    return min(start for start, _ in rows), max(stop for _, stop in rows)


@cache_by_stream(256)
def _index(rows: Rows, device: torch.device) -> Tensor:
    """The rows of a transfer, counted from the first of its extent."""
    first, _ = _extent(rows)
    return on_device(np.concatenate([np.arange(start - first, stop - first) for start, stop in rows]), device)
