"""A picture of a packed batch: which rank holds which document, the load of each rank, and the bytes between nodes.

Imports matplotlib when needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspan.cli.pictures import COLOURS, DPI, GRID, INK, PAPER, rank_colours
from ringspan.costs.hardware import Hardware
from ringspan.costs.layer import layer_cost
from ringspan.planner import Microbatch
from ringspan.plans.shape import Shape

# The longest documents have colours of their own, up to this many. The others are grey.
COLOURED = 12


def draw_batch(path: Path, part: Microbatch, machine: Hardware, shape: Shape) -> None:
    """Draw a microbatch: its documents by rank, and the load and the traffic of one layer on a machine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 7.2), facecolor=PAPER, layout="constrained")
    held, load, sent = figure.subplots(1, 3, width_ratios=(5, 2.4, 3.4))
    _documents(held, part)
    _loads(load, part, machine, shape)
    _bytes(sent, figure, part, machine, shape)
    for axes in (held, load):
        axes.sharey(held)
        axes.set_ylim(part.layout.world - 0.5, -0.5)
        for edge in np.arange(machine.per_node, part.layout.world, machine.per_node):
            axes.axhline(edge - 0.5, color=INK, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    words = (
        f"{len(part.lengths)} documents, {part.tokens:,} tokens over {part.layout.world} ranks in nodes of {machine.per_node}"
    )
    figure.suptitle(f"{words}; {part.plan.strategy.partition('(')[0]} on {part.layout.name}", color=INK)
    figure.savefig(path, dpi=DPI)


def _documents(axes: Any, part: Microbatch) -> None:
    """Draw the tokens of each rank in their order, in the colour of their document."""
    stops = np.cumsum(part.lengths)
    longest = np.argsort(-np.array(part.lengths), kind="stable")[:COLOURED]
    colours = dict(zip(longest.tolist(), rank_colours(max(COLOURED, len(COLOURS) + 1)).tolist(), strict=False))
    for rank in range(part.layout.world):
        document = stops.searchsorted(part.layout.positions(rank), side="right")
        edges = np.flatnonzero(np.diff(document, prepend=-1, append=-1))
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            colour = colours.get(int(document[low]), GRID)
            axes.barh(rank, high - low, left=low, height=0.9, color=colour, linewidth=0)
    axes.set(xlabel=f"tokens of the rank (the {len(longest)} longest documents in colour)", ylabel="rank")
    axes.set_title("Who holds which document", color=INK, fontsize=11)


def _loads(axes: Any, part: Microbatch, machine: Hardware, shape: Shape) -> None:
    """Draw the seconds of each rank: attention, its exposed communication, and matrix products."""
    cost = part.plan.cost(machine, shape)
    computing = sum((line.computed - line.begin).sum(axis=1) for line in (cost.forward, cost.backward))
    exposed = cost.forward.exposed + cost.backward.exposed
    products = np.array(part.layout.counts) * layer_cost(machine, shape).token_s
    ranks, left = np.arange(part.layout.world), np.zeros(part.layout.world)
    parts = (("matrix products", products, 3), ("attention", computing, 0), ("exposed communication", exposed, 1))
    for words, seconds, colour in parts:
        axes.barh(ranks, seconds * 1e3, left=left * 1e3, height=0.9, color=COLOURS[colour], label=words)
        left = left + seconds
    axes.set_xlabel("ms for one layer, forward and backward")
    axes.set_title("Load by rank", color=INK, fontsize=11)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, -0.2), fontsize=9)


def _bytes(axes: Any, figure: Any, part: Microbatch, machine: Hardware, shape: Shape) -> None:
    """Draw the bytes that each node sends to each other node, forward and backward."""
    between = node_bytes(part, machine, shape) / 1e6
    np.fill_diagonal(between, np.nan)  # within a node
    image = axes.imshow(between, cmap="Blues", vmin=0)
    figure.colorbar(image, ax=axes, label="MB", shrink=0.6)
    axes.set(xlabel="to node", ylabel="from node")
    axes.set_title(f"Between nodes: {np.nansum(between) / 1e3:,.1f} GB", color=INK, fontsize=11)


def node_bytes(part: Microbatch, machine: Hardware, shape: Shape) -> NDArray[np.float64]:
    """Return the bytes from each node to each node, forward and backward, for one layer."""
    nodes = -(-part.layout.world // machine.per_node)
    total = np.zeros((nodes, nodes))
    for rank in range(part.layout.world):
        plan = part.plan.for_heads(shape.heads, shape.kv_heads).at(rank)
        for phase in ("forward", "backward"):
            for t in plan.transfers(phase, "sends"):
                total[rank // machine.per_node, t.peer // machine.per_node] += shape.transfer_bytes(t, phase, plan.program)
    return total
