"""Invalid inputs: each must raise a MaskError that says what was expected and what was given."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest

import ringspan as rs
from ringspan.errors import MaskError, RingspanError
from ringspan.masks import MAX_LENGTH, Mask

WHOLE = "must be an integer number of tokens"
RANGE = rf"must be between 0 and {MAX_LENGTH} tokens, not"


def rows(n: int) -> list[tuple[int, int, int, int, int, int]]:
    """Bands that have a row in common, one below the other."""
    return [(0, n, k, k + 2, -n, n) for k in range(n)]


def columns(n: int) -> Mask:
    """Every second one of ``2 * n`` columns."""
    return Mask.from_bands([(0, 2 * n, 2 * i, 2 * i + 1, -2 * n, 2 * n) for i in range(n)], 2 * n)


BAD: list[tuple[str, Callable[[], object], str]] = [
    # invalid lengths
    ("full(-1)", lambda: rs.full(-1), rf"q_len {RANGE} -1"),
    ("full(3, -1)", lambda: rs.full(3, -1), rf"k_len {RANGE} -1"),
    ("full(2.0)", lambda: rs.full(2.0), rf"q_len {WHOLE}, not 2\.0"),
    ("full(nan)", lambda: rs.full(math.nan), rf"q_len {WHOLE}, not nan"),
    ("full('3')", lambda: rs.full("3"), rf"q_len {WHOLE}, not '3'"),
    ("full(None)", lambda: rs.full(None), rf"q_len {WHOLE}, not None"),
    ("full(too long)", lambda: rs.full(MAX_LENGTH + 1), rf"q_len {RANGE} {MAX_LENGTH + 1}"),
    ("causal(-3)", lambda: rs.causal(-3), rf"q_len {RANGE} -3"),
    ("causal(3, 1.5)", lambda: rs.causal(3, 1.5, align="end"), rf"k_len {WHOLE}, not 1\.5"),
    ("prefix(-1, 0)", lambda: rs.prefix(-1, 0), rf"n {RANGE} -1"),
    ("prefix(4, -1)", lambda: rs.prefix(4, -1), rf"prefix {RANGE} -1"),
    ("prefix(4, 1.0)", lambda: rs.prefix(4, 1.0), rf"prefix {WHOLE}"),
    ("chunked(-1, 2)", lambda: rs.chunked(-1, 2), rf"n {RANGE} -1"),
    ("chunked(4, -2)", lambda: rs.chunked(4, -2), rf"chunk {RANGE} -2"),
    ("chunked(4, nan)", lambda: rs.chunked(4, math.nan), rf"chunk {WHOLE}"),
    ("window(left=-1)", lambda: rs.window(left=-1), rf"window's left {RANGE} -1"),
    ("window(right=-1)", lambda: rs.window(right=-1), rf"window's right {RANGE} -1"),
    ("window(left=inf)", lambda: rs.window(left=math.inf), rf"window's left {WHOLE}, not inf"),
    ("documents([2, -1])", lambda: rs.documents([2, -1]), rf"lengths\[1\] {RANGE} -1"),
    ("documents([2, 1.5])", lambda: rs.documents([2, 1.5]), rf"lengths\[1\] {WHOLE}, not 1\.5"),
    ("documents([nan])", lambda: rs.documents([math.nan]), rf"lengths\[0\] {WHOLE}, not nan"),
    ("documents(float array)", lambda: rs.documents(np.ones(2)), rf"lengths\[0\] {WHOLE}, not 1\.0"),
    ("documents(3 dims)", lambda: rs.documents([[[1, 2]]]), rf"lengths\[0\]\[0\] {WHOLE}, not \[1, 2\]"),
    ("documents(unequal rows)", lambda: rs.documents([[1, 2], [4]]), r"masks\[1\] is 4 × 4 and masks\[0\] is 3 × 3"),
    ("documents(mixed)", lambda: rs.documents([[1, 2], 3]), rf"lengths\[0\] {WHOLE}, not \[1, 2\]"),
    ("per_row([])", lambda: rs.per_row([]), "takes the mask of each row of a batch; got none"),
    ("per_row(7)", lambda: rs.per_row([7]), r"masks\[0\] is int"),
    ("per_row & per_row", lambda: rs.documents([[1], [1]]) & rs.documents([[1]]), "have 2 and 1 rows"),
    ("documents(5)", lambda: rs.documents(5), "lengths must be a list of lengths, one per document, not 5"),
    ("documents(too long)", lambda: rs.documents([MAX_LENGTH, 1]), rf"the sum of lengths {RANGE}"),
    ("documents(kv -1)", lambda: rs.documents([1], kv_lengths=[-1]), rf"kv_lengths\[0\] {RANGE} -1"),
    ("from_bands(-1)", lambda: Mask.from_bands([], -1), rf"q_len {RANGE} -1"),
    ("from_bands(3, 0.5)", lambda: Mask.from_bands([], 3, 0.5), rf"k_len {WHOLE}"),
    ("tree([2, -1])", lambda: rs.tree([2, -1], [-1, 0]), rf"lengths\[1\] {RANGE} -1"),
    ("tree(left=-1)", lambda: rs.tree([2], [-1], left=-1), rf"left {RANGE} -1"),
    # lengths that do not match
    ("tree(1 and 2)", lambda: rs.tree([1], [-1, 0]), "1 nodes have lengths but 2 have parents"),
    ("tree(text)", lambda: rs.tree([1], ["a"]), "parents must be a list of node numbers, -1 for a root"),
    ("tree(later)", lambda: rs.tree([1, 1], [1, -1]), r"parents\[0\] must be -1, for a root, or an earlier node; got 1"),
    ("tree(-2)", lambda: rs.tree([1], [-2]), r"parents\[0\] must be -1.*got -2"),
    ("tree(by levels)", lambda: rs.tree([1] * 4, [-1, 0, 0, 1]), r"parents\[3\] is 1, but nodes must be in depth-first order"),
    ("prefix(4, 5)", lambda: rs.prefix(4, 5), "a prefix of 5 tokens is longer than the sequence of 4"),
    ("chunked(4, 0)", lambda: rs.chunked(4, 0), "a chunk must hold at least one token, not 0"),
    ("window()", lambda: rs.window(), "needs left= or right="),
    ("causal(k_len=3)", lambda: rs.causal(k_len=3), "without q_len is a relation"),
    ("causal(align=)", lambda: rs.causal(align="end"), "without q_len is a relation"),
    ("causal(2, 3)", lambda: rs.causal(2, 3), '2 queries and 3 keys can mean two things: give align="start"'),
    ("causal(align=middle)", lambda: rs.causal(2, 3, align="middle"), 'align must be "start" or "end", not \'middle\''),
    ("documents()", lambda: rs.documents(), "exactly one of these"),
    ("documents(both)", lambda: rs.documents([1], ids=[0]), "exactly one of these"),
    ("documents(ids, kv)", lambda: rs.documents(ids=[0], kv_lengths=[1]), "give lengths and kv_lengths instead"),
    ("documents(1 and 2)", lambda: rs.documents([1], kv_lengths=[1, 2]), "1 documents have lengths but 2 have kv_lengths"),
    ("documents(no align)", lambda: rs.documents([2], kv_lengths=[3]), "2 queries and 3 keys can mean two things"),
    ("documents(align=left)", lambda: rs.documents([2], kv_lengths=[3], align="left"), "align must be .* not 'left'"),
    (
        "documents(cumulative)",
        lambda: rs.documents([0, 3, 5]),
        r"\[0, 3, 5\] look like cumulative lengths: pass them as cu_seqlens=",
    ),
    (
        "cu_seqlens without 0",
        lambda: rs.documents(cu_seqlens=[3, 5]),
        r"a 0, then the end of each document, in order; got \[3, 5\]",
    ),
    ("cu_seqlens in disorder", lambda: rs.documents(cu_seqlens=[0, 5, 3]), r"in order; got \[0, 5, 3\]"),
    ("cu_seqlens floats", lambda: rs.documents(cu_seqlens=[0.0, 5.0]), "got float64"),
    ("cu_seqlens empty", lambda: rs.documents(cu_seqlens=[]), "cu_seqlens must be a list of integers"),
    ("sliding_window(0)", lambda: rs.sliding_window(0), "a sliding window of 0 keys hides everything"),
    # invalid ids
    ("ids floats", lambda: rs.documents(ids=[0.0, 1.0]), "ids must be a flat list of integers.*float64"),
    ("ids matrix", lambda: rs.documents(ids=[[0, 1]]), r"ids must be a flat list.*\(1, 2\)"),
    ("ids number", lambda: rs.documents(ids=3), r"ids must be a flat list.*shape \(\)"),
    ("ids words", lambda: rs.documents(ids=["a"]), "ids must be a flat list of integers"),
    ("ids None", lambda: rs.documents(ids=[None]), "ids must be a flat list of integers"),
    # masks that do not match
    ("3 & 4", lambda: rs.full(3) & rs.full(4), r"full\(3\) & full\(4\): the lengths differ, 3 × 3 and 4 × 4"),
    ("3 | 4", lambda: rs.full(3) | rs.full(4), "the lengths differ, 3 × 3 and 4 × 4"),
    ("3 - 4", lambda: rs.full(3) - rs.full(4), "the lengths differ, 3 × 3 and 4 × 4"),
    ("cross", lambda: rs.full(3) & rs.full(3, 4), r"3 × 3 and 3 × 4 \(queries × keys\)"),
    ("mask & None", lambda: rs.full(3) & None, r"full\(3\) & None: both sides must be masks"),
    ("mask | array", lambda: rs.full(1) | np.ones((1, 1), dtype=bool), "both sides must be masks"),
    # too many bands
    ("chunked(10000000, 1)", lambda: rs.chunked(10**7, 1), "chunked.10000000, 1. has 10,000,000 bands; at most 262,144 are"),
    ("chunked(MAX, 1)", lambda: rs.chunked(MAX_LENGTH, 1), "has 2,147,483,647 bands"),
    (
        "documents([1] * 300000)",
        lambda: rs.documents([1] * 300_000),
        "300000 tokens. has 300,000 bands; at most 262,144 .* blocks",
    ),
    (
        "300000 bands",
        lambda: Mask.from_bands([(0, 1, 0, 1, 0, 0)] * 300_000, 4),
        "300000 bands. has 300,000",
    ),
    ("stripes", lambda: Mask.from_bands(rows(2100), 4200), "overlap in 4,410,000 pairs; at most 4,194,304"),
    ("a grid", lambda: columns(600) & columns(600).transposed, "has 360,000 bands"),
    (
        "| of columns and rows",
        lambda: columns(1100) | columns(1100).transposed,
        "overlap in 1,210,000 pairs; at most 1,048,576",
    ),
    # properties that this mask does not have
    ("ascii of a large one", lambda: rs.full(129).ascii(), "129 × 129 is too large to print"),
    ("documents of a cross mask", lambda: rs.full(3, 4).documents(), "this one has 3 queries and 4 keys"),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_invalid_input_raises_a_mask_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(MaskError, match=message) as raised:
        call()
    assert isinstance(raised.value, RingspanError)
    assert isinstance(raised.value, ValueError)


MALFORMED = [[(0, 4, 0, 4, 0)], [(0, 4.0, 0, 4, 0, 0)], [4], [(0, 4, 0, 4, 0, None)], ["bands!"]]


@pytest.mark.parametrize("bands", MALFORMED, ids=repr)
def test_malformed_bands(bands: list[object]) -> None:
    with pytest.raises(MaskError):
        Mask.from_bands(bands, 4)


@pytest.mark.parametrize("far", [2**31, 2**40, 2**62, sys.maxsize, 2**70])
def test_diagonals_beyond_the_longest_sequence(far: int) -> None:
    assert Mask.from_bands([(0, 4, 0, 4, -far, far)], 4) == rs.full(4)
    assert Mask.from_bands([(-far, far, -far, far, -far, 0)], 4) == rs.causal(4)


def test_ids_of_uneven_rows() -> None:
    with pytest.raises(MaskError):
        rs.documents(ids=[[1], [2, 3]])


def test_a_field_of_a_mask_cannot_be_deleted() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        del rs.causal(4).name


@pytest.mark.parametrize(
    "call", [lambda: rs.documents([2], causal=False, align="middle"), lambda: rs.documents(ids=[1], align="middle")]
)
def test_align_is_checked_even_where_it_changes_nothing(call: Callable[[], object]) -> None:
    with pytest.raises(MaskError, match="align"):
        call()
