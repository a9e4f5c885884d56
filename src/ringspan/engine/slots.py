"""A rank's slots while it walks: buffers of rows, and how a transfer is read from and written to them.

Legend: rows first everywhere. S queries, T keys, B batch, H query heads, G key heads, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ringspan.kernels import Accumulator, Partial
from ringspan.plans import Plan, Step, Transfer
from ringspan.plans.shape import is_packed
from ringspan.transports import Post


class Slots:
    """Buffers by what they hold. ``plain`` are overwritten by what arrives, ``sums`` added to, ``results`` merged into.

    ``reset`` is called with (what, slot, start, stop) when other rows have moved in.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        plain: dict[str, list[Tensor]],
        sums: dict[str, list[Tensor]] | None = None,
        results: list[Accumulator] | None = None,
        reset: Callable[[str, int, int, int], None],
    ) -> None:
        self.rank = plan.rank
        self.plain, self.sums, self.results, self.reset = plain, sums or {}, results or [], reset

    def post(self, step: Step, label: str) -> tuple[Post, list[tuple[Transfer, Tensor]]]:
        """The step's exchange, and what is to be taken in when it is over: (transfer, message) in order."""
        sends = [(t, self._pack(t)) for t in step.sends]
        to_self = iter([message for t, message in sends if t.peer == self.rank])
        arrivals = [(t, next(to_self) if t.peer == self.rank else self._buffer(t)) for t in step.recvs]
        post = Post(
            label,
            tuple((t.peer, message) for t, message in sends if t.peer != self.rank),
            tuple((t.peer, message) for t, message in arrivals if t.peer != self.rank),
        )
        return post, arrivals

    def take(self, arrivals: Sequence[tuple[Transfer, Tensor]]) -> None:
        """Lay what has arrived where it belongs."""
        for t, message in arrivals:
            at = 0
            for start, stop in t.rows:
                self._lay(t, start, stop, message[at : at + stop - start])
                at += stop - start

    def _pack(self, t: Transfer) -> Tensor:
        """The rows as one contiguous message: a view where they lie together, a copy where not."""
        if not is_packed(t):
            return self._tensor(t)[slice(*t.rows[0])].contiguous()
        message = self._apart(t)
        at = 0
        for start, stop in t.rows:
            part = message[at : at + stop - start]
            if t.what == "out":
                result = self.results[t.slot].finish()
                part[..., :-1], part[..., -1] = _heads(result.out[start:stop], t), _heads(result.lse[start:stop], t)
            else:
                part.copy_(_heads(self._tensor(t)[start:stop], t))
            at += stop - start
        return message

    def _buffer(self, t: Transfer) -> Tensor:
        """Where the message is received: the slot itself if it can be, else a buffer to be laid out later."""
        if t.what in self.plain and not is_packed(t):
            return self._tensor(t)[slice(*t.rows[0])]
        return self._apart(t)

    def _apart(self, t: Transfer) -> Tensor:
        """Room for the message outside the slot. A result's lse is its last column."""
        like = self.results[t.slot].out_SBHE if t.what == "out" else self._tensor(t)
        width = like.shape[-1] + (t.what == "out")
        heads = like.shape[2] if t.heads is None else t.heads[1] - t.heads[0]
        return like.new_empty((t.count, like.shape[1], heads, width))

    def _lay(self, t: Transfer, start: int, stop: int, message: Tensor) -> None:
        if t.what == "out":
            part = Partial(message[..., :-1].permute(1, 2, 0, 3), message[..., -1].permute(1, 2, 0))
            self.results[t.slot].add(start, stop, part, heads=t.heads)
            return
        target = _heads(self._tensor(t)[start:stop], t)
        if t.what in self.sums:
            target += message
            return
        if target.data_ptr() != message.data_ptr():
            target.copy_(message)
        self.reset(t.what, t.slot, start, stop)

    def _tensor(self, t: Transfer) -> Tensor:
        return (self.plain if t.what in self.plain else self.sums)[t.what][t.slot]


def _heads(x: Tensor, t: Transfer) -> Tensor:
    return x if t.heads is None else x[:, :, slice(*t.heads)]
