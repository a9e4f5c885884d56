"""Rows that share prefixes, folded into a tree: the loss and every gradient of a model against the separate rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import ringspan as rs
from ringspan.frontends.token_data import TokenData
from ringspan.testing.assertions import assert_close
from tests.conftest import Pools
from tests.frontends.small_model import REACH, model, rotation

Rows = list[list[int]]
Found = tuple[Tensor, dict[str, Tensor]]

# Few different tokens, so that prefixes are shared often.
ROWS = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=6)
WEIGHTED = ROWS.filter(lambda rows: any(len(row) > 1 for row in rows)).flatmap(
    lambda rows: st.tuples(
        st.just(rows), st.none() | st.tuples(*(st.lists(st.integers(1, 9), min_size=len(r), max_size=len(r)) for r in rows))
    )
)


def gradients(whole: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def separate(rows: Rows, weights: Any) -> Found:
    """Every row by itself in plain PyTorch: the weighted mean loss of all tokens but the first of each row."""
    whole = model()
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for i, row in enumerate(rows):
        if len(row) < 2:
            continue
        q, k = torch.arange(len(row))[:, None], torch.arange(len(row))
        whole.layers[0].seen = k <= q
        whole.layers[1].seen = (k <= q) & (k >= q - REACH)
        logits = whole(torch.tensor([row]), *rotation(torch.arange(len(row))))
        weight = torch.ones(len(row)) if weights is None else torch.tensor(weights[i])
        losses = F.cross_entropy(logits[0, :-1], torch.tensor(row[1:]), reduction="none")
        total, count = total + (losses * weight[1:]).sum(), count + float(weight[1:].sum())
    loss = total / count
    loss.backward()
    return loss.detach(), gradients(whole)


class OnRanksOf(TorchFunctionMode):
    """Compute SDPA on the ranks of a LocalWorld."""

    def __init__(self, world: int, mask: rs.Mask) -> None:
        super().__init__()
        self.world, self.mask = rs.LocalWorld(world), mask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.world.attention(*args, mask=self.mask, strategy="exchange", layout="zigzag")


def folded_in_local_world(world: int, rows: Rows, weights: Any) -> Found:
    whole, trie = model(), rs.fold(rows)
    whole.layers[0].block, whole.layers[1].block = OnRanksOf(world, trie.mask()), OnRanksOf(world, trie.mask(left=REACH))
    targets = rs.shift_labels(tree=trie, weights=weights)
    logits = whole(trie.tokens[None], *rotation(trie.positions()))
    losses = F.cross_entropy(logits[0, targets.token], targets.target, reduction="none")
    loss = (losses * targets.weight).sum() / targets.weight.sum().double()
    loss.backward()
    return loss.detach(), gradients(whole)


def folded_over_processes(rank: int, cases: list[tuple[Rows, Any]]) -> list[Found]:
    found = []
    for rows, weights in cases:
        whole, trie = model(), rs.fold(rows)
        cp = rs.ContextParallel(None, trie.mask())
        whole.layers[0].block, whole.layers[1].block = cp, cp.with_mask(trie.mask(left=REACH))
        targets = cp.targets(rs.shift_labels(tree=trie, weights=weights))
        logits = whole(cp.shard(trie.tokens[None], dim=1), *rotation(cp.positions(tree=trie)))
        losses = F.cross_entropy(logits[0, targets.token], targets.target, reduction="none")
        loss = cp.mean(losses, targets.weight)
        loss.backward()
        cp.sum_gradients(whole.parameters())
        found.append((loss.detach(), gradients(whole)))
    return found


def compare(got: Found, want: Found) -> None:
    assert_close(got[0], want[0], rtol=1e-12, atol=1e-12)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert_close(got[1][name], grad, rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(WEIGHTED, st.integers(1, 4))
def test_loss_and_gradients_are_those_of_the_separate_rows(case: tuple[Rows, Any], world: int) -> None:
    compare(folded_in_local_world(world, *case), separate(*case))


@pytest.mark.parametrize("world", [2, 4])
def test_loss_and_gradients_over_processes(pools: Pools, world: int) -> None:
    generator = torch.Generator().manual_seed(world)

    def draw(high: int, low: int = 0) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    cases: list[tuple[Rows, Any]] = []
    for i in range(6):
        rows = [[draw(3) for _ in range(draw(12, 2))] for _ in range(draw(7, 1))]
        cases.append((rows, None if i % 2 else [[draw(9, 1) for _ in row] for row in rows]))
    for found in pools(world).run(folded_over_processes, cases):
        for case, got in zip(cases, found, strict=True):
            compare(got, separate(*case))


@given(ROWS)
def test_a_trie_holds_every_row_and_no_prefix_twice(rows: Rows) -> None:
    trie = rs.fold(rows)
    assert [trie.tokens[trie.index(i)].tolist() for i in range(len(rows))] == rows
    assert [x.tolist() for x in trie.unfold(trie.tokens, dim=0)] == rows
    prefixes = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert len(trie) == len(prefixes)
    # Each token sees the tokens of its own prefix.
    dense = trie.mask().dense()
    seen = {tuple(trie.tokens[torch.from_numpy(row)].tolist()) for row in dense}
    assert seen == prefixes
    positions = alone(trie.mask()).positions(tree=(trie.lengths, trie.parents))
    assert positions.tolist() == trie.positions().tolist() == (dense.sum(1) - 1).tolist()


@given(ROWS)
def test_targets_are_the_pairs_of_all_rows(rows: Rows) -> None:
    trie = rs.fold(rows)
    targets = rs.shift_labels(tree=trie)
    want: dict[tuple[int, int], int] = {}
    for i, row in enumerate(rows):
        index = trie.index(i).tolist()
        for token, target in zip(index, row[1:], strict=False):
            want[token, target] = want.get((token, target), 0) + 1
    got = {(t, x): w for t, x, w in zip(*(part.tolist() for part in targets), strict=True)}
    assert got == want
    assert len(targets.token) == len(want)


def test_the_saving_of_a_grpo_batch() -> None:
    """4 prompts of 32,768 tokens with 16 answers of 4,096 each."""
    lengths = [32_768, *[4_096] * 16] * 4
    parents = [p for prompt in range(4) for p in (-1, *[17 * prompt] * 16)]
    mask, rows = rs.tree(lengths, parents), rs.documents([32_768 + 4_096] * 64)
    assert len(mask) == 68
    assert rows.lengths[0] / mask.lengths[0] == 6.0
    assert rows.area / mask.area == pytest.approx(3.86, abs=0.005)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rs.fold([[1, 2], [1.5]]), r"rows\[1\] must be a list of token ids; got float64"),
        (lambda: rs.fold([[[1]]]), r"rows\[0\] must be a list of token ids; got int64 of shape \(1, 1\)"),
        (lambda: rs.shift_labels(tree=([1], [-1])), "tree must be a Trie, as rs.fold"),  # type: ignore[call-overload]
        (lambda: rs.shift_labels(torch.arange(3), tree=rs.fold([[1]])), "give neither tokens nor documents"),  # type: ignore[call-overload]
        (lambda: rs.shift_labels(torch.arange(3), weights=[]), r"weights are for shift_labels\(tree="),  # type: ignore[call-overload]
        (lambda: rs.shift_labels(tree=rs.fold([[1, 2]]), weights=[[1.0]]), "weights must have one number for each token"),
        (lambda: rs.fold([[1, 2]]).unfold(torch.zeros(3), dim=0), "does not have the 2 tokens of the tree on dim 0"),
        (
            lambda: alone(rs.causal(3)).positions(tree=([2, 1, 1], [-1, 0, 0])),
            "the tree has 4 tokens, but the plan's sequence has 3",
        ),
        (lambda: alone(rs.causal(4)).positions(tree=([2, 1, 1], [-1, 0, 0])), "lets tokens see other branches of this tree"),
        (lambda: alone(rs.causal(4)).positions(tree=7), "tree must be a Trie.*or a pair"),
        (lambda: alone(rs.causal(4)).positions(tree=([4], [-1]), documents=[4]), "documents= or tree=, not both"),
        (lambda: alone(rs.causal(2)).targets(rs.shift_labels(tree=rs.fold([[1, 2, 3, 4]]))), "the targets are of token 2"),
        (lambda: alone(rs.causal(2)).targets(torch.arange(2)), "targets must be those of rs.shift_labels"),  # type: ignore[arg-type]
        (lambda: chosen([-1, 0], [3, 4]), "the targets are of token -1, but the plan's sequence has 2"),
        (lambda: chosen([1, 0], [3]), r"tensors of one dim and one length; got \(2,\), \(1,\), \(2,\)"),
        (lambda: alone(rs.causal(2)).targets(rs.Targets([1], [3], [1])), "got list, list, list"),  # type: ignore[arg-type]
        (lambda: chosen([0.5, 1.0], [3, 4]), "token of targets must be integers, the numbers of tokens; got torch.float32"),
        (
            lambda: rs.shift_labels(tree=rs.fold([[1, 2]]), weights=3),
            "weights must be a list with the weights of each row; got int",
        ),  # type: ignore[call-overload]
        (lambda: rs.shift_labels(tree=rs.fold([[1, 2]]), weights=["ab"]), r"weights\[0\] must be a number for each token"),
        (
            lambda: rs.shift_labels(tree=rs.fold([[1, 2]]), weights=[torch.ones(2, requires_grad=True)]),
            r"weights\[0\] requires a gradient, but weights are constants",
        ),
        (lambda: rs.fold([[1], [2]]).index(5), "row must be a number of one of the 2 rows that were folded, from 0; got 5"),
        (lambda: rs.fold([[1], [2]]).index("a"), "row must be an integer, not 'a'"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(rs.RingspanError, match=message):
        call()


def chosen(token: list[float], target: list[int]) -> rs.Targets:
    targets = rs.Targets(torch.tensor(token), torch.tensor(target), torch.ones(len(token)))
    return alone(rs.causal(2)).targets(targets)


def alone(mask: rs.Mask) -> TokenData:
    """The methods of ContextParallel without a process group."""
    data = TokenData()
    data.plan = rs.plan(mask, world=1, rank=0)
    return data


def test_weights_keep_the_highest_precision_of_the_rows() -> None:
    """Not that of the first row. Half precision is summed in float32."""
    tree, small = rs.fold([[1, 2], [1, 3]]), 1 + 2.0**-40
    rows = [torch.ones(2), torch.tensor([1.0, small], dtype=torch.float64)]
    assert rs.shift_labels(tree=tree, weights=rows).weight.tolist() == [1.0, small]
    assert rs.shift_labels(tree=tree, weights=[[1, 2], [1.0, 0.5]]).weight.tolist() == [2.0, 0.5]
    halves = [torch.tensor([1.0, 0.1], dtype=torch.bfloat16)] * 2
    assert rs.shift_labels(tree=tree, weights=halves).weight.dtype == torch.float32
