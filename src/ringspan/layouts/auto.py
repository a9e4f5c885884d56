"""``layout="auto"``: the first simple layout that is balanced well enough."""

from __future__ import annotations

from ringspan.layouts.balanced import balanced
from ringspan.layouts.contiguous import contiguous
from ringspan.layouts.cut import balance
from ringspan.layouts.layout import Layout
from ringspan.layouts.zigzag import zigzag
from ringspan.masks import Mask

GOOD_ENOUGH = 1.1


def auto(mask: Mask, world: int) -> tuple[Layout, str]:
    """Return the first of contiguous, zigzag, balanced whose balance is at most 1.1, else the best of them; and a note
    that says why.

    Contiguous comes first because it keeps neighbours together and so moves the fewest keys for windows and documents.

    >>> from ringspan import causal, full
    >>> auto(full(64), 4)[0].name, auto(causal(64), 4)[0].name
    ('contiguous', 'zigzag')
    """
    tried: list[tuple[float, Layout]] = []
    for candidate in (contiguous, zigzag, balanced):
        layout = candidate(mask, world)
        tried.append((balance(mask, layout), layout))
        if tried[-1][0] <= GOOD_ENOUGH:
            break
    chosen = min(tried, key=lambda pair: pair[0])[1]
    figures = ", ".join(f"{layout.name} {figure:.2f}" for figure, layout in tried)
    return chosen, f"layout {chosen.name}: first with balance <= {GOOD_ENOUGH}, else the best (balance: {figures})"
