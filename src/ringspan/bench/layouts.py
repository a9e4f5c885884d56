"""How evenly layouts share packed documents, and how many pieces and received key rows they cause.

Only making the layout is timed. *Rows* are the key rows that all ranks together receive from other ranks. *× fewest* is
their ratio to a lower bound for layouts with even token counts and balance 1.02 (:func:`fewest_rows`). *Between nodes*
are the key rows that all nodes together receive from other nodes, each once for a node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import ringspan as rs
from ringspan.bench.rows import Row
from ringspan.layouts import LAYOUTS, Layout, balance
from ringspan.masks import table as tables
from ringspan.masks.table import K0, K1, Q0, Q1
from ringspan.plans import needed_rows
from ringspan.plans.problem import union

BALANCED_ENOUGH = 1.02

# Received rows are counted up to about this many tiles. Layouts that split every document over all ranks have more.
MAX_TILES = 2**22


def layout_rows(
    *,
    seq_len: Sequence[int],
    lengths: Sequence[str],
    documents: int | None,
    world: Sequence[int],
    layouts: Sequence[str],
    seed: int,
    per_node: int | None = None,
) -> Iterator[Row]:
    """Yield a row for each number of tokens, distribution of lengths, number of ranks and layout.

    With ``per_node``, the ranks of a node, ``balanced`` is made for such nodes, too, and rows between nodes are counted.
    """
    made = {name: COMPARED[name] for name in layouts}
    if per_node is not None:
        made[f"balanced(per_node={per_node})"] = partial(LAYOUTS["balanced"], per_node=per_node)
    for n in seq_len:
        for name in lengths:
            drawn = draw_lengths(name, documents=documents or max(1, n // 1024), tokens=n, seed=seed)
            yield from (_row(name, drawn, ranks, layout, make, per_node) for ranks in world for layout, make in made.items())


def _row(
    name: str, lengths: list[int], world: int, layout_name: str, make: Callable[[rs.Mask, int], Layout], per_node: int | None
) -> Row:
    mask = rs.documents(lengths)
    start = time.perf_counter()
    layout = make(mask, world)
    seconds = time.perf_counter() - start
    pieces = _pieces(mask, layout)
    is_small = sum(pieces) ** 2 // max(1, len(lengths)) <= MAX_TILES
    rows = _rows(mask, layout) if is_small else None
    between = {} if per_node is None else {"between_nodes": _rows(mask, _of_nodes(layout, per_node)) if is_small else None}
    fewest = fewest_rows(lengths, world, BALANCED_ENOUGH)
    return {
        "bench": "layouts",
        "lengths": name,
        "tokens": mask.lengths[0],
        "documents": len(lengths),
        "mask": mask.digest,
        "world": world,
        "layout": layout_name,
        "balance": round(balance(mask, layout), 3),
        "rows": rows,
        "fewest_rows": fewest,
        "over_fewest": round(rows / fewest, 2) if rows is not None and fewest else None,
        **between,
        "pieces": sum(pieces),
        "most_pieces": max(pieces),
        "make_ms": round(seconds * 1e3, 1),
    }


# -- documents ---------------------------------------------------------------------------------------------------------

LENGTHS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "log-normal-1": lambda rng, count: rng.lognormal(sigma=1.0, size=count),
    "log-normal-2": lambda rng, count: rng.lognormal(sigma=2.0, size=count),
    "zipf": lambda rng, count: rng.permutation(1 / np.arange(1, count + 1)),
    "one-giant": lambda rng, count: np.where(np.arange(count) == count // 3, count - 1.0, 1.0),  # as long as all the others
}


def draw_lengths(name: str, *, documents: int, tokens: int, seed: int) -> list[int]:
    """Draw lengths of documents from a named distribution, scaled to a number of tokens. Lengths that round to 0 are
    left out."""
    share = LENGTHS[name](np.random.default_rng(seed), documents)
    cuts = np.round(np.cumsum(share) / share.sum() * tokens).astype(np.int64)
    lengths: list[int] = np.diff(cuts, prepend=0).tolist()
    return [length for length in lengths if length]


def fewest_rows(lengths: list[int], world: int, balanced_to: float) -> int:
    """Return a lower bound of the received key rows of any layout of causal documents with even token counts and this
    balance.

    The rows from key x to the end of its document have more tokens or pairs than one rank may have, so several ranks
    share them. All of these ranks see key x, and all but its owner receive it. (Each key is bounded separately, so the
    bound may not be reached.)

    >>> fewest_rows([8], 2, 1.0)
    6
    """
    most_tokens = -(-sum(lengths) // world)
    most_pairs = balanced_to * sum(length * (length + 1) // 2 for length in lengths) / world
    total = 0
    for length in lengths:
        x = np.arange(length)
        pairs = (length * (length + 1) - x * (x + 1)) // 2
        ranks = np.ceil(np.maximum((length - x) / most_tokens, pairs / most_pairs))
        total += int((ranks - 1).sum())
    return total


# -- layouts -----------------------------------------------------------------------------------------------------------


def ptrr(mask: rs.Mask, world: int, block: int = 128) -> Layout:
    """Make the layout of PyTorch's processing-time round robin: blocks of queries are assigned to ranks in alternating
    order, the heaviest first.

    (PyTorch's head-tail balancer is zigzag. Its per-document balancer is per_document, which here takes any lengths.)
    """
    n = mask.lengths[0]
    cuts = np.append(np.arange(0, n, block), n)
    i, j = tables.overlapping(cuts[:-1], cuts[1:], mask.table[:, Q0], mask.table[:, Q1])
    seen = mask.table[j]
    seen[:, Q0], seen[:, Q1] = np.maximum(seen[:, Q0], cuts[i]), np.minimum(seen[:, Q1], cuts[i + 1])
    seen, kept = tables.tighten_indexed(seen)
    row, first, last = union(i[kept], seen[:, K0] // block, -(-seen[:, K1] // block))
    blocks_seen = np.bincount(row, weights=last - first, minlength=len(cuts) - 1)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    alternating = [*range(world), *reversed(range(world))]
    for turn, b in enumerate(np.argsort(-blocks_seen, kind="stable").tolist()):
        spans[alternating[turn % len(alternating)]].append((int(cuts[b]), int(cuts[b + 1])))
    return Layout([sorted(of_rank) for of_rank in spans], name="ptrr")


COMPARED: dict[str, Callable[[rs.Mask, int], Layout]] = {
    **{name: LAYOUTS[name] for name in ("contiguous", "zigzag", "per_document", "round_robin")},
    "ptrr": ptrr,
    "balanced": LAYOUTS["balanced"],
}


def _pieces(mask: rs.Mask, layout: Layout) -> list[int]:
    """Return how many parts of documents each rank owns. A kernel treats each as a separate sequence."""
    cuts = mask.documents()
    p = layout.pieces
    joins = np.append(False, (p.owner[1:] == p.owner[:-1]) & (p.start[1:] == p.start[:-1] + p.size[:-1]))
    parts = np.searchsorted(cuts, p.start + p.size) - np.searchsorted(cuts, p.start, side="right") + 1
    parts -= joins & ~np.isin(p.start, cuts)  # the same part of the document continues
    counts: list[int] = np.bincount(p.owner, weights=parts, minlength=layout.world).astype(int).tolist()
    return counts


def _of_nodes(layout: Layout, per_node: int) -> Layout:
    """Return the layout whose ranks are the nodes of ``per_node`` ranks each."""
    firsts = range(0, layout.world, per_node)
    return Layout([[span for of_rank in layout.spans[first : first + per_node] for span in of_rank] for first in firsts])


def _rows(mask: rs.Mask, layout: Layout) -> int:
    needed = needed_rows(mask, layout, layout)
    return int(needed.sum() - needed.trace())
