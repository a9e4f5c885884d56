"""The drawings of the pages on concepts and batches, made from masks, layouts, plans and the cost model.

    python docs/site/drawings.py        write docs/images/*.svg

tests/test_site.py checks that the files are those that this script makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import ringspan as rs
from ringspan.cli.batch_picture import (
    LOAD_COLOURS,
    OTHER_DOCUMENTS,
    WITHIN_NODE,
    bytes_between,
    document_colours,
    ideal_seconds,
    loads_of,
    runs_of,
)
from ringspan.cli.pictures import COLOURS, owners
from ringspan.cli.units import size as in_bytes
from ringspan.costs.hardware import hardware
from ringspan.layouts import areas

IMAGES = Path(__file__).resolve().parent.parent / "images"
INK, QUIET, HIDDEN = "#222222", "#777777", "#F1F1F1"
WORLD, LENGTHS = 4, (14, 10)
MASK = rs.documents(LENGTHS)

# A packed batch: one document for three nodes, some that a node holds, and many short ones.
NODE, NODES, TOKENS_PER_RANK = 4, 4, 16_384
BATCH = [120_000, 34_000, 26_000, 18_000, 11_000, 9_000, *[2_000] * 20]


def drawings() -> dict[str, str]:
    return {
        "mask.svg": mask(),
        "layouts.svg": layouts(),
        "plan.svg": plan(),
        "timeline.svg": timeline(),
        "batch.svg": batch(),
    }


def mask() -> str:
    """Draw three masks of 24 tokens: visible pairs are dark."""
    masks = {
        "rs.causal(24)": rs.causal(24),
        "rs.documents([14, 10])": MASK,
        "… & rs.window(left=4)": MASK & rs.window(left=4),
    }
    parts = []
    for n, (name, made) in enumerate(masks.items()):
        x = 20 + n * 230
        parts += [text(x, 18, name, mono=True), *cells(made.dense(), x, 28, 8, lambda q, k: "#44546A")]
        parts.append(text(x, 240, f"{made.area} of {24 * 24} pairs, {len(made)} band{'s' * (len(made) > 1)}", colour=QUIET))
    return svg(690, 252, parts)


def layouts() -> str:
    """Draw the same mask under three layouts, each pair in the colour of the rank that computes it."""
    parts = []
    for n, name in enumerate(("contiguous", "zigzag", "balanced")):
        x, layout = 20 + n * 230, rs.plan(MASK, world=WORLD, layout=name, strategy="ring").q_layout
        owner = owners(layout)
        parts += [text(x, 18, f'layout="{name}"', mono=True)]
        parts += cells(MASK.dense(), x, 28, 8, lambda q, k, owner=owner: COLOURS[owner[q]])
        share = areas(MASK, layout) / MASK.area
        for rank in range(WORLD):
            y = 236 + 15 * rank
            parts += [box(x, y, 170 * share[rank] / 0.55, 11, COLOURS[rank])]
            parts.append(text(x + 170 * share[rank] / 0.55 + 5, y + 9, f"rank {rank}: {share[rank]:.0%}", size=10))
    return svg(690, 304, parts)


def plan() -> str:
    """Draw the pairs that each rank computes in each step of a plan, and the messages of the step."""
    plans = [rs.plan(MASK, world=WORLD, rank=rank, strategy="ring", layout="zigzag") for rank in range(WORLD)]
    parts = [text(104 + 146 * n, 18, f"step {n}", colour=QUIET) for n in range(len(plans[0].program.forward))]
    for rank, made in enumerate(plans):
        y = 28 + 124 * rank
        parts.append(text(20, y + 50, f"rank {rank}", colour=COLOURS[rank], bold=True))
        for n, step in enumerate(made.program.forward):
            x, seen = 104 + 146 * n, np.zeros((24, 24), dtype=bool)
            for task in step.tasks:
                q = tokens(made.task_tokens(task, "q").spans)
                k = tokens(made.task_tokens(task, "kv").spans)
                for band in task.bands:
                    rows, columns = np.mgrid[band.q0 : band.q1, band.k0 : band.k1]
                    inside = (band.lo <= columns - rows) & (columns - rows <= band.hi)
                    seen[q[rows[inside]], k[columns[inside]]] = True
            parts += cells(MASK.dense(), x, y, 4, lambda q, k: "#DDDDDD")
            parts += cells(seen, x, y, 4, lambda q, k, rank=rank: COLOURS[rank], background=None)
            sent = ", ".join(f"{t.what} to {t.peer}" for t in step.sends)
            got = ", ".join(f"{t.what} from {t.peer}" for t in step.recvs)
            parts.append(text(x, y + 109, "; ".join(filter(None, (sent, got))) or "no messages", size=9, colour=QUIET))
    return svg(690, 28 + 124 * WORLD, parts)


def timeline() -> str:
    """Draw what each rank does in the forward pass on a model of four H200s: full colour computes, pale waits."""
    shape = rs.Shape(heads=32, kv_heads=8, head_dim=128)
    mask, parts = rs.causal(32_768), []
    for n, (strategy, layout) in enumerate((("ring", "contiguous"), ("ring", "zigzag"), ("exchange", "zigzag"))):
        made = rs.plan(mask, world=WORLD, strategy=strategy, layout=layout, shape=shape)
        line, top = made.cost("h200x8", shape).forward, 24 + 108 * n
        parts.append(text(20, top - 6, f"{strategy} on {layout}: {line.seconds * 1e3:.2f} ms", mono=True))
        for rank in range(WORLD):
            y = top + 19 * rank
            parts.append(text(20, y + 11, f"rank {rank}", size=10))
            for begin, computed, end in zip(line.begin[rank], line.computed[rank], line.end[rank], strict=True):
                x, middle, stop = (72 + t * 1e3 * 95 for t in (begin, computed, end))
                parts += [box(x, y, stop - x, 14, COLOURS[rank], opacity=0.25), box(x, y, middle - x - 0.5, 14, COLOURS[rank])]
    return svg(690, 24 + 108 * 3, parts)


def batch() -> str:
    """Draw a packed batch: which rank holds which document, the load of each rank, and the bytes between nodes."""
    shape, machine, world = rs.Shape(heads=32, kv_heads=8, head_dim=128), hardware(f"h200x{NODE}"), NODE * NODES
    (part,) = rs.pack(BATCH, world, tokens_per_rank=TOKENS_PER_RANK, hardware=machine, shape=shape)
    colours, loads = document_colours(part, named=6), loads_of(part, machine, shape)
    slowest, ideal = part.seconds(machine, shape), ideal_seconds(part, machine, shape)
    per_token, per_second = 250 / max(part.layout.counts), 150 / slowest
    parts = [
        text(66, 18, "Who holds which document"),
        text(332, 18, f"Load: {slowest * 1e3:.1f} ms, ideal {ideal * 1e3:.1f} ms"),
        text(518, 18, "Bytes between nodes"),
    ]
    bottom = 28 + 14 * world + 8 * NODES
    for rank in range(world):
        y = 28 + 14 * rank + 8 * (rank // NODE)
        if rank % NODE == 0:
            parts.append(text(16, y + 30, f"node {rank // NODE}"))
        for run in runs_of(part, rank):
            parts.append(box(66 + run.start * per_token, y, run.rows * per_token, 12, colours[run.document]))
        x = 332.0
        for words, of_ranks in loads.items():
            parts.append(box(x, y, of_ranks[rank] * per_second, 12, LOAD_COLOURS[words]))
            x += of_ranks[rank] * per_second
    parts.append(box(332 + ideal * per_second, 24, 1.5, bottom - 28, COLOURS[1]))
    between = bytes_between(part, NODE, shape)
    most = (between * (1 - np.eye(NODES))).max()
    for row, column in np.ndindex(NODES, NODES):
        x, y, amount = 556 + 32 * column, 46 + 32 * row, between[row, column]
        colour, shade = (WITHIN_NODE, 1.0) if row == column else (COLOURS[0], 0.1 + 0.7 * amount / most)
        parts.append(box(x, y, 31, 31, colour, opacity=round(shade, 2)))
        if row != column and amount:
            parts.append(text(x + 3, y + 19, f"{amount / 2**20:.0f}", size=10))
    parts += [text(556 + 32 * n + 12, 42, f"{n}", size=10, colour=QUIET) for n in range(NODES)]
    parts += [text(518, 66 + 32 * n, f"node {n}", size=10, colour=QUIET) for n in range(NODES)]
    parts += [text(518, 190, "MiB for one layer, from the node of", size=10, colour=QUIET)]
    parts += [text(518, 203, "the row to that of the column", size=10, colour=QUIET)]
    parts += [text(518, 216, f"{in_bytes((between * (1 - np.eye(NODES))).sum())} together", size=10, colour=QUIET)]
    named = [(f"{part.lengths[i]:,} tokens", colours[i]) for i in range(6)]
    others = f"{len(BATCH) - 6} documents of {part.lengths[6]:,}"
    parts += key(66, bottom + 8, [*named, (others, OTHER_DOCUMENTS[0])], columns=2, width=128)
    words = [*LOAD_COLOURS.items(), ("ideal: equal work, nothing sent", COLOURS[1])]
    parts += key(332, bottom + 8, words, columns=1, width=200)
    return svg(690, bottom + 92, parts)


def key(x: int, y: int, entries: list[tuple[str, str]], *, columns: int, width: int) -> Iterable[str]:
    """Yield a small box of each colour with what it stands for, column by column."""
    rows = -(-len(entries) // columns)
    for n, (words, colour) in enumerate(entries):
        left, top = x + width * (n // rows), y + 15 * (n % rows)
        yield box(left, top, 12, 10, colour)
        yield text(left + 18, top + 9, words, size=10)


def tokens(spans: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(*span) for span in spans.tolist()])


def cells(
    seen: NDArray[np.bool_], x: int, y: int, size: int, colour: Callable[[int, int], str], background: str | None = HIDDEN
) -> Iterable[str]:
    """Yield a grid of pairs, queries down and keys across. Neighbours in a row are one box."""
    queries, keys = seen.shape
    if background is not None:
        yield box(x, y, keys * size, queries * size, background)
    for q in range(queries):
        k = 0
        while k < keys:
            stop = k + 1
            while stop < keys and seen[q, stop] == seen[q, k]:
                stop += 1
            if seen[q, k]:
                yield box(x + k * size, y + q * size, (stop - k) * size - 0.5, size - 0.5, colour(q, k))
            k = stop


def box(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1) -> str:
    shade = f' opacity="{opacity}"' if opacity != 1 else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" fill="{colour}"{shade}/>'


def text(x: float, y: float, words: str, *, size: int = 12, colour: str = INK, mono: bool = False, bold: bool = False) -> str:
    family = "monospace" if mono else "sans-serif"
    weight = ' font-weight="bold"' if bold else ""
    style = f'font-family="{family}" font-size="{size}" fill="{colour}"{weight}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, drawn in drawings().items():
        (IMAGES / name).write_text(drawn, encoding="utf-8")
