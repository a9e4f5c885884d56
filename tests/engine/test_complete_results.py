"""Results that are sent complete: the same bits as in the dtype of the accumulators, in fewer bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.engine import AttentionConfig, attend_ranks, config_for, executor
from ringspan.kernels import OutputAccumulator
from ringspan.planner import Plan, bytes_moved
from ringspan.plans import Step, verify
from ringspan.plans.data import PHASES
from ringspan.transports import InProcessTransport
from tests.engine.test_half_precision import HalfPrecisionKernel
from tests.engine.test_kept_rows import MASKS, tensors

# Key heads on one rank each and on several, several runs of heads, ranks without heads, merges between nodes.
CASES = [
    ("ulysses", 4, 4, 4, "contiguous"),
    ("ulysses", 6, 3, 2, "zigzag"),
    ("ulysses", 10, 2, 3, "striped"),
    ("ulysses", 2, 1, 3, "zigzag"),
    ("hybrid(per_node=2)", 6, 3, 4, "zigzag"),
    ("hybrid(per_node=2, between='ring')", 4, 2, 4, "contiguous"),
]


def plans_of(mask: rs.Mask, strategy: str, heads: int, kv_heads: int, world: int, layout: str) -> list[Plan]:
    first = rs.plan(mask, world=world, strategy=strategy, layout=layout).for_heads(heads, kv_heads)
    return [first.at(rank) for rank in range(world)]


def accumulated(plan: Plan) -> Plan:
    """Return the plan with all results sent in the dtype of the accumulators."""

    def step(given: Step) -> Step:
        sends, recvs = (tuple(replace(t, complete=False) for t in side) for side in (given.sends, given.recvs))
        return replace(given, sends=sends, recvs=recvs)

    steps = {phase: tuple(map(step, plan.program.steps(phase))) for phase in PHASES}
    return replace(plan, program=replace(plan.program, **steps))


def results(plans: list[Plan], given: list[Tensor], *, half: bool) -> tuple[list[Tensor], int]:
    """Return out, lse and gradients, and the bytes that were sent."""
    *qkv, dout, dlse = given
    positions = [[torch.as_tensor(x) for x in (p.q_layout.positions(p.rank), p.kv_layout.positions(p.rank))] for p in plans]
    shards = [tuple(x.detach()[:, :, at[n > 0]].requires_grad_() for n, x in enumerate(qkv)) for at in positions]
    config: AttentionConfig = config_for(plans[0], qkv[0], qkv[2], 0.3, "cpu")
    if half:
        config = replace(config, kernel=HalfPrecisionKernel(one_by_one=True))  # type: ignore[arg-type]
    transport = InProcessTransport(len(plans))
    found = attend_ranks(plans, shards, config, transport.run)  # type: ignore[arg-type]
    ends = [x for r in found for x in (r.out, r.lse)]
    upstream = [x[:, :, at] for at, _ in positions for x in (dout, dlse)]
    grads = torch.autograd.grad(ends, [x for shard in shards for x in shard], upstream)
    return [*(x.detach() for x in ends), *grads], sum(t.sent for t in transport.traffic)


@pytest.mark.parametrize("half", [False, True], ids=["full precision", "kernels of half precision"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("strategy", "heads", "kv_heads", "world", "layout"), CASES)
@pytest.mark.parametrize("name", ["documents", "rows without keys"])
def test_the_bits_are_those_of_accumulated_results(
    name: str, strategy: str, heads: int, kv_heads: int, world: int, layout: str, dtype: torch.dtype, half: bool
) -> None:
    given = tensors(MASKS[name], heads, kv_heads, dtype)
    plans = plans_of(MASKS[name], strategy, heads, kv_heads, world, layout)
    assert any(t.complete for p in plans for t in p.transfers("forward", "recvs"))
    found, sent = results(plans, given, half=half)
    expected, sent_accumulated = results([accumulated(p) for p in plans], given, half=half)
    for x, y in zip(found, expected, strict=True):
        assert not x.isnan().any()
        if half and strategy.startswith("hybrid"):  # the kernel's lse, which merges use, is float32, and float64 elsewhere
            torch.testing.assert_close(x, y, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
        else:
            assert torch.equal(x, y)
    if dtype in (torch.bfloat16, torch.float16):
        assert sent < sent_accumulated


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("strategy", "heads", "kv_heads", "world", "layout"), CASES)
def test_the_bytes_are_those_of_the_plan(strategy: str, heads: int, kv_heads: int, world: int, layout: str, dtype: str) -> None:
    plans = plans_of(MASKS["documents"], strategy, heads, kv_heads, world, layout)
    verify(plans)
    shape = rs.Shape(heads=heads, kv_heads=kv_heads, head_dim=8, v_dim=6, batch=2, dtype=dtype)
    planned = sum(bytes_moved(p, shape, phase)[0] for p in plans for phase in PHASES)
    _, sent = results(plans, tensors(MASKS["documents"], heads, kv_heads, getattr(torch, dtype)), half=False)
    assert sent == planned


def test_gradients_of_a_key_head_on_several_ranks_are_not_complete() -> None:
    """4 query heads and 1 key head on 4 ranks: each has a part of the gradient, and out and dq are complete."""
    (plan, *_) = plans_of(MASKS["causal"], "ulysses", 4, 1, 4, "contiguous")
    found = {(t.what, t.complete) for phase in PHASES for t in plan.transfers(phase, "recvs")}
    assert {x for x in found if x[0] in ("out", "dq", "dkv")} == {("out", True), ("dq", True), ("dkv", False)}
    assert plan.program.own_results_complete == {"out", "dq"}


def test_own_results_of_which_tasks_compute_a_part_are_accumulated() -> None:
    """Two halves of a batch: the results of one are complete, those of the other are merged on their owner."""
    parts = [
        rs.plan(rs.causal(16), world=2, strategy="ulysses(heads=4, kv_heads=2)", layout="contiguous"),
        rs.plan(rs.causal(16), world=2, strategy="exchange(stages=1)", layout="contiguous"),
    ]
    program = rs.interleave(*parts).program
    assert program.sent_complete
    assert program.own_results_complete == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients_that_stay_on_their_rank_are_not_rounded_to_dkv_dtype(dtype: torch.dtype) -> None:
    """4 heads on 4 ranks: rank r computes head r. Messages of float16 would not become smaller in bfloat16."""
    given, found, sent = tensors(rs.causal(32), 4, 4, dtype), [], []
    for dkv_dtype in ("float32", "bfloat16"):
        first = rs.plan(rs.causal(32), world=4, strategy="ulysses", layout="contiguous", dkv_dtype=dkv_dtype)
        plans = [first.for_heads(4, 4).at(rank) for rank in range(4)]
        values, count = results(plans, given, half=False)
        found.append([values[8 + 3 * rank + n][:, rank] for rank in range(4) for n in (1, 2)])
        sent.append(count)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert (sent[1] < sent[0]) == (dtype == torch.float32)


def test_own_results_are_written_in_the_dtype_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of the accumulation dtype would be twice as large, and converted at the end."""
    dtypes = []

    class Noting(OutputAccumulator):
        def finish(self) -> tuple[Tensor, ...]:
            found = super().finish()
            dtypes.append((found[0].dtype, found[1].dtype))
            return found

    monkeypatch.setattr(executor, "OutputAccumulator", Noting)
    plans = plans_of(MASKS["causal"], "ulysses(keep=False)", 4, 4, 2, "contiguous")
    results(plans, tensors(MASKS["causal"], 4, 4, torch.bfloat16), half=True)
    assert dtypes == [(torch.bfloat16, torch.float32)] * 2


def test_a_result_of_the_kernel_is_sent_from_where_it_is() -> None:
    """dq of the kernel has the dtype of the message: no copy of it is packed."""
    plans = plans_of(rs.causal(32), "ulysses", 4, 4, 2, "contiguous")
    returned, sent = [], []

    class Kernel(HalfPrecisionKernel):
        def attend_backward(self, *args: object, **options: object):  # type: ignore[no-untyped-def]
            for grads in super().attend_backward(*args, **options):  # type: ignore[arg-type]
                returned.append(grads.dq_BHSD.untyped_storage().data_ptr())
                yield grads

    class Transport(InProcessTransport):
        def run(self, generators, description=None):  # type: ignore[no-untyped-def]
            return super().run([noting(g) for g in generators], description)

    def noting(generator):  # type: ignore[no-untyped-def]
        answer = None
        while True:
            try:
                request = generator.send(answer)
            except StopIteration as end:
                return end.value
            sent.extend(x.untyped_storage().data_ptr() for _, x in getattr(request, "sends", ()))
            answer = yield request

    *qkv, dout, _ = tensors(rs.causal(32), 4, 4, torch.bfloat16)
    qkv = [x[:1] for x in qkv]  # rows of one batch are contiguous in the result of the kernel
    config = replace(config_for(plans[0], qkv[0], qkv[2], 0.3, "cpu"), kernel=Kernel(one_by_one=False))  # type: ignore[arg-type]
    shards = [tuple(x.detach()[:, :, 16 * r : 16 * r + 16].requires_grad_() for x in qkv) for r in range(2)]
    found = attend_ranks(plans, shards, config, Transport(2).run)  # type: ignore[arg-type]
    torch.autograd.grad([r.out for r in found], [x for s in shards for x in s], [dout[:1, :, :16], dout[:1, :, 16:]])
    assert len(returned) == 2
    assert set(returned) <= set(sent)
