"""Random masks and layouts for hypothesis, each together with what it must be (see tests/dense_masks.py)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

import ringspan as rs
from ringspan.layouts import LAYOUTS, Layout
from ringspan.masks import Mask
from tests import dense_masks
from tests.dense_masks import Dense

MAX_LEN = 24


class Drawn(NamedTuple):
    """A mask and what it must be, made side by side."""

    mask: Mask
    truth: Dense


def sizes(max_len: int = MAX_LEN, min_len: int = 0) -> st.SearchStrategy[tuple[int, int]]:
    """``(q_len, k_len)``: half of them equal, since that is what most masks are for."""
    n = st.integers(min_len, max_len)
    return st.one_of(n.map(lambda n: (n, n)), st.tuples(n, n))


def parts(total: int, count: int | None = None) -> st.SearchStrategy[list[int]]:
    """``total`` as a sum of ``count`` lengths, some of them 0."""
    fewest, most = (0, 5) if count is None else (count - 1, count - 1)
    cuts = st.lists(st.integers(0, total), min_size=fewest, max_size=most)
    return cuts.map(lambda cuts: np.diff([0, *sorted(cuts), total]).tolist()).filter(are_lengths)


def are_lengths(lengths: list[int]) -> bool:
    """Whether documents() takes these. Those that look like cumulative lengths, such as [0, 2, 5], are refused."""
    return len(lengths) < 3 or lengths[0] > 0 or min(np.diff(lengths)) <= 0


def raw_bands(q_len: int, k_len: int, max_size: int = 4) -> st.SearchStrategy[list[tuple[int, int, int, int, int, int]]]:
    """Bands as a user may write them: overlapping, empty, not tight, partly outside."""
    q, k = st.integers(-2, q_len + 2), st.integers(-2, k_len + 2)
    turn = st.integers(-q_len - 3, k_len + 3)
    return st.lists(st.tuples(q, q, k, k, turn, turn), max_size=max_size)


# -- leaves: one constructor each --------------------------------------------------------------------------------------


def _full(q: int, k: int) -> st.SearchStrategy[Drawn]:
    return st.just(Drawn(rs.full(q, k), dense_masks.full(q, k)))


def _causal(q: int, k: int) -> st.SearchStrategy[Drawn]:
    return st.sampled_from(["start", "end"]).map(
        lambda align: Drawn(rs.causal(q, k, align=align), dense_masks.causal(q, k, align))
    )


def _causal_relation(q: int, k: int) -> st.SearchStrategy[Drawn]:
    return st.just(Drawn(rs.causal(), dense_masks.causal(q, k)))


def _window(q: int, k: int) -> st.SearchStrategy[Drawn]:
    reach = st.none() | st.integers(0, max(q, k) + 1)
    both = st.tuples(reach, reach).filter(lambda sides: sides != (None, None))
    return both.map(lambda sides: Drawn(rs.window(*sides), dense_masks.window(q, k, *sides)))


def _sliding_window(q: int, k: int) -> st.SearchStrategy[Drawn]:
    sizes = st.integers(1, max(q, k) + 2)
    return sizes.map(lambda size: Drawn(rs.sliding_window(size), dense_masks.window(q, k, size - 1, 0)))


def _prefix(n: int, _: int) -> st.SearchStrategy[Drawn]:
    return st.integers(0, n).map(lambda p: Drawn(rs.prefix(n, p), dense_masks.prefix(n, p)))


def _chunked(n: int, _: int) -> st.SearchStrategy[Drawn]:
    return st.builds(
        lambda size, causal: Drawn(rs.chunked(n, size, causal=causal), dense_masks.chunked(n, size, causal)),
        st.integers(1, n + 2),
        st.booleans(),
    )


def _documents(n: int, _: int) -> st.SearchStrategy[Drawn]:
    return st.builds(
        lambda lengths, causal: Drawn(rs.documents(lengths, causal=causal), dense_masks.documents(lengths, lengths, causal)),
        parts(n),
        st.booleans(),
    )


def _ids(n: int, _: int) -> st.SearchStrategy[Drawn]:
    return st.builds(
        lambda ids, causal: Drawn(rs.documents(ids=ids, causal=causal), dense_masks.by_ids(ids, causal)),
        st.lists(st.integers(-1, 2), min_size=n, max_size=n),
        st.booleans(),
    )


@st.composite
def _pairs(draw: st.DrawFn, q: int, k: int) -> Drawn:
    count = draw(st.integers(1, 4))
    q_lengths, k_lengths = draw(parts(q, count)), draw(parts(k, count))
    causal, align = draw(st.booleans()), draw(st.sampled_from(["start", "end"]))
    mask = rs.documents(q_lengths, kv_lengths=k_lengths, causal=causal, align=align)
    return Drawn(mask, dense_masks.documents(q_lengths, k_lengths, causal, align))


@st.composite
def depth_first_parents(draw: st.DrawFn, count: int) -> list[int]:
    """The parents of ``count`` nodes in depth-first order: each is a root, or follows a node of the path before it."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(count):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


@st.composite
def _tree(draw: st.DrawFn, n: int, _: int) -> Drawn:
    lengths = draw(parts(n, draw(st.integers(1, 8))))
    parents = draw(depth_first_parents(len(lengths)))
    left = draw(st.none() | st.integers(0, n))
    return Drawn(rs.tree(lengths, parents, left=left), dense_masks.tree(lengths, parents, left))


def _from_bands(q: int, k: int) -> st.SearchStrategy[Drawn]:
    return raw_bands(q, k).map(lambda bands: Drawn(Mask.from_bands(bands, q, k), dense_masks.bands(bands, q, k)))


CONSTRUCTORS: dict[str, Callable[[int, int], st.SearchStrategy[Drawn]]] = {
    "full": _full,
    "causal": _causal,
    "documents(kv_lengths=)": _pairs,
    "from_bands": _from_bands,
}
SQUARE_CONSTRUCTORS = {
    "prefix": _prefix,
    "chunked": _chunked,
    "documents": _documents,
    "documents(ids=)": _ids,
    "tree": _tree,
}
RELATIONS = {"window": _window, "sliding_window": _sliding_window, "causal()": _causal_relation}


# -- trees of them -----------------------------------------------------------------------------------------------------

OPERATORS = {"&": operator.and_, "|": operator.or_, "-": operator.sub}


def combine(sign: str, a: Drawn, b: Drawn) -> Drawn:
    on_masks = OPERATORS[sign]
    return Drawn(on_masks(a.mask, b.mask), a.truth & ~b.truth if sign == "-" else on_masks(a.truth, b.truth))


def trees(q_len: int, k_len: int, *, leaves: int = 6, relations: bool = False) -> st.SearchStrategy[Drawn]:
    """Any expression over the constructors and relations at these lengths; a relation only if ``relations`` allows."""
    kinds = {**CONSTRUCTORS, **RELATIONS, **(SQUARE_CONSTRUCTORS if q_len == k_len else {})}
    leaf = st.one_of([kind(q_len, k_len) for kind in kinds.values()])
    tree = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.builds(combine, st.sampled_from(sorted(OPERATORS)), inner, inner),
            inner.map(lambda drawn: Drawn(~drawn.mask, ~drawn.truth)),
        ),
        max_leaves=leaves,
    )
    return tree if relations else tree.map(lambda drawn: _with_lengths(drawn, q_len, k_len))


def _with_lengths(drawn: Drawn, q_len: int, k_len: int) -> Drawn:
    return Drawn(drawn.mask & rs.full(q_len, k_len), drawn.truth) if drawn.mask.is_relation else drawn


def masks(max_len: int = MAX_LEN, *, square: bool = False, leaves: int = 6) -> st.SearchStrategy[Drawn]:
    """Any mask of up to ``max_len`` queries and keys, none at all included."""
    of_any_size = st.integers(0, max_len).map(lambda n: (n, n)) if square else sizes(max_len)
    return of_any_size.flatmap(lambda size: trees(*size, leaves=leaves))


# -- layouts -----------------------------------------------------------------------------------------------------------


@st.composite
def bijections(draw: st.DrawFn, n: int, world: int) -> list[list[tuple[int, int, int]]]:
    """Spans for each rank that hold every token once: the whole, split at points and by strides, shuffled and dealt."""
    spans = [range(n)]
    for _ in range(draw(st.integers(0, 5))):
        one = spans.pop(draw(st.integers(0, len(spans) - 1)))
        if draw(st.booleans()):
            at = draw(st.integers(0, len(one)))
            spans += [one[:at], one[at:]]
        else:
            stride = draw(st.integers(1, 4))
            spans += [one[i::stride] for i in range(stride)]
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(world)]
    for one in draw(st.permutations(spans)):
        ranks[draw(st.integers(0, world - 1))].append((one.start, max(one.start, one.stop), one.step))
    return ranks


def layouts(mask: Mask, world: int) -> st.SearchStrategy[Layout]:
    """Every layout there is for the mask's queries, and spans of the user's own."""
    square = len(set(mask.lengths)) == 1
    named = [make for name, make in LAYOUTS.items() if square or name != "per_document"]
    own = bijections(mask.lengths[0], world).map(Layout)
    return st.one_of(st.sampled_from(named).map(lambda make: make(mask, world)), own)
