"""``dkv_dtype="bfloat16"``: gradients of keys and values are rounded in messages, and nowhere else."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.planner import Plan, bytes_moved
from ringspan.testing.workers import Pool

WORLD, TOKENS = 4, 50
MASK = rs.documents([13, 30, 7])
SHAPE = rs.Shape(heads=4, kv_heads=2, head_dim=8, batch=1, dtype="float32")
STRATEGIES = (
    "ring",
    "gather",
    "exchange",
    "pass_q",
    "ulysses(heads=4, kv_heads=2)",
    "hybrid(per_node=2, heads=4, kv_heads=2)",
    "hierarchical(per_node=2)",
)
BFLOAT16_ERROR = 2.0**-8  # of one rounding; several are added, of numbers that are smaller than the sum


def results(world: rs.LocalWorld, strategy: str, dkv_dtype: str) -> list[Tensor]:
    """Return out and the gradients of q, k and v."""
    source = torch.Generator().manual_seed(0)
    sizes = ((4, TOKENS, 8), (2, TOKENS, 8), (2, TOKENS, 8))
    qkv = [torch.randn(1, *size, generator=source).requires_grad_() for size in sizes]
    out = world.attention(*qkv, mask=MASK, strategy=strategy, layout="zigzag", dkv_dtype=dkv_dtype)  # type: ignore[arg-type]
    return [out.detach(), *torch.autograd.grad(out, qkv, torch.randn(out.shape, generator=source))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_gradients_of_keys_and_values_are_rounded(strategy: str) -> None:
    exact, rounded = (results(rs.LocalWorld(WORLD), strategy, name) for name in ("float32", "bfloat16"))
    for a, b in zip(exact[:2], rounded[:2], strict=True):
        assert torch.equal(a, b)
    plans = rs.LocalWorld(WORLD).plans(MASK, strategy=strategy, layout="zigzag")
    moves = any(t.what == "dkv" and t.peer != plan.rank for plan in plans for t in plan.transfers("backward", "sends"))
    for a, b in zip(exact[2:], rounded[2:], strict=True):
        error = ((a - b).abs().max() / a.abs().max()).item()
        assert (0 < error < 2 * BFLOAT16_ERROR) if moves else error == 0, error


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_are_those_of_the_plan(strategy: str) -> None:
    moved = {}
    for name in ("float32", "bfloat16"):
        world = rs.LocalWorld(WORLD)
        results(world, strategy, name)
        plans = world.plans(MASK, strategy=strategy, layout="zigzag", dkv_dtype=name)  # type: ignore[arg-type]
        moved[name] = sum(bytes_moved(plan, SHAPE, "backward")[0] for plan in plans)
        forward = sum(bytes_moved(plan, SHAPE, "forward")[0] for plan in plans)
        assert sum(traffic.sent for traffic in world.traffic) == forward + moved[name]
    dkv = sum(
        SHAPE.transfer_bytes(t, "backward", plan.program)
        for plan in world.plans(MASK, strategy=strategy, layout="zigzag")
        for t in plan.transfers("backward", "sends")
        if t.what == "dkv" and t.peer != plan.rank
    )
    assert moved["float32"] - moved["bfloat16"] == dkv // 2


def test_one_rank_sends_nothing_and_rounds_nothing() -> None:
    for strategy in ("ring", "ulysses(heads=4, kv_heads=2)"):
        exact, rounded = (results(rs.LocalWorld(1), strategy, name) for name in ("float32", "bfloat16"))
        assert all(torch.equal(a, b) for a, b in zip(exact, rounded, strict=True))


def test_float64_is_refused() -> None:
    """bfloat16 has a smaller range than float64: gradients could become infinite."""
    q = torch.randn(1, 4, TOKENS, 8, dtype=torch.float64)
    world = rs.LocalWorld(WORLD)
    with pytest.raises(rs.InputError, match=r"dkv_dtype='bfloat16' would round .* of float64 tensors .* leave out dkv_dtype"):
        world.attention(q, q, q, mask=MASK, strategy="ring", dkv_dtype="bfloat16")
    world.attention(q, q, q, mask=MASK, strategy="ring", dkv_dtype="float32")


def test_it_belongs_to_the_plan() -> None:
    make = partial(rs.plan, MASK, world=WORLD, rank=1, strategy="ring", layout="zigzag")
    plan, rounded = make(), make(dkv_dtype="bfloat16")
    assert plan.digest != rounded.digest == make(dkv_dtype=torch.bfloat16).digest
    assert rounded.at(2).program.dkv_dtype == rounded.verify().program.dkv_dtype == "bfloat16"
    assert Plan.from_json(rounded.to_json()) == rounded
    assert "dkv_dtype" not in plan.to_json()
    assert "dkv is sent in bfloat16" in rounded.explain()
    assert rounded.cost("h200x8", SHAPE).seconds < plan.cost("h200x8", SHAPE).seconds
    with pytest.raises(rs.PlanError, match="dkv_dtype must be one of 'float32', 'bfloat16', not 'float8'"):
        make(dkv_dtype="float8")
    with pytest.raises(rs.PlanError, match="dkv_dtype: expected one of float32, bfloat16, got 'int8'"):
        Plan.from_json(rounded.to_json().replace('"bfloat16"', '"int8"'))


def test_a_plan_for_other_heads_keeps_it() -> None:
    plan = rs.plan(MASK, world=WORLD, strategy="ulysses(heads=8, kv_heads=8)", dkv_dtype="bfloat16")
    assert plan.for_heads(4, 2).program.dkv_dtype == "bfloat16"


def differ(rank: int) -> tuple[str, str]:
    """A job for two workers, of which the second rounds. Returns the error, and the dkv_dtype of derived objects."""
    cp = rs.ContextParallel(None, rs.causal(16), strategy="ring", dkv_dtype="bfloat16")
    others = [cp.with_mask(rs.full(16)), cp.prefetch(rs.causal(8)).result()]
    derived = {other.plan.program.dkv_dtype for other in others}
    cp = rs.ContextParallel(dist.new_group(), rs.causal(16), strategy="ring", dkv_dtype="bfloat16" if rank else "float32")
    q = cp.shard(torch.randn(1, 1, 16, 8), dim=2)
    try:
        cp.attention(q, q, q)
    except rs.PeerMismatch as error:
        return str(error), "".join(derived)
    return "", ""


def test_ranks_that_differ_raise_and_name_it() -> None:
    with Pool(2) as pool:
        for text, derived in pool.run(differ):
            assert "the ranks disagree on the dkv_dtype: rank 0 has float32, rank 1 has bfloat16. All ranks must" in text
            assert derived == "bfloat16"
