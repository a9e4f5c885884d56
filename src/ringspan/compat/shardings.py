"""In which layouts tensors were sharded, by functions and by blocks, for calls that carry no layout of their own.

torch decides the order of such tensors by one process-wide switch, ``_cp_options.enable_load_balance``, which each
``_context_parallel_shard`` sets. Two shardings with different layouts in flight would make one of them wrong without an
error. So the layouts of all shardings are kept until something says which of them is meant: an assignment to the
switch, or an unsharding, after which the next sharding of that length is the only one that counts. What is kept depends
on the calls of the program only, which are the same on every rank of the group. It does not depend on which tensors are
alive.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

CONTIGUOUS = "contiguous"
HEAD_TAIL = "head-tail"


class Shardings:
    """The kinds of layouts in flight over one process group, for each sequence length.

    A kind is ``CONTIGUOUS``, ``HEAD_TAIL``, or the name of another balancer's class.
    """

    def __init__(self) -> None:
        self.has_uneven = False  # whether any sharding has given the ranks different numbers of tokens
        self._in_flight: dict[int, list[str]] = {}  # by length, in the order of their latest use
        self._ended: set[int] = set()  # the lengths that were unsharded since their latest sharding
        self._latest: dict[int, str] = {}  # by length, the kind of the latest sharding or block

    def record(self, kind: str, length: int, *, is_even: bool) -> None:
        """Record tensors that were sharded by a function."""
        earlier = [] if length in self._ended else self._in_flight.get(length, [])
        self._in_flight[length] = [*(other for other in earlier if other != kind), kind]
        self._ended.discard(length)
        self.record_block(kind, length, is_even=is_even)

    def record_block(self, kind: str, length: int, *, is_even: bool) -> None:
        """Record a block that was left. Its results can be unsharded, but attention over its tensors belongs inside it."""
        self.has_uneven |= not is_even
        self._latest[length] = kind

    def in_flight(self, length: int) -> list[str]:
        """Return the kinds in flight for this length, the latest last."""
        return self._in_flight.get(length, [])

    def latest(self, length: int) -> list[str]:
        """Return the kind of the latest sharding or block of this length, in a list, or an empty list."""
        return [self._latest[length]] if length in self._latest else []

    def end(self, length: int) -> None:
        """Let only the next sharding of this length count."""
        self._ended.add(length)

    def clear(self) -> None:
        self._in_flight.clear()
        self._ended.clear()
        self._latest.clear()


_of_groups: WeakKeyDictionary[dist.ProcessGroup, Shardings] = WeakKeyDictionary()


def shardings_of(group: dist.ProcessGroup) -> Shardings:
    """Return the shardings over a group. Those over other groups may be unknown to some of its ranks."""
    return _of_groups.setdefault(group, Shardings())


def clear_shardings() -> None:
    """Forget the kinds in flight, over all groups."""
    for shardings in list(_of_groups.values()):
        shardings.clear()
