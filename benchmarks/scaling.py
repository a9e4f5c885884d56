"""Write docs/scaling.md: the cost of attention split over 8 to 4,096 H200s, by the cost model.

    python benchmarks/scaling.py            the whole page, some minutes
    python benchmarks/scaling.py --most 64  only up to 64 GPUs
    python benchmarks/scaling.py --only documents   only the tables whose title has this word; the others stay

If there are many ranks, a sample is planned and simulated: those with the most work, those that wait longest for keys,
and others evenly spread. The others are assumed to have the timeline of the nearest sampled rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import numpy as np

import ringspan as rs
from ringspan.bench.bounds import least_seconds
from ringspan.costs import Cost, named_hardware
from ringspan.costs.hardware import Hardware
from ringspan.planner import cost
from ringspan.planner.microbatches import FEW_PIECES, MORE_PIECES
from ringspan.planner.samples import sample
from ringspan.strategies.hierarchical import NODES_FOR_PIECES

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
MACHINE = "h200x8"
SHAPE = rs.Shape(heads=64, kv_heads=8, head_dim=128)
WORLDS = (8, 32, 128, 512, 2048, 4096)
TOKENS = 1 << 20
TOKENS_PER_RANK = 1 << 14


class Study(NamedTuple):
    """Masks for a growing world. Up to ``exact`` ranks all are planned and simulated, of more ranks a sample of
    ``FEW``."""

    text: str
    layout: str
    exact: int
    mask_for: Callable[[int], rs.Mask]
    has_documents: bool = False


FEW = 32


def documents(n: int, seed: int = 0) -> rs.Mask:
    """Make documents of log-normal lengths of about 8,192 tokens, as in packed training data."""
    count = max(1, n // 8192)
    share = np.random.default_rng(seed).lognormal(sigma=1.0, size=count)
    cuts = np.round(np.cumsum(share) / share.sum() * n).astype(int)
    return rs.documents(np.diff(np.concatenate([[0], cuts])))


# With a causal mask all ranks have similar work. Documents differ, and all ranks wait for those with the longest one.
STUDIES = {
    "Strong scaling, causal": Study("1,048,576 tokens, however many GPUs.", "zigzag", 32, lambda world: rs.causal(TOKENS)),
    "Weak scaling, causal": Study(
        "16,384 tokens a GPU: the sequence grows with the number of GPUs, and the work of each with it.",
        "zigzag",
        32,
        lambda world: rs.causal(TOKENS_PER_RANK * world),
    ),
    "Weak scaling, packed documents": Study(
        "16,384 tokens a GPU, in documents of log-normal length, 8,192 tokens on average: the work of a GPU stays the same.",
        "balanced(per_node=8)",
        512,
        lambda world: documents(TOKENS_PER_RANK * world),
        has_documents=True,
    ),
}
TWO_BATCHES = "Two batches in flight, packed documents"
# These send all keys for any mask, so that simulating a few ranks is enough.
MOVE_EVERYTHING = ("ring", "gather")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=max(WORLDS), help="the largest number of GPUs (default 4096)")
    parser.add_argument("--only", default="", help="write only the tables whose title has this word")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    machine = named_hardware(MACHINE)
    head, _, rest = args.page.read_text().partition("<!-- tables -->")
    old, _, conclusions = rest.partition("<!-- end of tables -->")
    tables = []
    for title, study in STUDIES.items():
        if args.only not in title:
            tables.append(_section(old, title))
            continue
        print(title, file=sys.stderr)
        rows = [row for world in WORLDS if world <= args.most for row in _rows(study, world, machine)]
        tables.append(f"## {title}\n\n{_wrapped(f'{study.text} Layout `{study.layout}`.')}\n\n{_table(rows)}\n")
    if args.only in TWO_BATCHES:
        print(TWO_BATCHES, file=sys.stderr)
        tables.append(_two_batches(machine, args.most))
    else:
        tables.append(_section(old, TWO_BATCHES))
    args.page.write_text(f"{head}<!-- tables -->\n\n" + "\n".join(tables) + f"\n<!-- end of tables -->{conclusions}")
    return 0


def _two_batches(machine: Hardware, most: int) -> str:
    """Return the section about `rs.interleave`: two batches, one after the other and in flight together."""
    layout, rows = f"balanced(per_node={machine.per_node})", []
    for world in (w for w in (128, 512) if w <= most):
        masks = [documents(TOKENS_PER_RANK * world, seed) for seed in (0, 1)]
        ideal = sum(_ideal_seconds(mask, world, machine) for mask in masks)
        for options in ("hierarchical(per_node={})", "hierarchical(per_node={}, pieces=4)", "hybrid(per_node={})"):
            strategy = options.format(machine.per_node)
            print(f"  {world} GPUs, {strategy}", file=sys.stderr)
            parts = [rs.plan(mask, world=world, layout=layout, strategy=strategy) for mask in masks]
            plans = [part.for_heads(SHAPE.heads, SHAPE.kv_heads) for part in (*parts, rs.interleave(*parts))]
            a, b, both = (cost([plan.at(rank) for rank in range(world)], machine, SHAPE) for plan in plans)
            apart = a.seconds + b.seconds
            rows.append(
                f"| {world} | `{strategy}` | {apart * 1e3:,.0f} | {both.seconds * 1e3:,.0f} | {ideal / apart:.0%} | "
                f"{ideal / both.seconds:.0%} | {max(a.peak_bytes, b.peak_bytes) / 2**30:.1f} | {both.peak_bytes / 2**30:.1f} |"
            )
    head = (
        "| GPUs | strategy | one after the other, ms | interleaved, ms | of the ideal | interleaved | buffers, GiB "
        "| interleaved |\n"
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    text = (
        "Two different batches as in the table above, 16,384 tokens a GPU each, with `rs.interleave` "
        "([batches.md](batches.md)). All ranks are planned and simulated."
    )
    return f"## {TWO_BATCHES}\n\n{_wrapped(text)}\n\n" + "\n".join([head, *rows]) + "\n"


def _wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _section(tables: str, title: str) -> str:
    """Return a section of the page as it stands."""
    return f"## {title}\n" + tables.partition(f"## {title}\n")[2].partition("\n## ")[0].rstrip() + "\n"


def _rows(study: Study, world: int, machine: Hardware) -> Iterator[list[str]]:
    """Yield one row for each applicable strategy, the fastest first."""
    found: list[tuple[float, list[str]]] = []
    mask = study.mask_for(world)
    ideal = _ideal_seconds(mask, world, machine)
    # The bound leaves kernels their best speed, at which the ideal is computed as well.
    bound = ideal / least_seconds(np.diff(mask.documents()).tolist(), world, -(-mask.lengths[0] // world), machine, SHAPE)
    for strategy in _strategies(world, machine, study):
        print(f"  {world} GPUs, {strategy}", file=sys.stderr)
        most = world if world <= study.exact and strategy not in MOVE_EVERYTHING else FEW
        figures = _cost(mask, world, study.layout, strategy, machine, most)
        fits = "" if figures.memory_bytes <= machine.memory else " (does not fit)"
        found.append(
            (
                figures.seconds + 1e9 * bool(fits),
                [
                    f"{world:,}",
                    f"`{strategy}`{fits}",
                    f"{figures.seconds * 1e3:,.0f}",
                    f"{figures.exposed_s / figures.seconds:.0%}",
                    f"{ideal / figures.seconds:.0%}",
                    f"{bound:.0%}",
                    f"{figures.peak_bytes / 2**30:,.1f}",
                ],
            )
        )
    yield from (row for _, row in sorted(found))


def _strategies(world: int, machine: Hardware, study: Study) -> list[str]:
    many = min(64, max(2, world // 8))
    found = ["ring", "gather", "exchange(stages=1)", f"exchange(stages={many})"]
    if world <= SHAPE.heads:
        found.append("ulysses")
    if world > machine.per_node:
        found += [f"hierarchical(per_node={machine.per_node})", f"hybrid(per_node={machine.per_node})"]
        if study.has_documents:
            pieces = FEW_PIECES if world < NODES_FOR_PIECES * machine.per_node else MORE_PIECES  # as rs.pack
            found += [f"hierarchical(per_node={machine.per_node}, pieces={n})" for n in pieces if n > 1]
    return found


def _cost(mask: rs.Mask, world: int, layout: str, strategy: str, machine: Hardware, most: int) -> Cost:
    first = rs.plan(mask, world=world, layout=layout, strategy=strategy).for_heads(SHAPE.heads, SHAPE.kv_heads)
    ranks = sample(mask, first.q_layout, first.kv_layout, machine, most)
    return cost([first.at(rank) for rank in ranks], machine, SHAPE)


def _ideal_seconds(mask: rs.Mask, world: int, machine: Hardware) -> float:
    """Return the time of an equal share of the pairs at the speed of rectangles, without anything else."""
    d = SHAPE.head_dim
    return mask.area / world * 2 * SHAPE.heads * (2 * d / machine.forward.full + 5 * d / machine.backward.full)


def _table(rows: list[list[str]]) -> str:
    head = ["GPUs", "strategy", "forward + backward, ms", "exposed", "of the ideal", "bound", "buffers, GiB"]
    lines = [head, ["---:", "---", "---:", "---:", "---:", "---:", "---:"], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
