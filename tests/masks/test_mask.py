"""Expressions over all constructors, compared with the same expressions over dense arrays; and the methods for
planning."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.errors import MaskError
from ringspan.masks import Band, Mask
from tests import dense_masks
from tests.hypothesis_strategies import CONSTRUCTORS, Drawn, are_lengths, masks, sizes, trees
from tests.masks.test_table import assert_tight

pairs = sizes().flatmap(lambda size: st.tuples(trees(*size, leaves=4), trees(*size, leaves=4)))


# -- the set -----------------------------------------------------------------------------------------------------------


@given(masks())
def test_an_expression_equals_the_dense_expression(drawn: Drawn) -> None:
    assert drawn.mask.lengths == drawn.truth.shape
    assert (drawn.mask.dense() == drawn.truth).all()


@given(masks(leaves=12))
def test_bands_are_disjoint_tight_and_inside(drawn: Drawn) -> None:
    q_len, k_len = drawn.truth.shape
    assert (dense_masks.times_covered(drawn.mask.bands, q_len, k_len) == drawn.truth).all()
    for band in drawn.mask:
        assert 0 <= band.q0 < band.q1 <= q_len
        assert 0 <= band.k0 < band.k1 <= k_len
        inside = dense_masks.band(band, q_len, k_len)[band.q0 : band.q1, band.k0 : band.k1]
        assert inside.any(axis=0).all()
        assert inside.any(axis=1).all()


@given(masks(10))
def test_tables_are_tight(drawn: Drawn) -> None:
    assert_tight(drawn.mask.table)


@given(masks())
def test_area(drawn: Drawn) -> None:
    assert drawn.mask.area == drawn.truth.sum() == sum(band.area for band in drawn.mask)


@given(masks())
def test_transposed(drawn: Drawn) -> None:
    turned = drawn.mask.transposed
    assert turned.lengths == drawn.truth.T.shape
    assert (turned.dense() == drawn.truth.T).all()
    assert turned.transposed == drawn.mask


@given(pairs)
def test_laws_of_sets(two: tuple[Drawn, Drawn]) -> None:
    a, b = (drawn.mask for drawn in two)
    everything, nothing = rs.full(*a.lengths), Mask.from_bands([], *a.lengths)
    assert ~~a == a
    assert ~(a & b) == ~a | ~b
    assert ~(a | b) == ~a & ~b
    assert a - b == a & ~b
    assert a | b == b | a
    assert (a & b) | (a - b) == a
    assert a & ~a == nothing
    assert a | ~a == everything


# -- relations ---------------------------------------------------------------------------------------------------------


@given(sizes().flatmap(lambda size: trees(*size, relations=True)))
def test_relations_have_no_lengths_until_combined_with_a_mask(drawn: Drawn) -> None:
    if drawn.mask.is_relation:
        assert (drawn.mask.q_len, drawn.mask.k_len) == (None, None)
        with pytest.raises(MaskError, match="any length"):
            _ = drawn.mask.lengths
        drawn = Drawn(drawn.mask & rs.full(*drawn.truth.shape), drawn.truth)
    assert (drawn.mask.dense() == drawn.truth).all()


@given(sizes().flatmap(lambda size: st.tuples(st.just(size), trees(*size))), st.integers(0, 5), st.booleans())
def test_every_operator_takes_a_relation_on_either_side(sized: tuple[tuple[int, int], Drawn], reach: int, both: bool) -> None:
    size, a = sized
    b = Drawn(rs.window(reach, reach if both else None), dense_masks.window(*size, reach, reach if both else None))
    for mask, expected in (
        (a.mask & b.mask, a.truth & b.truth),
        (b.mask & a.mask, a.truth & b.truth),
        (a.mask | b.mask, a.truth | b.truth),
        (b.mask | a.mask, a.truth | b.truth),
        (a.mask - b.mask, a.truth & ~b.truth),
        (b.mask - a.mask, b.truth & ~a.truth),
        (a.mask & ~b.mask, a.truth & ~b.truth),
    ):
        assert mask.lengths == size
        assert (mask.dense() == expected).all()


def test_relations_among_themselves() -> None:
    assert rs.window(left=2, right=0) == rs.window(left=2) & rs.causal()
    assert rs.causal() == rs.window(right=0)
    assert ~~rs.window(3, 4) == rs.window(3, 4)
    assert rs.window(left=2) != rs.window(left=3)
    assert rs.window(left=2) != rs.full(5) & rs.window(left=2)
    assert (rs.window(1) | rs.window(right=1)) & rs.full(4) == rs.full(4)


ASKS_FOR_LENGTHS: list[Callable[[Mask], object]] = [
    lambda m: m.lengths,
    lambda m: m.area,
    lambda m: m.dense(),
    lambda m: m.ascii(),
    lambda m: m.documents(),
]


@pytest.mark.parametrize("ask", ASKS_FOR_LENGTHS, ids=["lengths", "area", "dense", "ascii", "documents"])
def test_what_depends_on_lengths_raises_for_a_relation(ask: Callable[[Mask], object]) -> None:
    with pytest.raises(MaskError, match=r"window\(left=1\) holds at any length and has none of its own: combine it"):
        ask(rs.window(left=1))


# -- equality and immutability -----------------------------------------------------------------------------------------


@given(pairs)
def test_equal_masks_have_equal_cells_hashes_and_lengths(two: tuple[Drawn, Drawn]) -> None:
    a, b = two
    assert (a.mask == b.mask) == bool((a.truth == b.truth).all())
    assert (a.mask != b.mask) == bool((a.truth != b.truth).any())
    if a.mask == b.mask:
        assert hash(a.mask) == hash(b.mask)
    if a.mask.digest == b.mask.digest:
        assert a.mask == b.mask


@given(masks())
def test_the_digest_is_of_the_table_and_the_lengths(drawn: Drawn) -> None:
    mask = drawn.mask
    twin = Mask(mask.table.copy(), mask.q_len, mask.k_len, name="another name")
    assert mask.digest == twin.digest
    assert len(mask.digest) == 16
    assert int(mask.digest, 16) >= 0
    longer = Mask(mask.table.copy(), mask.lengths[0] + 1, mask.k_len, name=mask.name)
    assert longer.digest != mask.digest
    assert longer != mask


def test_equality_compares_pairs_and_not_bands() -> None:
    top, bottom = Mask.from_bands([(0, 2, 0, 4, -9, 0)], 4), Mask.from_bands([(2, 4, 0, 4, -9, 0)], 4)
    assert top | bottom == rs.causal(4) == rs.documents([4]) == rs.prefix(4, 0) == rs.prefix(4, 1) == rs.chunked(4, 4)
    assert rs.causal(4).digest != rs.prefix(4, 1).digest, "one band and two"
    assert len({top | bottom, rs.causal(4), rs.documents([4]), rs.prefix(4, 1)}) == 1
    assert rs.full(0, 3) != rs.full(3, 0)
    assert rs.full(3) != "full(3)"


FIELDS = ("table", "q_len", "k_len", "name", "area", "digest", "bands", "another")


@pytest.mark.parametrize("field", FIELDS)
def test_a_mask_is_immutable(field: str) -> None:
    with pytest.raises(AttributeError, match="immutable"):
        setattr(rs.causal(4), field, 0)


@given(masks())
def test_a_mask_of_any_origin_has_a_read_only_table(drawn: Drawn) -> None:
    for mask in (drawn.mask, drawn.mask.transposed, ~drawn.mask):
        with pytest.raises(ValueError, match="read-only"):
            mask.table[...] = 0


@given(pairs)
def test_operators_do_not_change_their_operands(two: tuple[Drawn, Drawn]) -> None:
    a, b = (drawn.mask for drawn in two)
    before = a.table.tobytes(), b.table.tobytes(), a.name, b.name
    _ = a & b, a | b, a - b, ~a, a == b, a.transposed, a.work(np.array([0, a.lengths[0]]))
    assert before == (a.table.tobytes(), b.table.tobytes(), a.name, b.name)


@pytest.mark.parametrize("test", [bool, operator.not_, lambda m: m and m, lambda m: m or m, lambda m: 1 if m else 0])
def test_a_mask_has_no_truth_value(test: Callable[[Mask], Any]) -> None:
    with pytest.raises(MaskError, match=r"no truth value: write a & b, a \| b, ~a"):
        test(rs.causal(4))


DUPLICATES = [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]


@pytest.mark.parametrize("duplicate", DUPLICATES, ids=["copy", "deepcopy", "pickle"])
def test_a_mask_can_be_copied_and_pickled(duplicate: Callable[[Mask], Mask]) -> None:
    mask = rs.documents([2, 3]) & rs.window(left=1)
    twin = duplicate(mask)
    assert (twin, twin.name, twin.digest) == (mask, mask.name, mask.digest)
    with pytest.raises(ValueError, match="read-only"):
        twin.table[...] = 0


# -- for planning ------------------------------------------------------------------------------------------------------


@given(masks(), st.data())
def test_work_is_the_area_between_cuts(drawn: Drawn, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, drawn.mask.lengths[0]), min_size=1, max_size=8)))
    expected = [int(drawn.truth[low:high].sum()) for low, high in pairwise(cuts)]
    assert drawn.mask.work(np.array(cuts, dtype=np.int64)).tolist() == expected


@given(masks(square=True))
def test_documents_cuts_separate(drawn: Drawn) -> None:
    n = drawn.mask.lengths[0]
    cuts = drawn.mask.documents().tolist()
    assert cuts == sorted({0, n, *cuts})
    for cut in cuts:
        assert not drawn.truth[:cut, cut:].any(), f"a query before {cut} sees a key after it"
        assert not drawn.truth[cut:, :cut].any(), f"a query after {cut} sees a key before it"


@given(st.lists(st.integers(0, 6), max_size=6).filter(are_lengths), st.integers(0, 5), st.booleans())
def test_documents_are_recovered_from_the_bands(lengths: list[int], left: int, causal: bool) -> None:
    mask = rs.documents(lengths, causal=causal)
    cuts = np.unique([0, *np.cumsum(lengths)]).tolist()
    assert mask.documents().tolist() == cuts
    assert set(cuts) <= set((mask & rs.window(left)).documents().tolist())


def test_bounds_of_documents_cannot_be_changed() -> None:
    mask = rs.documents([2, 3])
    with pytest.raises(ValueError, match="read-only"):
        mask.documents()[0] = 1
    assert mask.documents().tolist() == [0, 2, 5]


def test_iterating_gives_bands() -> None:
    mask = rs.documents([2, 3])
    assert tuple(mask) == mask.bands == (Band(0, 2, 0, 2, -1, 0), Band(2, 5, 2, 5, -2, 0))
    assert len(mask) == 2


# -- display -----------------------------------------------------------------------------------------------------------


@given(masks(12))
def test_ascii_is_the_dense_mask(drawn: Drawn) -> None:
    drawing = "\n".join(" ".join(".x"[int(seen)] for seen in row) for row in drawn.truth)
    assert drawn.mask.ascii() == drawing


REPRS = [
    (rs.causal(6), "<Mask causal(6): 6 × 6, area 21, 1 band>"),
    (rs.causal(2, 4, align="end"), '<Mask causal(2, 4, align="end"): 2 × 4, area 7, 1 band>'),
    (rs.full(2, 3), "<Mask full(2, 3): 2 × 3, area 6, 1 band>"),
    (rs.full(0), "<Mask full(0): 0 × 0, area 0, 0 bands>"),
    (rs.window(left=2), "<Mask window(left=2): any length, 1 band>"),
    (rs.window(2, 0) & rs.causal(), "<Mask window(left=2, right=0) & causal(): any length, 1 band>"),
    (rs.prefix(4, 2), "<Mask prefix(4, 2): 4 × 4, area 11, 2 bands>"),
    (rs.chunked(4, 2, causal=False), "<Mask chunked(4, 2, causal=False): 4 × 4, area 8, 2 bands>"),
    (rs.documents([2, 3]), "<Mask documents(2 over 5 tokens): 5 × 5, area 9, 2 bands>"),
    (
        rs.documents([2], kv_lengths=[3], causal=False),
        "<Mask documents(1 over 2 × 3 tokens, causal=False): 2 × 3, area 6, 1 band>",
    ),
    (rs.causal(6) & rs.window(left=2), "<Mask causal(6) & window(left=2): 6 × 6, area 15, 1 band>"),
    (~(rs.causal(3) | rs.window(0, 1)), "<Mask ~(causal(3) | window(left=0, right=1)): 3 × 3, area 1, 1 band>"),
    ((rs.full(3) - rs.causal(3)) & rs.full(3), "<Mask (full(3) - causal(3)) & full(3): 3 × 3, area 3, 1 band>"),
    (rs.full(3) - (rs.causal(3) & rs.full(3)), "<Mask full(3) - (causal(3) & full(3)): 3 × 3, area 3, 1 band>"),
    (rs.causal(3).transposed, "<Mask causal(3).transposed: 3 × 3, area 6, 1 band>"),
]


@pytest.mark.parametrize(("mask", "text"), REPRS, ids=[text for _, text in REPRS])
def test_repr_says_how_it_was_made(mask: Mask, text: str) -> None:
    assert repr(mask) == text


def test_repr_of_a_long_expression_stays_short() -> None:
    mask = rs.causal(5)
    for left in range(9):
        mask = mask | rs.window(left=left)
    assert "...: 5 × 5, area 25," in repr(mask)
    assert len(repr(mask)) < 120


def test_every_constructor_is_drawn_by_name() -> None:
    """A constructor that is added to the library must be added to the strategies too."""
    from tests.hypothesis_strategies import RELATIONS, SQUARE_CONSTRUCTORS

    drawn = {name.split("(")[0] for name in (*CONSTRUCTORS, *SQUARE_CONSTRUCTORS, *RELATIONS)}
    public = {name for name in rs.masks.__all__ if name.islower()}
    # Decided by functions, they support & alone: see test_mask_mod.py and test_block_mask.py.
    public -= {"mask_mod", "block_mask"}
    public -= {"per_row"}  # made of masks: see tests/frontends/test_batch_rows.py
    assert drawn == public | {"from_bands"}
