"""The validated arguments of ``plan`` and ``best_on``."""

from __future__ import annotations

from typing import NamedTuple

from ringspan.costs.hardware import Hardware
from ringspan.layouts import Layout, LayoutLike, for_nodes, make_layout
from ringspan.masks import Mask
from ringspan.strategies.protocol import Strategy
from ringspan.strategies.registry import spec


class PlanRequest(NamedTuple):
    """The strategy and layouts that were given. None: to be chosen. A ``kv_layout`` of None is that of the queries."""

    strategy: str | None
    q_layout: Layout | None
    kv_layout: Layout | None
    notes: tuple[str, ...]


def check_request(
    mask: Mask,
    world: int,
    *,
    strategy: str | Strategy,
    layout: LayoutLike,
    kv_layout: LayoutLike | None,
    machine: Hardware | None = None,
) -> PlanRequest:
    """Validate the arguments of a user. Returns a request, and a note for each argument that was given.

    A layout that can be made for nodes is made for those of the machine, if one was given.
    """
    if machine is not None:
        layout = for_nodes(layout, world, machine.per_node)
        kv_layout = None if kv_layout is None else for_nodes(kv_layout, world, machine.per_node)
    text, q_layout, k_layout = None, None, None
    notes = []
    is_named = isinstance(layout, str) and layout != "auto"
    if is_named or not isinstance(layout, str):
        q_layout, note = make_layout(layout, mask, world)
        notes.append(note)
    if kv_layout is not None or mask.lengths[0] != mask.lengths[1]:
        of_keys = kv_layout if kv_layout is not None else layout if is_named else "contiguous"
        k_layout, note = make_layout(of_keys, mask.transposed, world)
        notes.append(f"kv {note}")
    if strategy != "auto":
        text = spec(strategy)
        notes.append(f"strategy {text}: as given")
    return PlanRequest(text, q_layout, k_layout, tuple(notes))
