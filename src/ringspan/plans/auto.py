"""``strategy="auto"``: a rule short enough to say in a line, until a cost model knows better."""

from __future__ import annotations

from ringspan.layouts import Layout
from ringspan.masks import Mask
from ringspan.plans.scene import needed_rows

WORTH_IT = 0.8


def auto(mask: Mask, q_layout: Layout, kv_layout: Layout) -> tuple[str, str]:
    """``exchange`` where it moves at most 80% of what all keys to all ranks would take, else ``ring``; and why."""
    world = q_layout.world
    if world == 1:
        return "gather", "strategy gather: one rank has nothing to exchange"
    needed = needed_rows(mask, q_layout, kv_layout)
    moved = int(needed.sum() - needed.trace())
    everything = kv_layout.length * (world - 1)
    share = moved / everything if everything else 0.0
    chosen = "exchange" if share <= WORTH_IT else "ring"
    return (
        chosen,
        f"strategy {chosen}: exchange would move {share:.0%} of all keys to all ranks "
        f"(exchange up to {WORTH_IT:.0%}, else ring)",
    )
