"""Record the orders in which tensors were sharded, for calls whose tensors have no layout of their own.

torch decides the order of such tensors by one process-wide switch, ``_cp_options.enable_load_balance``, which each
``_context_parallel_shard`` sets. There, if two tensors of one length are sharded in different orders, the result of one
is silently wrong. So all orders of a length are kept until an assignment to the switch says which of them is meant.
What is kept depends on the calls of the program only, which are the same on every rank of the group. It does not depend
on which tensors are alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringspan.errors import InputError

CONTIGUOUS = "contiguous"
HEAD_TAIL = "head-tail"

# The orders of tensors by their length.
Orders = Mapping[int, tuple[str, ...]]

# What distinguishes the calls of compiled code in one state: the module, the mask and the lengths.
CallKey = tuple[object, ...]
# In place of a block: equal calls were made in different blocks.
AMBIGUOUS: Any = object()

T = TypeVar("T")


class Shardings:
    """The orders of the tensors that were sharded over one process group, for each sequence length.

    An order is ``CONTIGUOUS``, ``HEAD_TAIL``, or the name of another balancer's class.
    """

    def __init__(self) -> None:
        self.has_uneven = False  # whether any sharding has given the ranks different numbers of tokens
        # The orders that inputs of attention outside of blocks can have, by length. Replaced and never changed.
        self.of_inputs: Orders = {}
        self._of_blocks: Orders = {}
        self._of_all: Orders = {}  # sharded by functions and by blocks; declare() does not change it

    def record(self, order: str, length: int, *, is_even: bool) -> None:
        """Record tensors that were sharded by a function."""
        self.has_uneven |= not is_even
        self.of_inputs, self._of_all = _with(self.of_inputs, length, order), _with(self._of_all, length, order)

    def record_block(self, order: str, length: int, *, is_even: bool) -> None:
        """Record a block that was left. Its results can be unsharded, but attention over its tensors belongs inside
        it."""
        self.has_uneven |= not is_even
        self._of_blocks, self._of_all = _with(self._of_blocks, length, order), _with(self._of_all, length, order)

    def of_results(self, length: int) -> tuple[str, ...]:
        """Return the possible orders of a tensor of this length that is to be unsharded: those of inputs, and of blocks
        that were left."""
        return tuple(dict.fromkeys((*self.of_inputs.get(length, ()), *self._of_blocks.get(length, ()))))

    def of_others(self, order: str, length: int) -> tuple[str, ...]:
        """Return the orders of all tensors of this length, if there are any and none is in the given order; else ()."""
        orders = self._of_all.get(length, ())
        return () if order in orders or order in self.of_inputs.get(length, ()) else orders

    def declare(self, order: str) -> None:
        """Take all tensors that were sharded until now to be in this order."""
        self.of_inputs = dict.fromkeys(self.of_inputs, (order,))
        self._of_blocks = dict.fromkeys(self._of_blocks, (order,))

    def clear(self) -> None:
        self.of_inputs, self._of_blocks, self._of_all = {}, {}, {}


def _with(orders: Orders, length: int, order: str) -> Orders:
    known = orders.get(length, ())
    return orders if order in known else {**orders, length: (*known, order)}


_of_groups: WeakKeyDictionary[dist.ProcessGroup, Shardings] = WeakKeyDictionary()


def shardings_of(group: dist.ProcessGroup) -> Shardings:
    """Return the shardings over a group. Those over other groups may be unknown to some of its ranks."""
    return _of_groups.setdefault(group, Shardings())


class States:
    """The latest states of the switch, of all shardings and of the open blocks, by number.

    Compiled code passes ``number`` on as an input of its graph. If a graph computes a checkpoint again in its backward
    pass, the input is still that of the forward pass.
    """

    LIMIT = 1024

    def __init__(self) -> None:
        self.number = torch.tensor(0)
        self._states: dict[int, tuple[bool, dict[Shardings, Orders]]] = {}
        # The layouts of the block around each call of compiled code, by the number of the state and the call. Blocks
        # belong to tasks, so a state does not determine them.
        self._blocks: dict[int, dict[CallKey, Any]] = {}

    def note(self, is_balanced: bool, *, blocks_changed: bool = False) -> None:
        """Give the present state a new number, if it differs from the latest."""
        state = is_balanced, {shardings: shardings.of_inputs for shardings in _of_groups.values()}
        number = int(self.number)
        if self._states.get(number) == state and not blocks_changed:
            return
        self.number = torch.tensor(number + 1)
        self._states[number + 1] = state
        for by_number in (self._states, self._blocks):
            by_number.pop(number + 1 - self.LIMIT, None)

    def block_of_call(self, number: int, call: CallKey, innermost: T) -> T:
        """Return the block of a call of compiled code: ``innermost`` or, in a recomputation, that of the forward pass.

        Two tasks can make equal calls in one state, in different blocks. Then a recomputation raises.
        """
        known = self._blocks.setdefault(number, {})
        if number == int(self.number):
            known[call] = innermost if known.get(call, innermost) == innermost else AMBIGUOUS
            return innermost
        found: T = known.get(call, innermost)
        if found is AMBIGUOUS:
            raise InputError(
                "several tasks have called this compiled checkpoint in different context_parallel blocks, and its backward "
                "pass attends again: compile the function inside the checkpoint"
            )
        return found

    def find(self, number: int, shardings: Shardings) -> tuple[bool, Orders] | None:
        """Return the switch and the orders of inputs in an earlier state, or None for the present state."""
        if number == int(self.number):
            return None
        if number not in self._states:
            raise InputError(
                f"the order of tensors changed {self.LIMIT} times between the forward pass of a compiled checkpoint and its "
                "backward pass, which attends again: call backward() earlier"
            )
        is_balanced, orders = self._states[number]
        return is_balanced, orders.get(shardings, {})


STATES = States()


def declare_order(order: str) -> None:
    """Take all tensors that were sharded until now, over any group, to be in this order."""
    for shardings in list(_of_groups.values()):
        shardings.declare(order)


def clear_shardings() -> None:
    """Forget all shardings, over all groups: no tensor that was sharded until now is used any more."""
    for shardings in list(_of_groups.values()):
        shardings.clear()
