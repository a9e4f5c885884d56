"""``ringspan bench layouts``: how evenly layouts share packed documents, and what they ask for in pieces and keys.

Only the making of the layout is timed. *Rows* are the key rows that all ranks together need of others; *× fewest* is that over
a number which no layout of even token counts and balance 1.02 can go below (:func:`fewest_rows`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ringspan as rs
from ringspan.layouts import LAYOUTS, Layout, balance
from ringspan.masks import table as tables
from ringspan.masks.table import K0, K1, Q0, Q1
from ringspan.plans import needed_rows
from ringspan.plans.problem import union

COLUMNS = {
    "lengths": "lengths",
    "tokens": "tokens",
    "documents": "documents",
    "world": "ranks",
    "layout": "layout",
    "balance": "balance",
    "rows": "rows",
    "over_fewest": "× fewest",
    "pieces": "pieces",
    "most_pieces": "most",
    "make_ms": "make, ms",
}

BALANCED_ENOUGH = 1.02

# Layouts that cut every document for every rank make about so many tiles at most before this machine is asked too much.
MOST_TILES = 2**22


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", nargs="+", default=[*LENGTHS], choices=[*LENGTHS], help="of documents (default: all)")
    parser.add_argument("--documents", type=int, default=None, help="how many (default: one for every 1024 tokens)")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[131072, 1048576], help="tokens (default: 131072 1048576)")
    parser.add_argument("--world", type=int, nargs="+", default=[8, 32, 128], help="ranks (default: 8 32 128)")
    parser.add_argument("--layouts", nargs="+", default=[*COMPARED], choices=[*COMPARED], help="default: all")
    parser.add_argument("--seed", type=int, default=0)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each way to draw lengths, number of tokens, number of ranks and layout."""
    records = []
    for n in args.seq_len:
        for name in args.lengths:
            lengths = draw_lengths(name, documents=args.documents or max(1, n // 1024), tokens=n, seed=args.seed)
            for world in args.world:
                records += [_case(name, lengths, world, layout) for layout in args.layouts]
    return records


def _case(name: str, lengths: list[int], world: int, layout_name: str) -> dict[str, Any]:
    mask = rs.documents(lengths)
    start = time.perf_counter()
    layout = COMPARED[layout_name](mask, world)
    seconds = time.perf_counter() - start
    pieces = _pieces(mask, layout)
    rows = _rows(mask, layout) if sum(pieces) ** 2 // max(1, len(lengths)) <= MOST_TILES else None
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
    """Lengths in the proportions of that name, so many tokens together; those that round to nothing are left out."""
    share = LENGTHS[name](np.random.default_rng(seed), documents)
    cuts = np.round(np.cumsum(share) / share.sum() * tokens).astype(np.int64)
    lengths: list[int] = np.diff(cuts, prepend=0).tolist()
    return [length for length in lengths if length]


def fewest_rows(lengths: list[int], world: int, balanced_to: float) -> int:
    """Key rows that every layout of causal documents needs, if its token counts are even and its balance is at most so much.

    The rows from key x to the end of a document are so many tokens, and so many pairs, that some ranks must share them. All of
    these see key x, and all but its owner fetch it. (Each key is counted for itself, so there may be no layout for all.)

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
    """Torch's processing-time round robin: blocks of queries dealt to and fro, those that see most blocks of keys first.

    (Its head-tail balancer is zigzag, its per-document one is per_document, which here takes documents of any length.)
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
    to_and_fro = [*range(world), *reversed(range(world))]
    for turn, b in enumerate(np.argsort(-blocks_seen, kind="stable").tolist()):
        spans[to_and_fro[turn % len(to_and_fro)]].append((int(cuts[b]), int(cuts[b + 1])))
    return Layout([sorted(of_rank) for of_rank in spans], name="ptrr")


COMPARED: dict[str, Callable[[rs.Mask, int], Layout]] = {
    **{name: LAYOUTS[name] for name in ("contiguous", "zigzag", "per_document", "round_robin")},
    "ptrr": ptrr,
    "balanced": LAYOUTS["balanced"],
}


def _pieces(mask: rs.Mask, layout: Layout) -> list[int]:
    """How many parts of documents each rank owns: what a kernel is given as separate sequences."""
    cuts = mask.documents()
    p = layout.pieces
    joins = np.append(False, (p.owner[1:] == p.owner[:-1]) & (p.start[1:] == p.start[:-1] + p.size[:-1]))
    parts = np.searchsorted(cuts, p.start + p.size) - np.searchsorted(cuts, p.start, side="right") + 1
    parts -= joins & ~np.isin(p.start, cuts)  # the same part of the document goes on
    counts: list[int] = np.bincount(p.owner, weights=parts, minlength=layout.world).astype(int).tolist()
    return counts


def _rows(mask: rs.Mask, layout: Layout) -> int:
    needed = needed_rows(mask, layout, layout)
    return int(needed.sum() - needed.trace())
