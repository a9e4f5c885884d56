"""Batches whose rows have masks of their own: every row against dense float64 attention, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import ringspan as rs
from ringspan.layouts import LAYOUTS, Layout, balanced, by_rows, contiguous, zigzag
from ringspan.masks import BatchMask
from ringspan.testing.assertions import assert_close
from tests.conftest import Pools
from tests.hypothesis_strategies import trees

STRATEGIES = ["ring", "gather", "exchange(stages=2)", "pass_q", "ulysses", "hierarchical(per_node=2)", "hybrid(per_node=2)"]


def dense(q: Tensor, k: Tensor, v: Tensor, seen_by_row: Sequence[Tensor]) -> Tensor:
    """Row by row. A query without keys has the result 0."""
    outs = []
    for i, seen in enumerate(seen_by_row):
        scores = (q[i] @ k[i].mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        weights = torch.where(seen.any(-1, keepdim=True), scores, 0.0).softmax(-1) * seen
        outs.append(weights @ v[i])
    return torch.stack(outs)


def seen_in_documents(lengths: Sequence[int], left: int | None = None) -> Tensor:
    """Which keys each query sees: those of its own document up to itself, at most ``left`` before it."""
    document = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
    back = torch.arange(len(document))[:, None] - torch.arange(len(document))
    seen = (document[:, None] == document) & (back >= 0)
    return seen if left is None else seen & (back <= left)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 20), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from(STRATEGIES))
def test_every_strategy_and_layout(data: st.DataObject, n: int, rows: int, world: int, strategy: str) -> None:
    drawn = [data.draw(trees(n, n, leaves=2)) for _ in range(rows)]
    masks = [of_row.mask for of_row in drawn]
    batch = rs.per_row(masks)
    layout: Any = data.draw(st.sampled_from([*LAYOUTS, "auto", "one each"]))
    if layout == "one each":
        layout = [data.draw(st.sampled_from([contiguous, zigzag]))(mask, world) for mask in masks]
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(rows, 2, n, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3))
    got = rs.LocalWorld(world).attention(q, k, v, mask=batch, strategy=strategy, layout=layout)
    want = dense(q, k, v, [torch.from_numpy(of_row.truth) for of_row in drawn])
    assert_close(got, want, rtol=1e-12, atol=1e-12)
    weight = torch.randn(want.shape, dtype=torch.float64, generator=generator)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (got, want)), strict=True):
        assert_close(a, b, rtol=1e-11, atol=1e-11)


LENGTHS = [[7, 3, 11], [21], [1, 20]]


def on_processes(rank: int, layout: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    cp = rs.ContextParallel(None, rs.documents(LENGTHS), layout=layout)
    tokens = torch.randint(9, (3, 21))
    x = torch.randn(3, 21, 2, 4, dtype=torch.float64)
    mine = cp.shard(x, dim=1).requires_grad_()
    with cp:
        heads = mine.transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
    cp.sum(out.square()).backward()
    assert mine.grad is not None
    near = cp.with_mask(rs.documents(LENGTHS) & rs.window(left=2))
    with near:
        windowed = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
    labels = cp.shard(rs.shift_labels(tokens, documents=LENGTHS), dim=1)
    parts = {
        "out": out.detach(),
        "grad": mine.grad,
        "windowed": windowed.detach(),
        "labels": labels,
        "positions": cp.positions(),
        "in documents": cp.positions(documents=LENGTHS),
    }
    return {name: cp.unshard(part, dim=1) for name, part in parts.items()}


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_over_processes(pools: Pools, layout: str) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(9, (3, 21))
    x = torch.randn(3, 21, 2, 4, dtype=torch.float64, requires_grad=True)
    heads = x.transpose(1, 2)
    seen, near = ([seen_in_documents(lengths, left) for lengths in LENGTHS] for left in (None, 2))
    out = dense(heads, heads, heads, seen).transpose(1, 2)
    out.square().sum().backward()
    assert x.grad is not None
    want = {
        "out": out,
        "grad": x.grad,
        "windowed": dense(heads, heads, heads, near).transpose(1, 2),
        "labels": torch.stack([rs.shift_labels(t, documents=n) for t, n in zip(tokens, LENGTHS, strict=True)]),
        "positions": torch.arange(21).expand(3, 21),
        "in documents": torch.tensor([[i for n in row for i in range(n)] for row in LENGTHS]),
    }
    for got in pools(3).run(on_processes, layout):
        for name, part in got.items():
            assert_close(part, want[name], rtol=1e-12, atol=1e-12, what=name)


def test_the_algebra_is_that_of_the_rows() -> None:
    batch, other = rs.documents([[2, 3], [5]]), rs.documents([[4, 1], [1, 4]], causal=False)
    for made, rows in (
        (batch & rs.window(left=1), [a & rs.window(left=1) for a in batch.rows]),
        (rs.window(left=1) & batch, [a & rs.window(left=1) for a in batch.rows]),
        (batch | rs.window(0, 1), [a | rs.window(0, 1) for a in batch.rows]),
        (rs.causal(5) - batch, [rs.causal(5) - a for a in batch.rows]),
        (other - batch, [b - a for a, b in zip(batch.rows, other.rows, strict=True)]),
        (~batch, [~a for a in batch.rows]),
        (batch.transposed, [a.transposed for a in batch.rows]),
    ):
        assert isinstance(made, BatchMask)
        assert made == rs.per_row(rows)
    assert batch.digest != rs.documents([2, 3, 5]).digest
    assert batch == rs.per_row([rs.documents([2, 3]), rs.causal(5)])


def test_planning_costs_as_much_as_that_of_bands() -> None:
    """4 rows of 32k tokens: as a mask_mod every pair would be evaluated."""
    batch = rs.documents([[700, 32_068], [32_768], [16_384] * 2, [8_192] * 4])
    assert len(batch) == 9
    plan = rs.plan(batch, world=8, layout="zigzag", strategy="exchange")
    assert plan.verify().q_rows == 4 * 32_768 // 8
    again = rs.Plan.from_json(plan.to_json())
    assert again.program == plan.program


def test_rows_that_cannot_be_shared_equally_keep_most_ranks() -> None:
    """Three ranks of each row have a token more. Where these are others than in the first row, they are renumbered, and
    all others stay in their node."""
    n, world = 1603, 16
    rows = [[700, 403, *[50] * 10], [1203, 400], [90] * 17 + [73], [500, 300, 803]]
    whole = by_rows("balanced(per_node=4)", rs.documents(rows), world)
    renumbered = 0
    for i, lengths in enumerate(rows):
        alone = balanced(rs.documents(lengths), world, per_node=4)
        assert sorted(alone.counts) == [100] * 13 + [101] * 3
        for rank in range(world):
            tokens = whole.positions(rank)
            mine = tokens[(tokens >= i * n) & (tokens < (i + 1) * n)]
            renumbered += mine.tolist() != (alone.positions(rank) + i * n).tolist()
    assert renumbered <= 6 * (len(rows) - 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention(2, 5), r"a batch of 3 rows; q is \(2, 1, 5, 4\), not \(3, heads, tokens, dim\)"),
        (lambda: by_rows([contiguous(rs.causal(5), 2)], rs.per_row([rs.causal(5)] * 3), 2), "1 layouts for a batch of 3 rows"),
        (
            lambda: by_rows([Layout([[(0, 5)], []]), Layout([[(0, 3)], [(3, 5)]])], rs.per_row([rs.causal(5)] * 2), 2),
            r"a rank must have as many tokens of each row.*\(5, 0\), then \(3, 2\)",
        ),
        (
            lambda: rs.documents([[128, 128], [256]]) & rs.mask_mod(ragged, 256),
            "row 0 of .* is defined by a function",
        ),
        (
            lambda: rs.mask_mod(ragged, 256) & rs.documents([[128, 128], [256]]),
            "row 0 of .* is defined by a function",
        ),
        (
            lambda: rs.LocalWorld(2).attention(
                *[torch.zeros(2, 1, 5, 4)] * 3, mask=rs.documents([[2, 3], [5]]), score_mod=lambda s, b, h, q, k: s + b
            ),
            "a score_mod does not support masks that differ",
        ),
        (
            lambda: rs.plan(rs.documents([[4], [4]]), world=2, layout=contiguous(rs.causal(8), 2)),
            "does not give rank 0 as many tokens of each of the 2 rows",
        ),
        (lambda: rs.shift_labels(torch.zeros(2, 5), documents=[[5]]), "the batch has 2 rows, but there are documents of 1"),
        (lambda: rs.shift_labels(torch.zeros(5), documents=[[5]]), "need a batch dim"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(rs.RingspanError, match=message):
        call()


def ragged(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Not made of bands. (A short mask would become one band for each pair.)"""
    return (3 * q + k * k) % 7 < 4


def attention(batch: int, n: int) -> Tensor:
    q = torch.zeros(batch, 1, n, 4)
    return rs.LocalWorld(2).attention(q, q, q, mask=rs.documents([[5], [2, 3], [5]]))


def packed(cp: rs.ContextParallel, x: Tensor) -> Any:
    ends = torch.tensor([0, 5], dtype=torch.int32)
    return varlen_attn(x[0].transpose(0, 1), x[0].transpose(0, 1), x[0].transpose(0, 1), ends, ends, 5, 5)


REFUSED: dict[str, tuple[Callable[[rs.ContextParallel, Tensor], Any], str]] = {
    "score_mod": (
        lambda cp, x: flex_attention(x, x, x, lambda score, b, h, q, k: score + b),
        "flex_attention with a score_mod or a block_mask does not support masks that differ",
    ),
    "block_mask": (
        lambda cp, x: flex_attention(x, x, x, block_mask=create_block_mask(lambda b, h, q, k: q >= k, 2, 1, 5, 5, "cpu")),
        "flex_attention with a score_mod or a block_mask does not support masks that differ",
    ),
    "varlen_attn": (packed, "varlen_attn does not support masks that differ"),
    "roll": (lambda cp, x: cp.roll(x, 1, dim=2), "cp.roll does not support masks that differ"),
    "roll, flat": (lambda cp, x: cp.roll(x.reshape(10, -1), 1, dim=0), "cp.roll does not support masks that differ"),
    "halo": (lambda cp, x: cp.halo(x, before=1, dim=2), "cp.halo does not support masks that differ"),
    "targets": (lambda cp, x: cp.targets(rs.shift_labels(tree=rs.fold([[1, 2]]))), "cp.targets does not support masks"),
    "unshard": (lambda cp, x: cp.unshard(x[:, :, 1:], dim=2), "this rank's 5 tokens of each row"),
}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_functions_that_know_no_rows_are_refused(call: Callable[[rs.ContextParallel, Tensor], Any], message: str) -> None:
    cp = rs.ContextParallel(None, rs.documents([[2, 3], [5]]), expect_attention=False)
    with cp, pytest.raises(rs.InputError, match=message):
        call(cp, torch.zeros(2, 1, 5, 16))


@pytest.mark.usefixtures("world_of_one")
def test_flex_attention_computes_the_mask_of_each_row() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 21, 16, dtype=torch.float64)
    want = dense(x, x, x, [seen_in_documents(lengths) for lengths in LENGTHS])
    with rs.ContextParallel(None, rs.documents(LENGTHS)):
        out, aux = flex_attention(x, x, x, return_aux=AuxRequest(lse=True))
    assert_close(out, want, rtol=1e-12, atol=1e-12)
    scores = x @ x.mT / 4
    seen = torch.stack([seen_in_documents(lengths) for lengths in LENGTHS])[:, None]
    assert_close(aux.lse, scores.masked_fill(~seen, -torch.inf).logsumexp(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("world_of_one")
def test_positions_in_a_tree_of_each_row() -> None:
    """Two rows of three tokens: a chain, and a root with two children. The trees lie end to end, as the rows do."""
    rows = [rs.causal(3), rs.tree([1, 1, 1], [-1, 0, 0])]
    cp = rs.ContextParallel(None, rs.per_row(rows), expect_attention=False)
    found = cp.positions(tree=([3, 1, 1, 1], [-1, -1, 1, 1]))
    assert found.tolist() == [[0, 1, 2], [0, 1, 1]]


def test_a_batch_equals_only_a_batch_and_is_causal_by_row() -> None:
    batch = rs.per_row([rs.causal(3)])
    assert batch != rs.causal(3)
    assert rs.documents([[2], [2]]) != rs.documents([2, 2])
    assert rs.per_row([rs.causal(3, 5, align="start")] * 2).is_causal
    assert not rs.per_row([rs.causal(6, 4, align="start"), rs.full(6, 4)]).is_causal


@pytest.mark.usefixtures("world_of_one")
def test_written_out_attention_is_found_under_masks_of_rows() -> None:
    q = torch.zeros(2, 1, 5, 4)
    cp = rs.ContextParallel(None, rs.documents([[2, 3], [5]]))
    with rs.strict(), pytest.raises(rs.UnplannedAttention, match="matmul and softmax"), cp:
        (q @ q.mT).softmax(-1) @ q


@pytest.mark.usefixtures("world_of_one")
def test_a_shard_of_another_layout_is_refused() -> None:
    mask = rs.documents([[2, 3], [5]])
    one = rs.ContextParallel(None, mask, layout=[[(0, 5)]])
    other = rs.ContextParallel(None, mask, layout=[[(3, 5), (0, 3)]])
    shard = one.shard(torch.arange(10).view(2, 5), dim=1)
    assert torch.equal(one.unshard(shard, dim=1), torch.arange(10).view(2, 5))
    with pytest.raises(rs.InputError, match="another layout"):
        other.unshard(shard, dim=1)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_local_world_refuses_rows_laid_end_to_end(rows: int) -> None:
    """Plans know the rows as one sequence, but tensors have a batch dim."""
    mask, world = rs.documents(LENGTHS[:rows]), rs.LocalWorld(2)
    plans = world.plans(mask)
    x = torch.randn(rows, 2, 21, 4)
    assert world.run(plans, x, x, x).out.shape == x.shape
    laid = x.transpose(0, 1).flatten(1, 2)[None].expand(2, -1, -1, -1)
    for q in (laid, laid[:1]) if rows > 1 else (laid,):
        with pytest.raises(rs.InputError, match=rf"a batch of {rows} rows; q is \({len(q)}, 2, {rows * 21}, 4\), not"):
            world.run(plans, q, q, q)
