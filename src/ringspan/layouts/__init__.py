"""Layouts: functions ``mask, world -> Layout`` that assign tokens to ranks. Any length, any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from ringspan.caching.by_digest import cache_by_digest
from ringspan.errors import LayoutError, unknown_name
from ringspan.layouts.auto import auto
from ringspan.layouts.balanced import balanced
from ringspan.layouts.contiguous import contiguous
from ringspan.layouts.cut import Tiles, areas, balance, cut
from ringspan.layouts.layout import Layout, Pieces, Span, check_world
from ringspan.layouts.per_document import per_document
from ringspan.layouts.round_robin import round_robin
from ringspan.layouts.striped import striped
from ringspan.layouts.zigzag import zigzag
from ringspan.masks import Mask

LAYOUTS: dict[str, Callable[[Mask, int], Layout]] = {
    f.__name__: f for f in (contiguous, zigzag, striped, per_document, round_robin, balanced)
}

LayoutLike: TypeAlias = "str | Layout | Sequence[Iterable[Sequence[int]]] | Callable[[Mask, int], Layout]"


def make_layout(given: LayoutLike, mask: Mask, world: int) -> tuple[Layout, str]:
    """Return the layout of the mask's queries for a ``layout=`` argument, and a note on its origin.

    The argument is a name, a :class:`Layout`, a list of spans for each rank, or a function of (mask, world).
    """
    world, n = check_world(world), mask.lengths[0]
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
    return layout, note


@cache_by_digest(256)
def named_layout(name: str, mask: Mask, world: int) -> tuple[Layout, str]:
    """Return the layout of that name, or the one that ``"auto"`` chooses, and a note."""
    if name == "auto":
        return auto(mask, world)
    if name not in LAYOUTS:
        raise LayoutError(f"{unknown_name('layout', name, [*LAYOUTS, 'auto'])}, or give a list of spans")
    return LAYOUTS[name](mask, world), f"layout {name}: as given"


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
    "check_world",
    "contiguous",
    "cut",
    "make_layout",
    "named_layout",
    "per_document",
    "round_robin",
    "striped",
    "zigzag",
]
