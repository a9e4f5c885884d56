"""Layouts: functions ``mask, world -> Layout`` that assign tokens to ranks. Any length, any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ringspan.caching.by_digest import cache_by_digest
from ringspan.errors import LayoutError
from ringspan.layouts.auto import auto
from ringspan.layouts.balanced import balanced
from ringspan.layouts.contiguous import contiguous
from ringspan.layouts.cut import Tiles, areas, balance, cut
from ringspan.layouts.end_to_end import end_to_end
from ringspan.layouts.layout import Layout, Pieces, Span, check_world
from ringspan.layouts.options import parse_options
from ringspan.layouts.per_document import per_document
from ringspan.layouts.round_robin import round_robin
from ringspan.layouts.striped import striped
from ringspan.layouts.zigzag import zigzag
from ringspan.masks import BatchMask, Mask

LAYOUTS: dict[str, Callable[..., Layout]] = {
    f.__name__: f for f in (contiguous, zigzag, striped, per_document, round_robin, balanced)
}

LayoutLike: TypeAlias = "str | Layout | Sequence[Iterable[Sequence[int]]] | Callable[[Mask, int], Layout]"


def make_layout(given: LayoutLike, mask: Mask, world: int) -> tuple[Layout, str]:
    """Return the layout of the mask's queries for a ``layout=`` argument, and a note on its origin.

    The argument is a name, a :class:`Layout`, a list of spans for each rank, or a function of (mask, world).
    """
    world, n = check_world(world), mask.lengths[0]
    if isinstance(mask, BatchMask) and not isinstance(given, str) and not (isinstance(given, Layout) and given.length == n):
        return by_rows(given, mask, world), "layout of each row: as given"
    if isinstance(given, str):
        return named_layout(given, mask, world)
    if isinstance(given, Layout):
        layout, note = given, f"layout {given.name}: as given"
    elif callable(given):
        made = given(mask, world)
        layout = made if isinstance(made, Layout) else Layout(made, length=n)
        note = f"layout {getattr(given, '__name__', given)!s}: as given"
    else:
        layout, note = Layout(given, length=n), "layout spans: as given"
    if (layout.length, layout.world) != (n, world):
        raise LayoutError(
            f"{layout!r} does not fit: the mask has {n} tokens here and the group {world} ranks. Make the layout for those"
        )
    if isinstance(mask, BatchMask):
        _check_rows(layout, mask)
    return layout, note


def _check_rows(layout: Layout, mask: BatchMask) -> None:
    """Raise if a rank does not have as many tokens of each row, the rows in order."""
    count, n = len(mask.rows), mask.row_lengths[0]
    for rank in range(layout.world):
        rows, held = layout.positions(rank) // max(n, 1), layout.counts[rank]
        if held % count or (rows.reshape(count, -1) != np.arange(count)[:, None]).any():
            raise LayoutError(
                f"{layout!r} does not give rank {rank} as many tokens of each of the {count} rows of the batch, in their "
                "order: give a layout of one row, or one for each row"
            )


@cache_by_digest(256)
def named_layout(name: str, mask: Mask, world: int) -> tuple[Layout, str]:
    """Return the layout of that name, or the one that ``"auto"`` chooses, and a note.

    The name may have options, as in ``"balanced(per_node=8)"``.
    """
    if isinstance(mask, BatchMask):
        return by_rows(name, mask, world), f"layout {name} of each row: as given"
    if name == "auto":
        return auto(mask, world)
    make, options = parse_options(
        name, LAYOUTS, kind="layout", error=LayoutError, positional=2, hint=", or give a list of spans"
    )
    return make(mask, world, **options), f"layout {name}: as given"


def by_rows(given: LayoutLike | Sequence[Layout], mask: BatchMask, world: int) -> Layout:
    """Return the layout of the rows of a batch, laid end to end, from one layout for all rows or from one for each.

    A rank has as many tokens of each row as of any other, so that its shard has a batch dim. If a row's layout gives
    other ranks a token more than the first row's layout does, these ranks are renumbered.
    """
    each = isinstance(given, list | tuple) and bool(given) and all(isinstance(one, Layout) for one in given)
    of_rows: Sequence[Any] = given if each else [given] * len(mask.rows)  # type: ignore[assignment]
    if len(of_rows) != len(mask.rows):
        raise LayoutError(f"{len(of_rows)} layouts for a batch of {len(mask.rows)} rows: give one for all, or one for each")
    layouts = [make_layout(one, row, world)[0] for one, row in zip(of_rows, mask.rows, strict=True)]
    layouts = [_with_counts(layout, layouts[0].counts) for layout in layouts]
    if len({layout.counts for layout in layouts}) > 1:
        raise LayoutError(
            f"a rank must have as many tokens of each row of a batch, but the layouts have {layouts[0].counts}, then "
            f"{next(one.counts for one in layouts if one.counts != layouts[0].counts)} tokens"
        )
    return end_to_end(layouts, layouts[0].name)


def _with_counts(layout: Layout, counts: Sequence[int]) -> Layout:
    """Renumber ranks such that rank i has ``counts[i]`` tokens, if there are such ranks; else return the layout.

    Ranks that have as many tokens already keep their number, and the others get a near one: neighbours share documents,
    and a node.
    """
    if sorted(layout.counts) != sorted(counts):
        return layout
    order = list(range(layout.world))
    moved = [rank for rank in order if layout.counts[rank] != counts[rank]]
    for rank in tuple(moved):
        order[rank] = min((other for other in moved if layout.counts[other] == counts[rank]), key=lambda x: abs(x - rank))
        moved.remove(order[rank])
    return layout.renumbered(order)


def for_nodes(given: LayoutLike, world: int, per_node: int) -> LayoutLike:
    """Return the layout for nodes of ``per_node`` ranks, if the given one can be made for nodes.

    >>> for_nodes("balanced", 16, 8), for_nodes("balanced", 8, 8), for_nodes("zigzag", 16, 8)
    ('balanced(per_node=8)', 'balanced', 'zigzag')
    """
    return f"balanced(per_node={per_node})" if given == "balanced" and world > per_node else given


__all__ = [
    "LAYOUTS",
    "Layout",
    "LayoutLike",
    "Pieces",
    "Span",
    "Tiles",
    "areas",
    "auto",
    "balance",
    "balanced",
    "by_rows",
    "check_world",
    "contiguous",
    "cut",
    "end_to_end",
    "for_nodes",
    "make_layout",
    "named_layout",
    "per_document",
    "round_robin",
    "striped",
    "zigzag",
]
