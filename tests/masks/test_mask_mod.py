"""mask_mod: any function as a mask, compared with the function; which are recognised as bands, which operators work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.masks import survey as cells
from tests import dense_masks
from tests.hypothesis_strategies import Drawn, masks, sizes


def of_table(seen: np.ndarray) -> Callable[..., Any]:
    """A function that reads a pair from a table."""
    table = torch.from_numpy(seen)
    return lambda b, h, q, k: table[q, k]


@given(masks(20))
def test_a_function_of_bands_becomes_bands_or_a_predicate(drawn: Drawn) -> None:
    q_len, k_len = drawn.mask.lengths
    if q_len * k_len == 0:
        return
    mask = rs.mask_mod(of_table(drawn.truth), q_len, k_len, block=4)
    assert (mask.dense() == drawn.truth).all()
    if mask.predicate is None:
        assert (dense_masks.times_covered(mask.bands, q_len, k_len) == drawn.truth).all()
        assert mask == drawn.mask


@given(sizes(20, 1), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_any_function(size: tuple[int, int], q_block: int, k_block: int, seed: int, share: float) -> None:
    seen = np.random.default_rng(seed).random(size) < share
    mask = rs.mask_mod(of_table(seen), *size, block=(q_block, k_block))
    assert (mask.dense() == seen).all()
    held = dense_masks.bands(mask.bands, *size)
    assert (held | ~seen).all()
    assert (dense_masks.times_covered(mask.bands, *size) <= 1).all()
    for q in range(0, size[0], q_block):
        for k in range(0, size[1], k_block):
            block = np.s_[q : q + q_block, k : k + k_block]
            assert seen[block].any() or not held[block].any(), "an empty block must not be planned"


RECOGNISED = {
    "causal": (lambda b, h, q, k: k <= q, rs.causal(300)),
    "window": (lambda b, h, q, k: (k <= q) & (q - k <= 40), rs.causal(300) & rs.window(left=40)),
    "prefix": (lambda b, h, q, k: (k < 30) | (k <= q), rs.prefix(300, 30)),
    "full": (lambda b, h, q, k: q >= 0, rs.full(300)),
    "nothing": (lambda b, h, q, k: q < 0, rs.full(300) - rs.full(300)),
    "chunked": (lambda b, h, q, k: (q // 50 == k // 50) & (k <= q), rs.chunked(300, 50)),
}


@pytest.mark.parametrize(("function", "mask"), RECOGNISED.values(), ids=RECOGNISED)
def test_bands_are_recognised(function: Callable[..., Any], mask: rs.Mask) -> None:
    found = rs.mask_mod(function, 300)
    assert found.predicate is None
    assert found == mask
    assert len(found) == len(mask)


def test_a_thousand_documents_are_a_thousand_bands() -> None:
    ids = torch.repeat_interleave(torch.arange(200), torch.randint(1, 20, (200,)))
    found = rs.mask_mod(lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q), len(ids), block=8)
    assert found.predicate is None
    assert found == rs.documents(ids=ids)


def test_rows_are_evaluated_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rs.mask_mod(lambda b, h, q, k: (q * k) % 7 < 3, 37, block=4)
    monkeypatch.setattr(cells, "MAX_CELLS", 100)
    seen: list[int] = []

    def watched(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q * k) % 7 < 3

    in_chunks = rs.mask_mod(watched, 37, block=4)
    seen += [cells_RT.size for _, cells_RT in cells.row_chunks(watched, (37, 37), 0, 0, 4, torch.device("cpu"))]
    assert max(seen) <= 4 * 37
    assert in_chunks.digest == whole.digest
    assert (in_chunks.dense() == whole.dense()).all()


# -- per batch, per head -----------------------------------------------------------------------------------------------


def test_a_batch_of_different_masks_is_planned_by_their_union() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2, 2]])
    mask = rs.mask_mod(lambda b, h, q, k: ids[b, q] == ids[b, k], 8, batch=2, block=1)
    assert mask.predicate is not None
    assert (mask.predicate.batch, mask.predicate.heads) == (2, None)
    each = [dense_masks.by_ids(ids[b].tolist(), causally=False) for b in range(2)]
    assert (dense_masks.bands(mask.bands, 8, 8) == each[0] | each[1]).all()
    assert (mask.dense() == each[0]).all()
    assert (mask.dense(b=1) == each[1]).all()


def test_equal_heads_become_one_mask_of_bands() -> None:
    reach = torch.tensor([3, 3])
    assert rs.mask_mod(lambda b, h, q, k: (q - k).abs() <= reach[h], 9, heads=2).predicate is None
    reach = torch.tensor([3, 2])
    mask = rs.mask_mod(lambda b, h, q, k: (q - k).abs() <= reach[h], 9, heads=2)
    assert mask.predicate is not None
    assert mask.predicate.heads == 2
    assert (mask.dense(h=1) == dense_masks.window(9, 9, 2, 2)).all()


READS = [
    (lambda b, h, q, k: b == q, "batch"),
    (lambda b, h, q, k: torch.zeros(5)[b] > q, "batch"),
    (lambda b, h, q, k: (q > k) & (h < 3), "heads"),
    (lambda b, h, q, k: torch.zeros(5, 5)[h, q] > 0, "heads"),
]


@pytest.mark.parametrize(("function", "what"), READS)
def test_a_function_that_reads_an_index_needs_its_size(function: Callable[..., Any], what: str) -> None:
    with pytest.raises(rs.MaskError, match=rf"reads the index of {what}: give its size, .*{what}="):
        rs.mask_mod(function, 5)


def test_an_index_may_be_used_for_its_shape() -> None:
    """As FlexAttention's own and_masks does."""
    from torch.nn.attention.flex_attention import and_masks, noop_mask

    assert rs.mask_mod(and_masks(lambda b, h, q, k: k <= q, noop_mask), 5) == rs.causal(5)


# -- digests -----------------------------------------------------------------------------------------------------------


def odd(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q * q + k) % 3 != 0


def test_digests_follow_the_results_of_functions() -> None:
    same = rs.mask_mod(lambda b, h, q, k: ~((q * q + k) % 3 == 0), 40, block=8)
    other = rs.mask_mod(lambda b, h, q, k: odd(b, h, q, k) & ((q != 17) | (k != 19)), 40, block=8)
    mask = rs.mask_mod(odd, 40, block=8)
    assert mask.predicate is not None
    assert mask.bands == other.bands
    assert mask.digest == same.digest
    assert mask == same
    assert hash(mask) == hash(same)
    assert mask.digest != other.digest
    assert mask != other
    assert mask.digest != rs.Mask(mask.table.copy(), 40, 40, name="its bands alone").digest


def test_a_cached_plan_has_the_functions_of_the_mask_it_is_asked_for() -> None:
    first, second = rs.mask_mod(odd, 40), rs.mask_mod(lambda b, h, q, k: odd(b, h, q, k), 40)
    assert rs.plan(first, world=2).digest == rs.plan(second, world=2).digest
    assert rs.plan(second, world=2).mask is second
    assert rs.plan(second, world=2, strategy="ulysses").at(1).for_heads(6, 2).mask is second


# -- algebra -----------------------------------------------------------------------------------------------------------


@given(masks(16, square=True))
def test_and_with_bands_and_with_functions(drawn: Drawn) -> None:
    n = drawn.mask.lengths[0]
    if n == 0:
        return
    q, k = np.ogrid[:n, :n]
    decided, cells_of = rs.mask_mod(odd, n, block=4), (q * q + k) % 3 != 0
    other = rs.mask_mod(lambda b, h, q, k: (q + 2 * k) % 5 != 1, n, block=3)
    for mask in (decided & drawn.mask, drawn.mask & decided):
        assert (mask.dense() == cells_of & drawn.truth).all()
    assert ((decided - drawn.mask).dense() == cells_of & ~drawn.truth).all()
    assert ((decided & other & drawn.mask).dense() == cells_of & drawn.truth & ((q + 2 * k) % 5 != 1)).all()
    assert (decided.transposed.dense() == cells_of.T).all()
    assert (decided & rs.causal()).is_causal
    assert decided.is_causal == (not np.triu(cells_of, 1).any())


REFUSED: dict[str, Callable[[rs.Mask], Any]] = {
    "|": lambda mask: mask | rs.causal(40),
    "| on the right": lambda mask: rs.causal(40) | mask,
    "-": lambda mask: rs.causal(40) - mask,
    "~": lambda mask: ~mask,
}


@pytest.mark.parametrize("expression", REFUSED.values(), ids=REFUSED)
def test_operators_that_predicates_do_not_support(expression: Callable[[rs.Mask], Any]) -> None:
    with pytest.raises(rs.MaskError, match=r"defined by a function.*write a function for the result.*& works"):
        expression(rs.mask_mod(odd, 40))


def test_masks_of_different_batch_sizes_cannot_be_combined() -> None:
    two, three = (rs.mask_mod(lambda b, h, q, k: (q + k + b) % 3 == 0, 9, batch=n) for n in (2, 3))
    with pytest.raises(rs.MaskError, match="one mask is for batch=2, the other for batch=3"):
        two & three


def test_repr_and_picture() -> None:
    mask = rs.mask_mod(odd, 40, block=8)
    assert repr(mask) == "<Mask mask_mod(odd): 40 × 40, area at most 1600, 1 band>"
    assert mask.ascii().splitlines()[1].startswith("x x . x x .")


# -- errors ------------------------------------------------------------------------------------------------------------

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: rs.mask_mod(lambda b, h, q, k: q - k, 5), "returns True or False for a pair .*returned torch.int64"),
    (lambda: rs.mask_mod(lambda q, k: q >= k, 5), r"takes \(b, h, q, k\)"),
    (lambda: rs.mask_mod(odd, -1), "q_len must be between 0"),
    (lambda: rs.mask_mod(odd, 5, 2.5), "kv_len must be an integer"),
    (lambda: rs.mask_mod(odd, 5, block=0), "block must be a number of tokens"),
    (lambda: rs.mask_mod(odd, 5, block=(1, 2, 3)), "block must be a number of tokens"),
    (lambda: rs.plan(rs.mask_mod(odd, 40), world=2).to_json(), "functions are not saved in files"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(rs.RingspanError, match=message):
        call()


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)])
def test_empty_sequences(lengths: tuple[int, int]) -> None:
    mask = rs.mask_mod(odd, *lengths)
    assert mask.area == 0
    assert mask.dense().shape == lengths
