"""In which orders tensors were sharded, by functions and by blocks, for calls that carry no layout of their own.

torch decides the order of such tensors by one process-wide switch, ``_cp_options.enable_load_balance``, which each
``_context_parallel_shard`` sets. Two shardings of one length in different orders make one of them wrong without an
error. So all orders of a length are kept until an assignment to the switch says which of them is meant. What is kept
depends on the calls of the program only, which are the same on every rank of the group. It does not depend on which
tensors are alive.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

CONTIGUOUS = "contiguous"
HEAD_TAIL = "head-tail"


class Shardings:
    """The orders of the tensors that were sharded over one process group, for each sequence length.

    An order is ``CONTIGUOUS``, ``HEAD_TAIL``, or the name of another balancer's class.
    """

    def __init__(self) -> None:
        self.has_uneven = False  # whether any sharding has given the ranks different numbers of tokens
        self._of_functions: dict[int, tuple[str, ...]] = {}
        self._of_blocks: dict[int, tuple[str, ...]] = {}

    def record(self, order: str, length: int, *, is_even: bool) -> None:
        """Record tensors that were sharded by a function."""
        self.has_uneven |= not is_even
        _add(self._of_functions, length, order)

    def record_block(self, order: str, length: int, *, is_even: bool) -> None:
        """Record a block that was left. Its results can be unsharded, but attention over its tensors belongs inside it."""
        self.has_uneven |= not is_even
        _add(self._of_blocks, length, order)

    def of_inputs(self, length: int) -> list[str]:
        """Return the orders that inputs of attention outside of blocks can have."""
        return list(self._of_functions.get(length, ()))

    def of_results(self, length: int) -> list[str]:
        """Return the orders that tensors can have which are to be unsharded: those of inputs and of blocks that were left."""
        return list(dict.fromkeys((*self._of_functions.get(length, ()), *self._of_blocks.get(length, ()))))

    def declare(self, order: str) -> None:
        """Take all tensors that were sharded until now to be in this order."""
        for orders in (self._of_functions, self._of_blocks):
            orders.update(dict.fromkeys(orders, (order,)))

    def clear(self) -> None:
        self._of_functions.clear()
        self._of_blocks.clear()


def _add(orders: dict[int, tuple[str, ...]], length: int, order: str) -> None:
    if order not in orders.get(length, ()):
        orders[length] = (*orders.get(length, ()), order)


_of_groups: WeakKeyDictionary[dist.ProcessGroup, Shardings] = WeakKeyDictionary()


def shardings_of(group: dist.ProcessGroup) -> Shardings:
    """Return the shardings over a group. Those over other groups may be unknown to some of its ranks."""
    return _of_groups.setdefault(group, Shardings())


def declare_order(order: str) -> None:
    """Take all tensors that were sharded until now, over any group, to be in this order."""
    for shardings in list(_of_groups.values()):
        shardings.declare(order)


def clear_shardings() -> None:
    """Forget all shardings, over all groups: no tensor that was sharded until now is used any more."""
    for shardings in list(_of_groups.values()):
        shardings.clear()
