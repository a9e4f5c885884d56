"""block_mask: the mask has the pairs of the blocks and the mask_mod, for any BlockMask and any length."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import ringspan as rs
from ringspan.masks import survey
from tests import dense_masks
from tests.hypothesis_strategies import sizes

N, M = 300, 200


def ragged(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q * 3 + k * k) % 11 < 4


@pytest.mark.parametrize("size", [128, 16, (32, 64)])
def test_blocks_of_any_size(size: Any) -> None:
    q, k = np.ogrid[:N, :M]
    mask = rs.block_mask(create_block_mask(ragged, None, None, N, M, device="cpu", BLOCK_SIZE=size))
    assert mask.lengths == (N, M)
    assert mask.predicate is not None
    assert (mask.dense() == ((q * 3 + k * k) % 11 < 4)).all()


def test_documents_become_bands() -> None:
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 50, 7, 143]))
    made = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, N, N, device="cpu")
    assert rs.block_mask(made) == rs.documents([100, 50, 7, 143])
    assert rs.block_mask(made).predicate is None


@pytest.mark.parametrize(("batch", "heads"), [(2, None), (None, 3), (2, 3), (1, None)])
def test_per_batch_and_per_head(batch: int | None, heads: int | None) -> None:
    shift = torch.tensor([[0, 40, 80], [120, 160, 200]])

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        at = shift[b if batch else 0, h if heads else 0]
        return (q >= at) & (k <= q)

    mask = rs.block_mask(create_block_mask(sees, batch, heads, N, N, device="cpu", BLOCK_SIZE=32))
    for b in range(batch or 1):
        for h in range(heads or 1):
            want = dense_masks.causal(N, N) & (np.arange(N) >= shift[b, h].item())[:, None]
            assert (mask.dense(b=b, h=h) == want).all()
    if (batch or 1) * (heads or 1) > 1:
        assert mask.predicate is not None
        assert (mask.predicate.batch, mask.predicate.heads) == (batch, heads)
        assert not dense_masks.bands(mask.bands, N, N)[: shift.min() // 32 * 32].any(), (
            "rows without visible keys are not planned"
        )


def lists(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices of one head, (1, 1, rows) and (1, 1, rows, 3); entries beyond the count are not valid."""
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    indices = torch.tensor([row + [2] * (3 - len(row)) for row in rows], dtype=torch.int32)
    return counts[None, None], indices[None, None]


def test_from_kv_blocks_keeps_hidden_partial_and_full() -> None:
    partial, full = lists([0], [], [1, 0]), lists([], [1], [2])
    made = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=(4, 4), mask_mod=lambda b, h, q, k: k < q, seq_lengths=(10, 12))
    want = np.zeros((10, 12), dtype=bool)
    q, k = np.ogrid[:10, :12]
    want[:4, :4], want[4:8, 4:8], want[8:, 8:] = (k < q)[:4, :4], True, True
    want[8:, :8] = True
    assert (rs.block_mask(made).dense() == want).all()


def test_from_kv_blocks_without_a_function() -> None:
    made = BlockMask.from_kv_blocks(*lists([0], [0, 1], [2]), BLOCK_SIZE=(4, 4), seq_lengths=(12, 12))
    want = np.kron([[1, 0, 0], [1, 1, 0], [0, 0, 1]], np.ones((4, 4))).astype(bool)
    assert (rs.block_mask(made).dense() == want).all()


def test_other_types_raise() -> None:
    with pytest.raises(rs.MaskError, match="expected a BlockMask of FlexAttention, got Tensor"):
        rs.block_mask(torch.ones(3, 3))  # type: ignore[arg-type]


# -- evaluated by blocks -----------------------------------------------------------------------------------------------


def made_of(kinds_BHQK: np.ndarray, mask_mod: Any, block: int | tuple[int, int], lengths: tuple[int, int]) -> BlockMask:
    """A BlockMask of a table of hidden, partial and full blocks."""

    def blocks_of(kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        listed = torch.from_numpy(kinds_BHQK == kind).to(torch.int32)
        order = listed.argsort(dim=-1, descending=True, stable=True)
        return listed.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)

    lists = (*blocks_of(survey.PARTIAL), *blocks_of(survey.FULL))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=lengths)


@pytest.mark.parametrize("budget", [survey.MAX_PARTIAL_CELLS, 0])
@given(
    sizes(24, 1),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_any_blocks_and_any_function(
    budget: int, size: tuple[int, int], q_block: int, k_block: int, batch: int, heads: int, seed: int, data: st.DataObject
) -> None:
    """Every pair must follow the blocks and the function, whether partial blocks are evaluated or left to the
    kernels."""
    rng = np.random.default_rng(seed)
    blocks = (-(-size[0] // q_block), -(-size[1] // k_block))
    kinds_BHQK = rng.integers(0, 3, (batch, heads, *blocks))
    cells = rng.random((2, 2, *size)) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    reads_batch, reads_heads = batch > 1 and data.draw(st.booleans()), heads > 1 and data.draw(st.booleans())
    table = torch.from_numpy(cells)
    made = made_of(
        kinds_BHQK, lambda b, h, q, k: table[b if reads_batch else 0, h if reads_heads else 0, q, k], (q_block, k_block), size
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "MAX_PARTIAL_CELLS", budget)
        mask = rs.block_mask(made)
    q, k = np.ogrid[: size[0], : size[1]]
    later = False
    for b in range(batch):
        for h in range(heads):
            kind = kinds_BHQK[b, h][q // q_block, k // k_block]
            want = (kind == survey.FULL) | ((kind == survey.PARTIAL) & cells[b * reads_batch, h * reads_heads])
            assert (mask.dense(b=b, h=h) == want).all()
            assert (dense_masks.bands(mask.bands, *size) | ~want).all()
            later |= bool(np.triu(want, 1).any())
    assert (dense_masks.times_covered(mask.bands, *size) <= 1).all()
    assert mask.is_causal == (not later)


def count_evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of pairs of each evaluation from now on."""
    counts: list[int] = []
    evaluate = survey._evaluate

    def counting(function: Any, member: Any, q_NR: torch.Tensor, k_NT: torch.Tensor) -> Any:
        counts.append(q_NR.numel() * k_NT.shape[1])
        return evaluate(function, member, q_NR, k_NT)

    monkeypatch.setattr(survey, "_evaluate", counting)
    return counts


LONG, BLOCK = 131_072, 128
BLOCKS = np.arange(LONG // BLOCK)
CAUSAL_BLOCKS = np.select([BLOCKS[:, None] == BLOCKS, BLOCKS[:, None] > BLOCKS], [survey.PARTIAL, survey.FULL], survey.HIDDEN)


def test_a_long_causal_block_mask_is_evaluated_in_its_partial_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_evaluated(monkeypatch)
    made = made_of(CAUSAL_BLOCKS[None, None], lambda b, h, q, k: k <= q, BLOCK, (LONG, LONG))
    begin = time.process_time()
    mask = rs.block_mask(made)
    assert time.process_time() - begin < 1
    assert sum(counts) == len(BLOCKS) * BLOCK**2
    assert mask.bands == rs.causal(LONG).bands


def test_long_documents_become_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_evaluated(monkeypatch)
    lengths = [5000, 700, 20_000, 40_001, 3, 65_368]
    ids = np.repeat(np.arange(len(lengths)), lengths)
    first, last = ids[::BLOCK], ids[BLOCK - 1 :: BLOCK]
    is_within = (first[:, None] == last) & (last[:, None] == first)
    may_meet = (first[:, None] <= last) & (first <= last[:, None]) & (CAUSAL_BLOCKS != survey.HIDDEN)
    kinds = np.select([is_within & (CAUSAL_BLOCKS == survey.FULL), may_meet], [survey.FULL, survey.PARTIAL], survey.HIDDEN)
    of_token = torch.from_numpy(ids)
    made = made_of(kinds[None, None], lambda b, h, q, k: (of_token[q] == of_token[k]) & (k <= q), BLOCK, (LONG, LONG))
    begin = time.process_time()
    mask = rs.block_mask(made)
    assert time.process_time() - begin < 1
    assert sum(counts) == (kinds == survey.PARTIAL).sum() * BLOCK**2
    assert mask == rs.documents(lengths)
    assert mask.predicate is None


def test_a_block_mask_without_a_function_and_one_block_for_everything() -> None:
    """The BlockMask that FlexAttention makes if none is given."""
    counts, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    made = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=1 << 30, seq_lengths=(LONG, LONG))
    assert rs.block_mask(made).bands == rs.full(LONG).bands


def ragged_mask(kinds: np.ndarray = CAUSAL_BLOCKS, factor: int = 3, shift: int = 0) -> rs.Mask:
    """Too many partial blocks to evaluate them all."""
    shifts = torch.full((LONG,), shift)
    return rs.block_mask(
        made_of(kinds[None, None], lambda b, h, q, k: (q * factor + k * k + shifts[q]) % 11 < 4, BLOCK, (LONG, LONG))
    )


ALL_PARTIAL = np.where(CAUSAL_BLOCKS == survey.FULL, survey.PARTIAL, CAUSAL_BLOCKS)


def test_fingerprints_of_sampled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_evaluated(monkeypatch)
    mask = ragged_mask(ALL_PARTIAL)
    assert mask.predicate is not None
    assert sum(counts) <= survey.SAMPLED_BLOCKS * BLOCK**2
    assert mask.digest == ragged_mask(ALL_PARTIAL).digest, "equal masks made twice"
    one_more_full = ALL_PARTIAL.copy()
    one_more_full[700, 300] = survey.FULL
    others = [ragged_mask(one_more_full), ragged_mask(ALL_PARTIAL, factor=4), ragged_mask(ALL_PARTIAL, shift=1)]
    assert len({mask.digest, *(other.digest for other in others)}) == 4


def test_is_causal_evaluates_only_blocks_above_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = ragged_mask(ALL_PARTIAL)
    counts = count_evaluated(monkeypatch)
    assert not mask.is_causal
    assert (mask & rs.causal()).is_causal
    assert sum(counts) < LONG * BLOCK


def test_is_causal_of_a_function_that_shows_nothing_above_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = rs.mask_mod(lambda b, h, q, k: (k <= q) & ((q + k) % 3 == 0), 1000, block=10)
    assert mask.predicate is not None
    counts = count_evaluated(monkeypatch)
    assert mask.is_causal
    assert sum(counts) <= 2 * 1000 * 10, "and evaluates its blocks on the diagonal, not all pairs"
