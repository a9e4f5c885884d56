"""Every constructor compared with its definition in tests/dense_masks.py, cell by cell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.masks import MAX_LENGTH, Mask
from ringspan.masks.documents import document_hulls, document_windows
from tests import dense_masks
from tests.hypothesis_strategies import CONSTRUCTORS, RELATIONS, SQUARE_CONSTRUCTORS, sizes


@pytest.mark.parametrize("name", CONSTRUCTORS)
@given(data=st.data())
def test_any_lengths(name: str, data: st.DataObject) -> None:
    size = data.draw(sizes())
    drawn = data.draw(CONSTRUCTORS[name](*size))
    assert drawn.mask.lengths == size
    assert (drawn.mask.dense() == drawn.truth).all()


@pytest.mark.parametrize("name", SQUARE_CONSTRUCTORS)
@given(data=st.data())
def test_one_length(name: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 24))
    drawn = data.draw(SQUARE_CONSTRUCTORS[name](n, n))
    assert drawn.mask.lengths == (n, n)
    assert (drawn.mask.dense() == drawn.truth).all()


@pytest.mark.parametrize("name", RELATIONS)
@given(data=st.data())
def test_relations_take_the_lengths_of_the_other(name: str, data: st.DataObject) -> None:
    size = data.draw(sizes())
    drawn = data.draw(RELATIONS[name](*size))
    assert drawn.mask.is_relation
    for mask in (drawn.mask & rs.full(*size), rs.full(*size) & drawn.mask):
        assert mask.lengths == size
        assert (mask.dense() == drawn.truth).all()


# Pictures: each row is one query.
PICTURES = [
    (rs.full(2, 3), "xxx xxx"),
    (rs.full(0, 3), ""),
    (rs.causal(3), "x.. xx. xxx"),
    (rs.causal(2, 4, align="start"), "x... xx.."),
    (rs.causal(2, 4, align="end"), "xxx. xxxx"),
    (rs.causal(4, 2, align="start"), "x. xx xx xx"),
    (rs.causal(4, 2, align="end"), ".. .. x. xx"),
    (rs.full(4) & rs.window(left=1), "xxxx xxxx .xxx ..xx"),
    (rs.full(4) & rs.window(left=1, right=0), "x... xx.. .xx. ..xx"),
    (rs.full(4) & rs.window(right=1), "xx.. xxx. xxxx xxxx"),
    (rs.full(3) & rs.window(0, 0), "x.. .x. ..x"),
    (rs.full(4) & rs.sliding_window(2), "x... xx.. .xx. ..xx"),
    (rs.full(3) & rs.sliding_window(1), "x.. .x. ..x"),
    (rs.prefix(4, 2), "xx.. xx.. xxx. xxxx"),
    (rs.prefix(3, 0), "x.. xx. xxx"),
    (rs.prefix(3, 3), "xxx xxx xxx"),
    (rs.tree([2, 1, 1, 1], [-1, 0, 1, 0]), "x.... xx... xxx.. xxxx. xx..x"),
    (rs.tree([2, 1, 1, 1], [-1, 0, 1, 0], left=1), "x.... xx... .xx.. ..xx. .x..x"),
    (rs.tree([], []), ""),
    (rs.chunked(5, 2), "x.... xx... ..x.. ..xx. ....x"),
    (rs.chunked(3, 2, causal=False), "xx. xx. ..x"),
    (rs.chunked(3, 99), "x.. xx. xxx"),
    (rs.documents([1, 0, 2]), "x.. .x. .xx"),
    (rs.documents([1, 2], causal=False), "x.. .xx .xx"),
    (rs.documents(cu_seqlens=[0, 1, 1, 3]), "x.. .x. .xx"),
    (rs.documents(ids=[7, 4, 7, 4]), "x... .x.. x.x. .x.x"),
    (rs.documents(ids=[7, 4, 7], causal=False), "x.x .x. x.x"),
    (rs.documents([1, 2], kv_lengths=[2, 1], causal=False), "xx. ..x ..x"),
    (rs.documents([1, 2], kv_lengths=[2, 1], align="start"), "x.. ..x ..x"),
    (rs.documents([1, 2], kv_lengths=[2, 1], align="end"), "xx. ... ..x"),
    (rs.documents([2, 0], kv_lengths=[0, 2], align="end"), ".. .."),
    (Mask.from_bands([(0, 2, 0, 9, -9, 9), (0, 3, 0, 1, -9, 9)], 3), "xxx xxx x.."),
    (Mask.from_bands([(-5, 2, -5, 2, 0, 0)], 3), "x.. .x. ..."),
    (Mask.from_bands([], 2), ".. .."),
]


@pytest.mark.parametrize(("mask", "picture"), PICTURES, ids=lambda x: x.name if isinstance(x, Mask) else "")
def test_picture(mask: Mask, picture: str) -> None:
    assert mask.ascii().replace(" ", "").split("\n") == picture.split(" ")


SAME_LENGTHS = [[1, 3, 0, 2], (1, 3, 0, 2), np.array([1, 3, 0, 2]), np.array([1, 3, 0, 2], dtype=np.uint8), range(1, 4)]


@pytest.mark.parametrize("lengths", SAME_LENGTHS, ids=lambda x: f"{type(x).__name__}")
def test_lengths_and_ids_may_come_in_any_container(lengths: object) -> None:
    plain = list(lengths)  # type: ignore[call-overload]
    assert rs.documents(lengths) == rs.documents([int(n) for n in plain])
    assert rs.documents(ids=lengths) == rs.documents(ids=[int(n) for n in plain])


def test_lengths_and_ids_may_be_tensors() -> None:
    torch = pytest.importorskip("torch")
    assert rs.documents(torch.tensor([1, 3])) == rs.documents([1, 3])
    assert rs.documents(ids=torch.tensor([5, 5, 2], dtype=torch.int32)) == rs.documents([2, 1])
    assert rs.causal(np.int32(4)) == rs.causal(torch.tensor(4)) == rs.causal(4)


def test_align_changes_nothing_for_equal_lengths() -> None:
    assert rs.causal(5) == rs.causal(5, 5) == rs.causal(5, align="start") == rs.causal(5, align="end")
    assert rs.documents([2, 3], align="end") == rs.documents([2, 3], align="start") == rs.documents([2, 3])


# The number of bands of long masks, which must not depend on the number of tokens.
@pytest.mark.parametrize(
    ("mask", "bands", "area"),
    [
        (rs.full(MAX_LENGTH), 1, MAX_LENGTH**2),
        (rs.causal(MAX_LENGTH), 1, MAX_LENGTH * (MAX_LENGTH + 1) // 2),
        (~rs.causal(MAX_LENGTH), 1, MAX_LENGTH * (MAX_LENGTH - 1) // 2),
        (rs.causal(10**6) & rs.window(left=4095), 1, 10**6 * 4096 - 4096 * 4095 // 2),
        (rs.prefix(10**6, 10**3), 2, 10**6 * (10**6 + 1) // 2 + 10**3 * (10**3 - 1) // 2),
        (rs.chunked(10**6, 10**3), 1000, 1000 * 500_500),
        (rs.documents([1000] * 1000), 1000, 1000 * 500_500),
        (rs.documents([1000] * 1000) & rs.window(left=99), 1000, 1000 * (1000 * 100 - 100 * 99 // 2)),
        (rs.tree([1000] * 1000, [-1, *[0] * 999]), 1000, 1000 * 500_500 + 999 * 10**6),
        (rs.tree([1000] * 1000, range(-1, 999)), 1, 10**6 * (10**6 + 1) // 2),
        (rs.documents(ids=np.arange(10**6) // 1000), 1000, 1000 * 500_500),
    ],
    ids=lambda x: x.name if isinstance(x, Mask) else None,
)
def test_long_masks_are_few_bands(mask: Mask, bands: int, area: int) -> None:
    assert (len(mask), mask.area) == (bands, area)


def test_two_definitions_in_truth_agree() -> None:
    """An error in one of the reference definitions would show here."""
    assert (dense_masks.documents([2, 3], [2, 3]) == dense_masks.by_ids([0, 0, 1, 1, 1])).all()
    assert (dense_masks.chunked(5, 2) == dense_masks.documents([2, 2, 1], [2, 2, 1])).all()
    assert (dense_masks.prefix(4, 0) == dense_masks.causal(4, 4)).all()
    assert (dense_masks.window(4, 5, None, 0) == dense_masks.causal(4, 5)).all()
    assert (dense_masks.bands([(0, 4, 0, 4, -9, 0)], 4, 4) == dense_masks.causal(4, 4)).all()


@given(
    pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5),
    left=st.none() | st.integers(0, 4),
    right=st.none() | st.integers(0, 4),
)
def test_windows_in_documents(pairs: list[tuple[int, int]], left: int | None, right: int | None) -> None:
    q_lengths, k_lengths = [n for n, _ in pairs], [m for _, m in pairs]
    truth = np.zeros((sum(q_lengths), sum(k_lengths)), dtype=bool)
    for i, (n, m) in enumerate(pairs):
        q0, k0 = sum(q_lengths[:i]), sum(k_lengths[:i])
        distance = np.arange(m)[None, :] - (np.arange(n)[:, None] + m - n)
        truth[q0 : q0 + n, k0 : k0 + m] = (left is None or distance >= -left) & (right is None or distance <= right)
    mask = document_windows(q_lengths, k_lengths, left=left, right=right)
    assert (mask.dense() == truth).all()
    if left is None and right is None:
        ends = [(sum(q_lengths[: i + 1]), sum(k_lengths[: i + 1])) for i in range(len(pairs))]
        hulls = [[q - n, q, k - m, k] for (q, k), (n, m) in zip(ends, pairs, strict=True) if n and m]
        assert document_hulls(mask).tolist() == hulls


def test_a_causal_window_in_documents_has_the_digest_of_the_constructor() -> None:
    lengths = [3, 0, 7, 1]
    assert document_windows(lengths, lengths, left=None, right=0).digest == rs.documents(lengths).digest
    assert document_windows(lengths, lengths, left=2, right=0).digest == (rs.documents(lengths) & rs.window(left=2)).digest


def test_documents_are_groups_of_bands() -> None:
    by_ids = rs.documents(ids=[0] * 4 + [1] * 3 + [2] * 5)
    for mask in (rs.documents([4, 3, 5]), rs.documents([4, 3, 5]) & rs.window(left=1), by_ids):
        assert document_hulls(mask).tolist() == [[0, 4, 0, 4], [4, 7, 4, 7], [7, 12, 7, 12]]
