"""A picture of a packed batch: which rank holds which document, the load of each rank, and the bytes between nodes.

Imports matplotlib when it is drawn.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.cli.pictures import COLOURS, DPI, GRID, INK, PAPER
from ringspan.cli.units import seconds, size, time_unit
from ringspan.costs.hardware import Hardware
from ringspan.costs.layer import layer_cost
from ringspan.costs.timeline import Seconds
from ringspan.planner import Microbatch
from ringspan.plans.shape import Shape

# The longest documents have colours of their own: six, and six paler ones. The others are grey, in turn darker and lighter.
DOCUMENT_COLOURS = (*COLOURS, "#A1BBD4", "#F6B2BA", "#90C398", "#E5DDA1", "#B2E5F6", "#D499BB")
OTHER_DOCUMENTS = ("#C4C4C4", "#DEDEDE")
# Not colours of documents.
LOAD_COLOURS = {
    "attention": "#444444",
    "matrix products": "#8C8C8C",
    "exposed: messages and copies": "#FF9900",
    "waits for the slowest rank": "#EEF0F5",
}
WITHIN_NODE = "#D0D0D0"
# With more ranks than this, there is no gap between them; with more nodes, not all have a label or their bytes in figures.
MAX_RANKS_WITH_GAPS, MAX_NODES_WITH_FIGURES, MAX_LABELS = 32, 8, 16


class DocumentRun(NamedTuple):
    """The rows of a rank from ``start`` on that are of one document, by its index in the microbatch."""

    document: int
    start: int
    rows: int


def draw_batch(path: Path, part: Microbatch, machine: Hardware, shape: Shape) -> None:
    """Draw a microbatch: its documents by rank, and the load and the traffic of one layer on a machine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.0, 8.0), facecolor=PAPER, layout="constrained")
    held, load, sent = figure.subplots(1, 3, width_ratios=(5, 3, 3.6))
    _documents(held, part)
    _loads(load, part, machine, shape)
    _bytes(sent, figure, part, machine, shape)
    _label_ranks(held, load, part.layout.world, machine.per_node)
    for axes in (held, load, sent):
        axes.tick_params(colors=INK)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
    documents = f"{len(part.lengths)} document{'s' * (len(part.lengths) != 1)}"
    figure.suptitle(
        f"One microbatch: {documents}, {part.tokens:,} tokens over {part.layout.world} ranks of {machine.name} in nodes of "
        f"{machine.per_node}; {part.plan.strategy} on {part.layout.name}",
        color=INK,
    )
    figure.savefig(path, dpi=DPI)


def _documents(axes: Any, part: Microbatch) -> None:
    """Draw the tokens of each rank in their order, in the colour of their document."""
    colours = document_colours(part)
    height = 0.9 if part.layout.world <= MAX_RANKS_WITH_GAPS else 1.0
    for rank in range(part.layout.world):
        runs = runs_of(part, rank)
        bars = [(run.start, run.rows) for run in runs]
        axes.broken_barh(bars, (rank - height / 2, height), facecolors=[colours[run.document] for run in runs], linewidth=0)
    axes.set_xlim(0, max(part.layout.counts))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of the rank, in their order")
    axes.set_title("Who holds which document", color=INK, fontsize=11)
    by_length = np.argsort(-np.array(part.lengths), kind="stable").tolist()
    named, others = by_length[: len(DOCUMENT_COLOURS)], by_length[len(DOCUMENT_COLOURS) :]
    legend = {f"document {part.documents[i]}: {part.lengths[i]:,} tokens": colours[i] for i in named}
    if others:
        longest = part.lengths[others[0]]
        legend[f"{len(others)} others, of at most {longest:,} tokens"] = OTHER_DOCUMENTS[0]
    _legend(axes, legend, columns=3)


def _loads(axes: Any, part: Microbatch, machine: Hardware, shape: Shape) -> None:
    """Draw the seconds of each rank, and those of an equal share of the work."""
    loads, ideal = loads_of(part, machine, shape), ideal_seconds(part, machine, shape)
    slowest = float(sum(of_ranks[0] for of_ranks in loads.values()))  # with its wait, every rank takes as long
    unit, per_unit = time_unit(slowest)
    ranks, left = np.arange(part.layout.world), np.zeros(part.layout.world)
    height = 0.9 if part.layout.world <= MAX_RANKS_WITH_GAPS else 1.0
    for words, of_ranks in loads.items():
        axes.barh(ranks, of_ranks / per_unit, left=left / per_unit, height=height, color=LOAD_COLOURS[words], linewidth=0)
        left = left + of_ranks
    axes.axvline(ideal / per_unit, color=COLOURS[1], linestyle="--", linewidth=1.4)
    axes.set_xlim(0, slowest / per_unit or None)
    axes.set_xlabel(f"{unit} for one layer, forward and backward")
    ratio = f" ({slowest / ideal:.2f} ×)" if ideal else ""
    axes.set_title(f"Load by rank: slowest {seconds(slowest)}, ideal {seconds(ideal)}{ratio}", color=INK, fontsize=11)
    _legend(axes, {**LOAD_COLOURS, "ideal: all work shared equally, nothing sent": COLOURS[1]}, columns=1)


def _bytes(axes: Any, figure: Any, part: Microbatch, machine: Hardware, shape: Shape) -> None:
    """Draw the bytes that each node sends to each other node, forward and backward; of a single node, those of ranks."""
    is_one_node = machine.per_node >= part.layout.world
    what = "rank" if is_one_node else "node"
    between = bytes_between(part, 1 if is_one_node else machine.per_node, shape)
    np.fill_diagonal(between, 0)
    groups, most = len(between), between.max()
    drawn = np.ma.array(between / 2**20, mask=np.eye(groups, dtype=bool))
    axes.set_facecolor(WITHIN_NODE)
    image = axes.imshow(drawn, cmap="Blues", vmin=0, vmax=max(most / 2**20, 1e-9))
    if groups <= MAX_NODES_WITH_FIGURES:
        for row, column in np.argwhere(between > 0).tolist():
            colour = PAPER if between[row, column] > 0.6 * most else INK
            words = size(between[row, column]).replace(" ", "\n")
            axes.text(column, row, words, ha="center", va="center", color=colour, fontsize=8)
    else:
        figure.colorbar(image, ax=axes, label="MiB", shrink=0.6)
    few = np.unique(np.linspace(0, groups - 1, min(groups, MAX_LABELS)).round().astype(int)).tolist()
    axes.set_xticks(few, few)
    axes.set_yticks(few, few)
    axes.set(xlabel=f"to {what}", ylabel=f"from {what}")
    axes.set_title(f"Bytes between {what}s: {size(between.sum())} for one layer", color=INK, fontsize=11)
    within = "the rank itself" if is_one_node else "within the node, over its fast links: not counted"
    _legend(axes, {within: WITHIN_NODE}, columns=1)


def _label_ranks(held: Any, load: Any, world: int, per_node: int) -> None:
    """Label nodes on the left, and draw lines between them. Of one node, label the ranks."""
    nodes = [(first, min(first + per_node, world)) for first in range(0, world, per_node)]
    labels = [((first + stop - 1) / 2, f"node {n}\nranks {first}–{stop - 1}") for n, (first, stop) in enumerate(nodes)]
    if len(nodes) == 1 or per_node == 1:
        labels = [(float(rank), f"rank {rank}") for rank in range(world)]
    few = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), MAX_LABELS)).round().astype(int)).tolist()
    for axes in (held, load):
        axes.set_ylim(world - 0.5, -0.5)
        for first, _ in nodes[1:]:
            axes.axhline(first - 0.5, color=INK, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    held.set_yticks([labels[n][0] for n in few], [labels[n][1] for n in few])
    load.set_yticks([])


def _legend(axes: Any, colours: dict[str, str], *, columns: int) -> None:
    """Name colours below the axes."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, edgecolor=GRID, linewidth=0.5, label=words) for words, colour in colours.items()]
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.09),
        ncols=min(columns, len(handles)),
        frameon=False,
        fontsize=8.5,
        handlelength=1.4,
        columnspacing=1.2,
    )


# -- what is drawn -----------------------------------------------------------------------------------------------------


def document_colours(part: Microbatch, named: int = len(DOCUMENT_COLOURS)) -> list[str]:
    """Return the colour of each document of a microbatch: a colour of its own for each of the longest."""
    colours = [OTHER_DOCUMENTS[i % 2] for i in range(len(part.lengths))]
    by_length = np.argsort(-np.array(part.lengths), kind="stable").tolist()
    for i, colour in zip(by_length, DOCUMENT_COLOURS[:named], strict=False):
        colours[i] = colour
    return colours


def runs_of(part: Microbatch, rank: int) -> list[DocumentRun]:
    """Return the documents of a rank in the order of its rows."""
    document = np.cumsum(part.lengths).searchsorted(part.layout.positions(rank), side="right")
    edges = np.flatnonzero(np.diff(document, prepend=-1, append=-1)).tolist()
    return [DocumentRun(int(document[low]), low, high - low) for low, high in pairwise(edges)]


def loads_of(part: Microbatch, machine: Hardware, shape: Shape) -> dict[str, Seconds]:
    """Return the predicted seconds of each rank for one layer, forward and backward. Their sum is equal on all ranks."""
    cost = part.plan.cost(machine, shape)
    products = np.array(part.layout.counts) * layer_cost(machine, shape).token_s
    computing = sum((line.computed - line.begin).sum(axis=1) for line in (cost.forward, cost.backward))
    exposed = cost.forward.exposed + cost.backward.exposed
    waiting = cost.seconds + products.max(initial=0.0) - products - computing - exposed
    return dict(zip(LOAD_COLOURS, (computing, products, exposed, waiting), strict=True))


def ideal_seconds(part: Microbatch, machine: Hardware, shape: Shape) -> float:
    """Return the seconds of an equal share of the work, without any communication."""
    return layer_cost(machine, shape).seconds(part.tokens, part.mask.area) / part.layout.world


def bytes_between(part: Microbatch, per_node: int, shape: Shape) -> NDArray[np.float64]:
    """Return the bytes from each node to each node, forward and backward, for one layer."""
    nodes = -(-part.layout.world // per_node)
    total = np.zeros((nodes, nodes))
    for rank in range(part.layout.world):
        plan = part.plan.for_heads(shape.heads, shape.kv_heads).at(rank)
        for phase in ("forward", "backward"):
            for t in plan.transfers(phase, "sends"):
                total[rank // per_node, t.peer // per_node] += shape.transfer_bytes(t, phase, plan.program)
    return total
