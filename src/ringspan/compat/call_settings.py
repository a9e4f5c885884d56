"""What attention reads from the state of the process, and the same again when a checkpoint makes a call a second time.

``_cp_options`` and the shardings can change between the forward pass and the recomputation of a checkpoint in the
backward pass. So a call in a checkpoint stores what it has read there, and the recomputation reads that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ringspan.compat.options import _cp_options
from ringspan.compat.shardings import CONTIGUOUS, HEAD_TAIL, STATES, Shardings
from ringspan.errors import UnplannedAttention
from ringspan.frontends.recompute import contexts_of_recomputation
from ringspan.plans.data import DkvDtype


class CallSettings(NamedTuple):
    """The switches, the strategy of the rotate method, and the orders of sharded tensors by their length."""

    is_balanced: bool
    strategy: str
    orders: Mapping[int, tuple[str, ...]]
    converts_to_f32: bool = True

    def dkv_dtype(self, dtype: torch.dtype) -> DkvDtype:
        """Return the dtype in which gradients of keys and values of this dtype are sent."""
        return "float32" if self.converts_to_f32 or dtype != torch.bfloat16 else "bfloat16"

    def orders_of(self, length: int) -> tuple[str, ...]:
        """Return the orders that tensors of a length can have: those of shardings or, if there are none, that of the
        switch."""
        return self.orders.get(length) or (HEAD_TAIL if self.is_balanced else CONTIGUOUS,)

    def agrees_with(self, later: CallSettings) -> bool:
        """Return whether later settings say the same of all tensors that these know."""
        same_orders = all(later.orders.get(length) == orders for length, orders in self.orders.items())
        return self.is_balanced == later.is_balanced and same_orders


class HeldSettings:
    """A context in which the settings of a process group are these."""

    def __init__(self, shardings: Shardings, settings: CallSettings) -> None:
        self.shardings, self.settings = shardings, settings

    def __enter__(self) -> None:
        _held.stack.append(self)

    def __exit__(self, *raised: Any) -> None:
        _held.stack.pop()


class _Held(threading.local):
    def __init__(self) -> None:
        self.stack: list[HeldSettings] = []


_held = _Held()


def settings_of(shardings: Shardings) -> CallSettings:
    """Return the settings for calls over a process group, given by its shardings: those held here, or those of the
    process."""
    for held in reversed(_held.stack):
        if held.shardings is shardings:
            return held.settings
    return CallSettings(_cp_options.enable_load_balance, _cp_options.strategy, shardings.of_inputs, _cp_options.convert_to_f32)


def settings_at(number: int, shardings: Shardings) -> AbstractContextManager[None]:
    """Return a context with the settings of the state with this number."""
    state = STATES.find(number, shardings)
    if state is None:
        return nullcontext()
    is_balanced, orders = state
    return HeldSettings(shardings, CallSettings(is_balanced, _cp_options.strategy, orders, _cp_options.convert_to_f32))


def note_change_of_blocks() -> None:
    """Give the present state a new number: a block was entered or left."""
    STATES.note(_cp_options.enable_load_balance, blocks_changed=True)


def hold_settings(shardings: Shardings) -> None:
    """Let the checkpoints around this call run their functions again with the settings that are in force now."""
    for contexts in contexts_of_recomputation():
        now = settings_of(shardings)
        held = next((c for c in contexts if isinstance(c, HeldSettings) and c.shardings is shardings), None)
        if held is None:
            contexts.append(HeldSettings(shardings, now))
        elif held.settings.agrees_with(now):
            held.settings = now
        else:
            raise UnplannedAttention(
                "the order of tensors (_cp_options.enable_load_balance, or the orders of _context_parallel_shard) changed "
                "between two attention calls of one activation checkpoint, which runs again with one of them: assign and "
                "shard outside of the checkpoint"
            )
