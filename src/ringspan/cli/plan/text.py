"""A study as text for a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.table import Table

from ringspan.cli.console import table
from ringspan.cli.units import seconds, size

FIRST_STEPS, LAST_STEPS = 8, 2

COLUMNS = {
    "strategy": "candidate",
    "layout": "layout",
    "forward_s": "forward",
    "backward_s": "backward",
    "exposed_s": "exposed",
    "peak_bytes": "buffers",
    "rejected": "rejected",
}

FEWER_COLUMNS = {
    "world": "ranks",
    "seconds": "forward and backward",
    "speedup": "",
    "peak_bytes": "buffers",
    "plan": "fastest plan",
}


def summary(found: dict[str, Any]) -> str:
    """Return the choice and the figures behind it, above the table of candidates."""
    mask, chosen = found["mask"], found["chosen"]
    tflops = chosen["flops_per_s_of_rank"] / 1e12
    lines = [
        f"{chosen['strategy']} on {chosen['layout']}: {seconds(chosen['seconds'])} for forward and backward",
        "",
        f"  mask      {mask['name']}: {mask['queries']:,} × {mask['keys']:,}, {mask['share']:.3g} of all pairs visible",
        f"  machine   {found['world']:,} ranks of {found['hardware']['name']}, {found['hardware']['per_node']} in a node "
        f"({found['hardware']['source']})",
        f"  speed     {chosen['tokens_per_s']:,.0f} tokens/s through one layer's attention; {tflops:,.3g} TFLOP/s a rank, "
        f"{chosen['share_of_kernel_speed']:.0%} of the kernel's best",
        f"  speed-up  {_speedup(chosen)}",
        f"  exposed   {seconds(chosen['exposed_s'])} at most on a rank: waiting for messages, copies, merging, contention",
        f"  memory    {size(chosen['peak_bytes'])} for buffers on the fullest rank, of {size(found['hardware']['memory'])}",
        f"  balance   {chosen['balance']:.3f} (pairs of the busiest rank ÷ mean, exact)",
        f"  figures   {basis(found)}",
        *(f"  note      {note}" for note in found["notes"]),
        "",
    ]
    return "\n".join(lines)


def candidates(found: dict[str, Any]) -> Table:
    """Return a table of all candidates, and why some were rejected."""
    return table(COLUMNS, [_row(candidate) for candidate in found["candidates"]])


def fewer_ranks(found: dict[str, Any]) -> Table:
    """Return a table of the fastest plans for fewer ranks, and how much faster all ranks are."""
    rows = []
    for fewer in found["fewer_ranks"]:
        took = "–" if fewer["seconds"] is None else seconds(fewer["seconds"])
        speedup = "–" if fewer["speedup"] is None else f"{fewer['speedup']:.3g}"
        peak = "–" if fewer["peak_bytes"] is None else size(fewer["peak_bytes"])
        plan = fewer["rejected"] or f"{fewer['strategy']} on {fewer['layout']}"
        rows.append(
            {**fewer, "seconds": took, "world": f"{fewer['world']:,}", "speedup": speedup, "peak_bytes": peak, "plan": plan}
        )
    return table({**FEWER_COLUMNS, "speedup": f"speed-up of {found['world']:,}"}, rows)


def _speedup(chosen: dict[str, Any]) -> str:
    if chosen["speedup"] is None:
        return "one rank has too little memory for this sequence; over fewer ranks see below"
    return f"{chosen['speedup']:.3g} over one rank, which would take {seconds(chosen['one_rank_s'])}"


def basis(found: dict[str, Any]) -> str:
    """Say how the figures were obtained: from all ranks or from a sample."""
    by = found["candidates"][0]["simulated_ranks"]
    compared = "" if by == len(found["costed_ranks"]) else f"; candidates compared by {by:,} ranks"
    if found["exact"]:
        return f"exact: all {found['world']:,} ranks were planned and simulated{compared}; the machine is a model"
    return (
        f"sampled: {len(found['costed_ranks'])} of {found['world']:,} ranks were planned and simulated, among them the "
        f"busiest{compared}; the others are assumed to be as fast as their neighbours, so that a rejected candidate may be "
        "faster"
    )


def shortened(explained: str) -> str:
    """Return a plan's ``explain()``, without the steps in the middle if there are many."""
    shown: list[str] = []
    for is_step, lines in groupby(explained.splitlines(), key=lambda line: line.startswith("step ")):
        part = list(lines)
        if is_step and len(part) > FIRST_STEPS + LAST_STEPS + 1:
            left_out = f"… {len(part) - FIRST_STEPS - LAST_STEPS:,} more steps; rs.plan(…).explain() prints them all"
            part = [*part[:FIRST_STEPS], left_out, *part[-LAST_STEPS:]]
        shown += part
    return "\n".join(shown)


def _row(c: dict[str, Any]) -> dict[str, Any]:
    times = {key: "–" if c[key] is None else seconds(c[key]) for key in ("forward_s", "backward_s", "exposed_s")}
    peak = "–" if c["peak_bytes"] is None else size(c["peak_bytes"])
    return {**c, **times, "peak_bytes": peak, "rejected": c["rejected"] or ""}
