"""A study as text for a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ringspan.cli.plan.units import seconds, size
from ringspan.planner.auto import MOST_RANKS

FIRST_STEPS, LAST_STEPS = 8, 2


def text(found: dict[str, Any]) -> str:
    """What was chosen, and why not another."""
    mask, chosen = found["mask"], found["chosen"]
    width = max(len(candidate["strategy"]) for candidate in found["candidates"]) + 2
    lines = [
        f"{chosen['strategy']} on {chosen['layout']}: {seconds(chosen['seconds'])} for forward and backward, of which the wire "
        f"shows {seconds(chosen['exposed_s'])}",
        "",
        f"  mask      {mask['name']}: {mask['queries']:,} × {mask['keys']:,}, {mask['share']:.3g} of all pairs visible",
        f"  machine   {found['world']:,} ranks of {found['hardware']['name']}, {found['hardware']['per_node']} in a node "
        f"({found['hardware']['source']})",
        f"  memory    {size(chosen['peak_bytes'])} for buffers on the fullest rank, of {size(found['hardware']['memory'])}",
        f"  balance   {chosen['balance']:.3f} (pairs of the busiest rank ÷ mean, exact)",
        f"  figures   {basis(found)}",
        *(f"  note      {note}" for note in found["notes"]),
        "",
        f"{'candidate':<{width}}{'layout':<13}{'forward':>10}{'backward':>10}{'wire shows':>12}{'buffers':>10}   rejected",
        "-" * (width + 74),
        *(_row(candidate, width) for candidate in found["candidates"]),
    ]
    return "\n".join(lines)


def basis(found: dict[str, Any]) -> str:
    """What the figures stand on."""
    compared = "" if all(c["exact"] in (True, None) for c in found["candidates"]) else f"; candidates compared by {MOST_RANKS}"
    if found["exact"]:
        return f"exact: all {found['world']:,} ranks were planned and walked through{compared}; the machine is a model"
    return (
        f"sampled: {len(found['costed_ranks'])} of {found['world']:,} ranks were planned and walked through, among them the "
        f"busiest{compared}; the others are taken to keep pace with their neighbours"
    )


def shortened(explained: str) -> str:
    """A plan's ``explain()`` with the steps in the middle left out, where there are more than one would read."""
    shown: list[str] = []
    for is_step, lines in groupby(explained.splitlines(), key=lambda line: line.startswith("step ")):
        part = list(lines)
        if is_step and len(part) > FIRST_STEPS + LAST_STEPS + 1:
            left_out = f"… {len(part) - FIRST_STEPS - LAST_STEPS:,} more steps; rs.plan(…).explain() prints them all"
            part = [*part[:FIRST_STEPS], left_out, *part[-LAST_STEPS:]]
        shown += part
    return "\n".join(shown)


def _row(c: dict[str, Any], width: int) -> str:
    cells = [seconds(c[key]) if c[key] is not None else "–" for key in ("forward_s", "backward_s", "exposed_s")]
    peak = size(c["peak_bytes"]) if c["peak_bytes"] is not None else "–"
    figures = f"{cells[0]:>10}{cells[1]:>10}{cells[2]:>12}{peak:>10}"
    return f"{c['strategy']:<{width}}{c['layout']:<13}{figures}   {c['rejected'] or ''}".rstrip()
