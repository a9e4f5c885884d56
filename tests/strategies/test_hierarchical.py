"""``hierarchical(pieces=…)``: rows that cross between nodes in pieces, and the work that hides their messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ringspan as rs
from ringspan.masks import Band
from ringspan.strategies import crossing_pieces, incoming_rows
from ringspan.strategies.crossing_pieces import make_pieces, spread, step_weights
from ringspan.strategies.nodes import Nodes
from ringspan.testing.assertions import assert_close
from tests.plans.dense_simulation import assert_exactly_once

MASKS = {
    "causal": rs.causal(40),
    "documents": rs.documents([13, 50, 3, 20]),
    "tree": rs.tree([3, 9, 4, 20], [-1, 0, 0, 2]),
    "cross": rs.full(20, 44),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split bands at any row: these sequences are shorter than a tile."""
    monkeypatch.setattr(crossing_pieces, "ROWS", 2)
    rs.clear_caches()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (5, 2), (8, 4)])
def test_every_number_of_pieces_is_correct(name: str, world: int, per_node: int) -> None:
    mask = MASKS[name]
    for layout in ("zigzag", "striped") if name == "cross" else ("zigzag", "balanced", "striped"):
        for pieces in (2, 5):
            strategy = f"hierarchical(per_node={per_node}, pieces={pieces})"
            plan = rs.plan(mask, world=world, rank=0, layout=layout, strategy=strategy).verify()
            assert_exactly_once([plan.at(rank) for rank in range(world)])


def test_results_and_gradients_equal_dense_attention() -> None:
    torch.manual_seed(0)
    mask, world = MASKS["documents"], rs.LocalWorld(6)
    q, k, v = (torch.randn(1, heads, 86, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    dense = torch.from_numpy(mask.dense())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    out = world.attention(q, k, v, mask=mask, strategy="hierarchical(per_node=3, pieces=3)", layout="balanced")
    assert_close(out, expected, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    for found, gradient in zip(torch.autograd.grad(out, (q, k, v), dout), wanted, strict=True):
        assert_close(found, gradient, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("strategy", ["hierarchical(per_node=2)", "hierarchical(per_node=2, pieces=3)"])
@pytest.mark.parametrize("world", [10, 11])
def test_a_document_whose_beginning_is_dealt_equals_dense_attention(
    world: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has a slice of the beginning and a chunk, and some ranges of a message are sent alone. The last node of
    11 ranks has one rank. All gradients, those of lse as well."""
    monkeypatch.setattr(incoming_rows, "LONG_RANGE", 5)
    torch.manual_seed(0)
    mask = rs.documents([240, *[40] * 18])
    plan = rs.plan(mask, world=world, rank=0, layout="balanced(per_node=2)", strategy=strategy).verify()
    owner = np.concatenate(
        [np.stack([plan.q_layout.positions(r), np.full(plan.q_layout.counts[r], r // 2)]) for r in range(world)], 1
    )
    nodes = owner[1][np.argsort(owner[0])][:240]
    assert len(np.flatnonzero(np.diff(nodes))) > len(np.unique(nodes))  # not one chunk for each node
    q, k, v = (torch.randn(1, heads, mask.lengths[0], 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5).masked_fill(~torch.from_numpy(mask.dense()), -torch.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1), scores.logsumexp(-1)
    given = {"mask": mask, "strategy": strategy, "layout": "balanced(per_node=2)", "return_lse": True}
    found = rs.LocalWorld(world).attention(q, k, v, **given)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-12, atol=1e-12)
    upstream = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)
    for a, b in zip(torch.autograd.grad(found, (q, k, v), upstream), wanted, strict=True):
        assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_each_piece_has_rows_that_many_ranks_see() -> None:
    """The first rows of a rank are in another piece on each node."""
    mask = rs.causal(48)
    layout = rs.plan(mask, world=6, rank=0, layout="contiguous").q_layout
    pieces = make_pieces(mask, layout, layout, Nodes(6, 2), 3)
    first = pieces.of(np.arange(6), np.zeros(6, dtype=np.int64))
    assert first[:4].tolist() == [0, 0, 1, 1]  # no row of the last node crosses
    assert pieces.of(np.full(8, 2), np.arange(8)).tolist() == [1, 1, 2, 2, 2, 0, 0, 0]


def test_pieces_send_each_row_across_once() -> None:
    """As many bytes as in one piece, between nodes and within them."""
    for layout in ("zigzag", "balanced"):
        sent = []
        for pieces in (1, 4):
            plan = rs.plan(rs.causal(64), world=8, rank=0, layout=layout, strategy=f"hierarchical(per_node=4, pieces={pieces})")
            rows = np.zeros((2, 2), dtype=np.int64)
            for rank in range(8):
                for i, phase in enumerate(("forward", "backward")):
                    for t in plan.at(rank).transfers(phase, "sends"):  # type: ignore[arg-type]
                        rows[i, int(t.peer // 4 != rank // 4)] += t.count
            sent.append(rows.tolist())
        assert sent[0] == sent[1]


def test_rows_that_do_not_cross_are_in_no_piece_of_their_own() -> None:
    """Two nodes. Documents 0 and 2 stay on their nodes, document 1 is on both: only its rows are split."""
    mask = rs.documents([16, 16, 16])
    layout = rs.plan(mask, world=4, rank=0, layout="contiguous").q_layout
    pieces = make_pieces(mask, layout, layout, Nodes(4, 2), 2)
    # Ranks 0 to 3 have tokens 0-12, 12-24, 24-36 and 36-48. Tokens 16 to 24, rows 4 to 12 of rank 1, cross.
    assert pieces.number == 2
    assert pieces.bounds[1].tolist() == [8]
    assert [list(of_rank) for of_rank in pieces.layout.spans] == [
        [(0, 12, 1)],
        [(12, 20, 1), (20, 24, 1)],
        [(24, 36, 1)],
        [(36, 48, 1)],
    ]


def test_own_work_fills_the_steps_evenly() -> None:
    own, near = (Band(0, 100, 0, 100, -99, 0),), (Band(0, 50, 0, 20, -49, 19),)
    busy = [0, 0, 2000, 2000, 0, 0]
    of_own, of_near = spread(own, near, busy, np.array([0.5, 0.5, 1, 1, 0.5, 0.5]), near_until=5)
    assert sum(b.area for part in of_own for b in part) == own[0].area
    assert sum(b.area for part in of_near for b in part) == near[0].area
    assert not of_near[0]
    assert not of_near[-1]  # they arrive in the first step, and are computed before the last
    total = [sum(b.area for b in (*x, *y)) + z for x, y, z in zip(of_own, of_near, busy, strict=True)]
    # 10,050 pairs: a quarter for each of the steps with received rows, an eighth for each of the others, to about two rows.
    assert total == pytest.approx([1256, 1256, 2512, 2512, 1256, 1256], abs=200)


def test_bands_without_work_and_steps_without_messages() -> None:
    assert spread((), (), [0, 0, 0], np.ones(3), near_until=3) == ([(), (), ()], [(), (), ()])
    own = (Band(0, 4, 0, 4, -3, 3),)
    of_own, _ = spread(own, (), [0, 10**6, 0], np.ones(3), near_until=3)
    assert sum(b.area for part in of_own for b in part) == 16


def test_steps_without_rows_of_other_nodes_have_as_much_work_as_the_rank_with_most_of_them() -> None:
    assert step_weights(3, 7, 0.6).tolist() == pytest.approx([0.5, 0.5, 1, 1, 1, 0.5, 0.5])
    assert step_weights(3, 5, 0.0).tolist() == [1, 1, 1, 1, 1]
    assert step_weights(2, 4, 1.0).tolist() == [0.1, 0.1, 1, 1]
    own = (Band(0, 100, 0, 100, -99, 0),)
    of_own, _ = spread(own, (), [0, 0, 2000, 2000, 0, 0], step_weights(2, 6, 0.5), near_until=6)
    total = [sum(b.area for b in x) + y for x, y in zip(of_own, [0, 0, 2000, 2000, 0, 0], strict=True)]
    assert total == pytest.approx([1131, 1131, 2262, 2262, 1131, 1131], abs=200)


def test_messages_of_a_long_document_are_hidden() -> None:
    """A document over several nodes: its keys cross, and in pieces more of that is hidden."""
    mask = rs.documents([98304, *[4096] * 8, *[8192] * 16])
    shape = rs.Shape(heads=64, kv_heads=8, head_dim=128)
    seconds = {}
    for pieces in (1, 6):
        strategy = f"hierarchical(per_node=4, pieces={pieces})"
        plan = rs.plan(mask, world=16, rank=0, layout="balanced(per_node=4)", strategy=strategy)
        seconds[pieces] = plan.cost("h200x4", shape).seconds
    assert seconds[6] < seconds[1]
