"""Bytes: of plans, against the formulas of the design page, and in the output of ``explain``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ringspan as rs
from ringspan.layouts import LAYOUTS
from ringspan.planner import Plan, bytes_moved, peak_bytes
from ringspan.plans.data import PHASES, Phase
from tests.plans.examples import MASKS, STRATEGIES, all_plans, layouts_for

SHAPE = rs.Shape(heads=8, kv_heads=2, head_dim=16, v_dim=12, batch=3, dtype="bfloat16")
KV_ROW = 3 * 2 * (16 + 12) * 2
DKV_ROW = 3 * 2 * (16 + 12) * 4
Q_ROW = 3 * 8 * 16 * 2
OUT_ROW = 3 * 8 * (12 + 1) * 4
SAVED_ROW = 3 * 8 * ((16 + 12 + 12) * 2 + (1 + 1) * 4 + 8)
DOUT_ROW = 3 * 8 * (12 * 2 + 1 * 4 + 4)
DQ_ROW = 3 * 8 * 16 * 4
# Of complete results.
WHOLE_OUT_ROW, WHOLE_DQ_ROW, WHOLE_DKV_ROW = DOUT_ROW, 3 * 8 * 16 * 2, KV_ROW


def received(plans: list[Plan], phase: Phase = "forward") -> int:
    return sum(bytes_moved(plan, SHAPE, phase)[1] for plan in plans)


# -- bytes of a row ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "phase", "dtype", "expected"),
    [
        ("kv", "forward", "bfloat16", 3 * 2 * (16 + 12) * 2),
        ("kv", "backward", "float64", 3 * 2 * (16 + 12) * 8),
        ("dkv", "backward", "float16", 3 * 2 * (16 + 12) * 4),
        ("dkv", "backward", "float64", 3 * 2 * (16 + 12) * 8),
        ("q", "forward", "bfloat16", 3 * 8 * 16 * 2),
        ("q", "backward", "bfloat16", 3 * 8 * ((16 + 12 + 12) * 2 + (1 + 1) * 4 + 8)),  # the 8 make it a multiple of 16
        ("q", "backward", "float32", 3 * 8 * ((16 + 12 + 12 + 1 + 1) * 4 + 8)),
        ("q", "backward", "float64", 3 * 8 * (16 + 12 + 12 + 1 + 1) * 8),
        ("dout", "backward", "bfloat16", 3 * 8 * (12 * 2 + 1 * 4 + 4)),  # the last 4 make it a multiple of 16
        ("dout", "backward", "float32", 3 * 8 * ((12 + 1) * 4 + 12)),
        ("dout", "backward", "float64", 3 * 8 * ((12 + 1) * 8 + 8)),
        ("out", "forward", "float32", 3 * 8 * (12 + 1) * 4),
        ("dq", "backward", "bfloat16", 3 * 8 * 16 * 4),
    ],
)
def test_row_bytes(what: str, phase: Phase, dtype: str, expected: int) -> None:
    shape = rs.Shape(heads=8, kv_heads=2, head_dim=16, v_dim=12, batch=3, dtype=dtype)
    assert shape.row_bytes(what, phase) == expected  # type: ignore[arg-type]
    assert shape.row_bytes(what, phase, heads=1) * (2 if "kv" in what else 8) == expected  # type: ignore[arg-type]


def test_v_dim_defaults_to_head_dim() -> None:
    same = rs.Shape(heads=1, kv_heads=1, head_dim=64)
    assert same.row_bytes("kv", "forward") == 64 * 2 * 2


def test_unsupported_dtype_is_refused() -> None:
    with pytest.raises(rs.InputError, match="float16, bfloat16, float32, float64; got 'int8': give its name"):
        rs.Shape(heads=1, kv_heads=1, head_dim=8, dtype="int8")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_heads": 3}, "4 query heads cannot share 3 key heads evenly: give a multiple of the key heads"),
        ({"kv_heads": 0}, "kv_heads must be at least 1, not 0"),
        ({"heads": -4}, "heads must be at least 0, not -4"),
        ({"head_dim": 0}, "head_dim must be at least 1, not 0"),
        ({"v_dim": 0}, "v_dim must be at least 1, not 0"),
        ({"v_dim": -3}, "v_dim must be at least 1, not -3"),
        ({"v_dim": "x"}, "v_dim must be an integer, not 'x'"),
        ({"batch": -1}, "batch must be at least 0, not -1"),
        ({"heads": "4"}, "heads must be an integer, not '4'"),
        ({"head_dim": 8.0}, r"head_dim must be an integer, not 8\.0"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(rs.InputError, match=message):
        rs.Shape(**{"heads": 4, "kv_heads": 2, "head_dim": 8, **fields})


@pytest.mark.parametrize(
    "ask", [lambda plan: plan.explain("x"), lambda plan: plan.cost("h200x8", "x")], ids=["explain", "cost"]
)
def test_an_argument_that_is_no_shape_is_refused(ask: Callable[[rs.Plan], object]) -> None:
    with pytest.raises(rs.PlanError, match=r"shape must be a ringspan\.Shape, as Shape\(heads=32, .* got 'x'"):
        ask(rs.plan(rs.causal(8), world=2))


# -- bytes of plans ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MASKS)
def test_what_is_sent_is_received(name: str, strategy: str) -> None:
    for layout in layouts_for(MASKS[name]):
        for phase in PHASES:
            moved = [bytes_moved(plan, SHAPE, phase) for plan in all_plans(MASKS[name], 5, strategy, layout)]
            assert sum(sent for sent, _ in moved) == sum(got for _, got in moved)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_gather_is_every_key_to_every_other_rank(world: int) -> None:
    plans = all_plans(rs.causal(64), world, "gather", "zigzag")
    assert received(plans) == 64 * (world - 1) * KV_ROW
    assert received(plans, "backward") == 64 * (world - 1) * (KV_ROW + DKV_ROW)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_ring_in_which_every_rank_sees_all_keys_moves_as_much_as_gather(layout: str, world: int) -> None:
    plans = all_plans(rs.full(64), world, "ring", layout)
    assert received(plans) == 64 * (world - 1) * KV_ROW
    assert received(plans, "backward") == 64 * (world - 1) * (KV_ROW + DKV_ROW)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_exchange_is_three_quarters_of_gather_for_causal_zigzag(world: int) -> None:
    """Rank r owns the chunks r and 2·world-1-r, so it sees all chunks but r of them: 2·world-2-r to fetch. Of all,
    3/4."""
    gather, exchange = (received(all_plans(rs.causal(64), world, strategy, "zigzag")) for strategy in ("gather", "exchange"))
    assert exchange / gather == 0.75


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(("layout", "share"), [("zigzag", 3 / 4), ("contiguous", 1 / 2)])
def test_pass_q_moves_as_many_queries_as_exchange_moves_keys_for_causal(layout: str, share: float, world: int) -> None:
    """Zigzag: rank r's late chunk sees keys of every rank, its early one those of r ranks: 3W(W-1)/2 chunks of N/2W
    tokens."""
    plans = all_plans(rs.causal(64), world, "pass_q", layout)
    queries = share * 64 * (world - 1)
    assert received(plans) == queries * (Q_ROW + OUT_ROW)
    assert received(plans, "backward") == queries * (SAVED_ROW + DQ_ROW)


def test_pass_q_is_for_few_queries() -> None:
    """16 queries over 4096 keys: 16 rows to each rank, where the keys would be 256 times as many."""
    mask = rs.full(16, 4096)
    assert received(all_plans(mask, 8, "pass_q", "contiguous")) == 16 * 7 * (Q_ROW + OUT_ROW)
    assert received(all_plans(mask, 8, "exchange", "contiguous")) == 4096 * 7 * KV_ROW


@pytest.mark.parametrize(("world", "key_heads"), [(2, 2), (4, 4), (8, 8), (3, 4), (16, 8)])
def test_ulysses_is_every_token_once_but_for_the_share_that_stays(world: int, key_heads: int) -> None:
    """Every head of every token goes to one rank, and 1/world of them are there already. A key head goes to as many
    ranks as work on its queries: 2 key heads on 4 ranks are 4 that are sent; 8 query heads on 3 ranks are 3 3 2, and
    split both groups. The gradients of such key heads are sums of several ranks. All other results are complete."""
    plans, again = (all_plans(rs.causal(48), world, f"ulysses(keep={keep})", "zigzag") for keep in (True, False))
    moved = 48 * (world - 1) / world
    dkv = WHOLE_DKV_ROW if key_heads == 2 else DKV_ROW
    assert received(plans) == received(again) == moved * (Q_ROW + WHOLE_OUT_ROW + key_heads / 2 * KV_ROW)
    assert received(plans, "backward") == moved * (DOUT_ROW + WHOLE_DQ_ROW + key_heads / 2 * dkv)
    assert received(again, "backward") == moved * (SAVED_ROW + WHOLE_DQ_ROW + key_heads / 2 * (KV_ROW + dkv))


def rows_between_nodes(plans: list[Plan], per_node: int, what: str, phase: Phase = "forward") -> int:
    crossing = [t for p in plans for t in p.transfers(phase, "recvs") if t.peer // per_node != p.rank // per_node]
    return sum(t.count for t in crossing if t.what == what)


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (8, 2), (8, 4), (16, 4)])
@pytest.mark.parametrize(("layout", "share"), [("zigzag", 3 / 4), ("contiguous", 1 / 2)])
def test_hierarchical_crosses_as_if_nodes_were_ranks(layout: str, share: float, world: int, per_node: int) -> None:
    """Causal: once for each node that sees a key, where exchange crosses once for each rank. So do the gradients."""
    once, each = (all_plans(rs.causal(64), world, s, layout) for s in (f"hierarchical(per_node={per_node})", "exchange"))
    nodes = world // per_node
    assert rows_between_nodes(once, per_node, "kv") == share * 64 * (nodes - 1)
    assert rows_between_nodes(once, per_node, "dkv", "backward") == share * 64 * (nodes - 1)
    assert rows_between_nodes(each, per_node, "kv") == share * 64 * (nodes - 1) * per_node
    assert received(once) == received(each)  # what is sent to a node once is forwarded within it


@pytest.mark.parametrize(
    ("world", "per_node", "key_heads"), [(4, 2, 2), (8, 2, 2), (8, 4, 4), (16, 4, 4), (4, 4, 4), (4, 1, 2)]
)
@pytest.mark.parametrize(("between", "share"), [("exchange", 3 / 4), ("ring", 1)])
def test_hybrid_is_ulysses_in_a_node_and_the_other_between(
    between: str, share: float, world: int, per_node: int, key_heads: int
) -> None:
    """Tokens for heads within the node; then keys as if the nodes were ranks, each key head as often as it is held."""
    strategy = f"hybrid(per_node={per_node}, between={between!r}, keep="
    plans, again = (all_plans(rs.causal(64), world, f"{strategy}{keep})", "zigzag") for keep in (True, False))
    within, crossing = 64 * (per_node - 1) / per_node, share * 64 * (world // per_node - 1)
    keys = key_heads / 2
    between_nodes = crossing * keys * KV_ROW
    dkv = WHOLE_DKV_ROW if key_heads == 2 else DKV_ROW
    assert received(plans) == received(again) == within * (Q_ROW + WHOLE_OUT_ROW + keys * KV_ROW) + between_nodes
    between_nodes += crossing * keys * DKV_ROW
    assert received(plans, "backward") == within * (DOUT_ROW + WHOLE_DQ_ROW + keys * dkv) + between_nodes
    assert received(again, "backward") == within * (SAVED_ROW + WHOLE_DQ_ROW + keys * (KV_ROW + dkv)) + between_nodes


@pytest.mark.parametrize("seed", range(3))
def test_64_documents_on_8_ranks(seed: int) -> None:
    """65,536 tokens: the best layout has exchange move at most 15% of what gather moves."""
    cuts = np.sort(np.random.default_rng(seed).choice(65_535, size=63, replace=False) + 1)
    mask = rs.documents(np.diff([0, *cuts.tolist(), 65_536]))
    gather = received(all_plans(mask, 8, "gather", "contiguous"))
    share = {layout: received(all_plans(mask, 8, "exchange", layout)) / gather for layout in LAYOUTS}
    assert gather == 7 * 65_536 * KV_ROW
    assert min(share.values()) <= 0.15, share
    assert share["contiguous"] <= 0.03, share


def test_a_ring_stops_early_for_a_window_on_a_contiguous_layout() -> None:
    """8 ranks with 128 tokens each: a window of 128 needs one hop of seven."""
    mask = rs.causal(1024) & rs.window(left=128)
    windowed, everything = (received(all_plans(m, 8, "ring", "contiguous")) for m in (mask, rs.full(1024)))
    assert windowed == 7 * 128 * KV_ROW  # no rank after the last sees its block
    assert everything == 7 * 8 * 128 * KV_ROW


# -- explain -----------------------------------------------------------------------------------------------------------

STEP = re.compile(r"^step (\d+) +([\d,]+) +([\d,]+) +([\d,]+) +(\d+) +([\d,]+) *(.*)$")
TOTAL = re.compile(r"^total +([\d,]+) +([\d,]+) +([\d,]+) +(\d+) +peak buffers ([\d,]+) bytes$")


def numbers(groups: tuple[str, ...]) -> list[int]:
    return [int(text.replace(",", "")) for text in groups]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["causal", "documents", "cross", "nothing"])
def test_explain_adds_up(name: str, strategy: str) -> None:
    for plan in all_plans(MASKS[name], 4, strategy, "zigzag"):
        text = plan.explain(SHAPE)
        forward, backward = text.split("\nbackward ")
        for phase, part in (("forward", forward), ("backward", backward)):
            rows = [numbers(match.groups()[1:6]) for line in part.splitlines() if (match := STEP.match(line))]
            steps, buffers = [row[:4] for row in rows], [row[4] for row in rows]
            (total,) = [numbers(match.groups()) for line in part.splitlines() if (match := TOTAL.match(line))]
            assert len(steps) == len(plan.program.steps(phase))  # type: ignore[arg-type]
            assert total[:4] == [sum(column) for column in zip(*steps, strict=True)]
            assert tuple(total[:2]) == bytes_moved(plan, SHAPE, phase)  # type: ignore[arg-type]
            assert total[2] == plan.for_heads(8, 2).area
            assert total[4] == max(buffers) == peak_bytes(plan, SHAPE, phase)  # type: ignore[arg-type]


def test_explain_says_what_was_chosen_and_why() -> None:
    plan = rs.plan(rs.documents([5, 11]) & rs.window(left=3), world=2, rank=1)
    text = plan.explain()
    assert f"plan {plan.digest}: rank 1 of 2" in text
    assert "\n  choice    " + "\n            ".join(plan.notes) + "\n" in text
    assert "documents(2 over 16 tokens) & window(left=3): 16 × 16, area 52, 2 bands" in text
    assert "32 query heads, 8 key heads, head dim 128, bfloat16 (an example; explain(shape) is about yours)" in text
    assert "8 queries, 8 keys here; balance 1.231" in text  # 20 and 32 pairs
    assert "work      1.231 × the mean of all ranks" in text


def test_explain_with_a_shape() -> None:
    text = rs.plan(rs.causal(16), world=2).explain(SHAPE)
    assert "batch 3, 8 query heads, 2 key heads, head dim 16/12, bfloat16\n" in text


def test_explain_names_the_peers() -> None:
    near = rs.plan(rs.full(16), world=4, rank=1, strategy="ring", layout="contiguous").explain()
    assert "kv → rank 2; kv ← rank 0" in near
    far = rs.plan(rs.full(16), world=8, rank=1, strategy="gather", layout="contiguous").explain()
    assert "kv → 7 ranks; kv ← 7 ranks" in far
    to_itself = rs.plan(rs.full(16), world=4, rank=1, strategy="ulysses", layout="contiguous").explain()
    assert "q → rank 0 2 3; kv → rank 0 2 3; q ← rank 0 2 3; kv ← rank 0 2 3" in to_itself
    assert "work      1.000 × the mean of all ranks; 8 of 32 query heads here" in to_itself
    assert "dout → rank 0 2 3; dout ← rank 0 2 3\n" in to_itself
    kept = 16 * (8 * (128 * 2 + 128 * 2 + 4) + 2 * (128 + 128) * 2)  # q, out and lse of 8 heads, k and v of 2
    assert f"kept for the backward pass, in place of own rows: {kept:,} bytes\n" in to_itself
    both = rs.interleave(*(rs.plan(rs.full(16), world=4, strategy=name, layout="contiguous") for name in ("ulysses", "ring")))
    assert "kept for the backward pass, besides own rows: " in both.explain()
    assert "kept for" not in near
    keys = rs.plan(rs.full(8, 16), world=4, strategy="ring", layout="zigzag").explain()
    assert "  choice    layout zigzag: as given\n            kv layout zigzag: as given\n" in keys
