"""Rows that are kept for the backward pass: the same bits as without, in place of own rows, and fewer bytes."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.engine import attend_ranks, config_for
from ringspan.engine.kept_rows import kept_tensors
from ringspan.planner import Plan, bytes_moved
from ringspan.plans import Step, Transfer, verify
from ringspan.plans.data import PHASES
from ringspan.plans.memory import kept_bytes
from ringspan.transports import InProcessTransport, ProcessGroupTransport
from tests.conftest import Pools

N = 40
MASKS = {
    "causal": rs.causal(N),
    "documents": rs.documents([11, 5, 24]) & rs.window(left=6),
    "rows without keys": rs.Mask.from_bands([(0, 9, 5, 12, -20, 20), (20, 31, 20, 40, -9, 9)], N),
    "cross": rs.documents([13, 27], kv_lengths=[21, 10], align="end"),
    "nothing": rs.causal(4) & ~rs.causal(4),
}
# Heads that divide evenly, several runs of heads on a rank, key heads on several ranks, ranks without heads.
HEADS = [(4, 4, 4), (6, 3, 2), (10, 2, 3), (2, 1, 3)]


def tensors(mask: rs.Mask, heads: int, kv_heads: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return q, k, v, which require gradients, dout and dlse."""
    generator = torch.Generator().manual_seed(seed)
    q_len, k_len = mask.lengths
    sizes = ((heads, q_len, 8), (kv_heads, k_len, 8), (kv_heads, k_len, 6), (heads, q_len, 6), (heads, q_len))
    made = [torch.randn(2, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return [*(x.requires_grad_() for x in made[:3]), made[3], made[4].to(lse_dtype)]


def attend(mask: rs.Mask, world: int, strategy: str, given: list[Tensor], layout: str = "zigzag") -> tuple[Tensor, Tensor]:
    *qkv, _, _ = given
    result = rs.LocalWorld(world).attention(*qkv, mask=mask, strategy=strategy, layout=layout, return_lse=True)
    return result.out, result.lse


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "world"), HEADS)
@pytest.mark.parametrize("name", MASKS)
def test_the_bits_are_those_without_keeping(name: str, heads: int, kv_heads: int, world: int, dtype: torch.dtype) -> None:
    given = tensors(MASKS[name], heads, kv_heads, dtype)
    found = []
    for keep in (True, False):
        out, lse = attend(MASKS[name], world, f"ulysses(keep={keep})", given)
        with_dlse = torch.autograd.grad((out, lse), given[:3], given[3:], retain_graph=True)
        found.append([out, lse, *with_dlse, *torch.autograd.grad(out, given[:3], given[3])])
    for kept, again in zip(*found, strict=True):
        assert not kept.isnan().any()
        assert torch.equal(kept, again)


@pytest.mark.parametrize("between", ["exchange", "ring"])
def test_hybrid_computes_the_bits_without_keeping(between: str) -> None:
    given, found = tensors(MASKS["causal"], 6, 3, torch.float32), []
    for keep in (True, False):
        out, lse = attend(MASKS["causal"], 4, f"hybrid(per_node=2, between={between!r}, keep={keep})", given)
        found.append([out, lse, *torch.autograd.grad((out, lse), given[:3], given[3:])])
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))


def test_only_gradients_are_sent_backward() -> None:
    plan = rs.plan(rs.causal(N), world=4, rank=1, strategy="ulysses(heads=8, kv_heads=4)")
    sent = {phase: {t.what for t in plan.transfers(phase, "sends")} for phase in PHASES}
    assert sent == {"forward": {"q", "kv", "out"}, "backward": {"dout", "dq", "dkv"}}


def note_storage(sizes: dict[int, int], x: Tensor) -> Tensor:
    sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return x


def saved_bytes(strategy: str, given: list[Tensor], world: int, mask: rs.Mask) -> int:
    """Return the bytes of the tensors that autograd has saved, without the results of the call."""
    storages: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(partial(note_storage, storages), lambda x: x):
        parts = [x.detach().requires_grad_() for x in given[:3]]
        out = rs.LocalWorld(world).attention(*parts, mask=mask, strategy=strategy, layout="contiguous")
    assert out.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_is_kept_takes_the_place_of_own_rows(dtype: torch.dtype) -> None:
    """Own queries, keys and outputs are not saved. The lse of the own queries is: its gradient needs it."""
    mask, given = rs.causal(N), tensors(rs.causal(N), 8, 4, dtype)
    shape = rs.Shape(heads=8, kv_heads=4, head_dim=8, v_dim=6, batch=2, dtype=str(dtype).removeprefix("torch."))
    kept, again = (saved_bytes(f"ulysses(heads=8, kv_heads=4, keep={keep})", given, 4, mask) for keep in (True, False))
    plans = rs.LocalWorld(4).plans(mask, strategy="ulysses(heads=8, kv_heads=4)", layout="contiguous")
    own_lse = 2 * 8 * N * (8 if dtype == torch.float64 else 4)
    assert kept <= again + own_lse
    assert kept >= sum(kept_bytes(plan, shape) for plan in plans)


def test_a_projection_saves_the_own_output_besides_what_is_kept() -> None:
    """Without keeping, it saves the tensor that attention has saved."""
    found, projection = {}, torch.randn(4 * 6, 3, dtype=torch.float64, requires_grad=True)
    for keep in (True, False):
        plans = rs.LocalWorld(2).plans(rs.causal(N), strategy=f"ulysses(heads=4, kv_heads=2, keep={keep})", layout="contiguous")
        qkv = [torch.randn(1, h, N // 2, d, dtype=torch.float64, requires_grad=True) for h, d in ((4, 8), (2, 8), (2, 6))]
        config = config_for(plans[0], qkv[0], qkv[2], 8**-0.5, "auto")
        sizes: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(partial(note_storage, sizes), lambda x: x):
            parts = attend_ranks(plans, [tuple(qkv)] * 2, config, InProcessTransport(2).run)
            before = sum(sizes.values())
            projected = [out.transpose(1, 2).flatten(2) @ projection for out, _ in parts]
        assert all(x.requires_grad for x in projected)
        found[keep] = sum(sizes.values()) - before - projection.nbytes
    assert found == {True: 4 * N * 6 * 8, False: 0}


@pytest.mark.parametrize("why", ["no_grad", "no input requires one", "neither"])
def test_nothing_is_kept_without_gradients(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("ringspan.engine.executor.kept_tensors", lambda *given: called.append(given) or kept_tensors(*given))
    given = tensors(rs.causal(N), 4, 2, torch.float32)
    if why == "no input requires one":
        given = [x.detach() for x in given]
    with torch.no_grad() if why == "no_grad" else nullcontext():
        attend(rs.causal(N), 2, "ulysses", given)
    assert bool(called) == (why == "neither")


@pytest.mark.parametrize("runs_backward", [False, True])
def test_kept_rows_live_as_long_as_the_graph(runs_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def note(*given: Any) -> tuple[Tensor, ...]:
        tensors = kept_tensors(*given)
        kept.extend(map(weakref.ref, tensors))
        return tensors

    monkeypatch.setattr("ringspan.engine.executor.kept_tensors", note)
    given, alive = tensors(rs.causal(N), 4, 2, torch.float64), []
    gc.disable()  # no reference cycle may hold them
    try:
        results = attend(rs.causal(N), 2, "ulysses", given)
        alive.append([reference() is not None for reference in kept])
        if runs_backward:
            torch.autograd.grad(results, given[:3], given[3:])
        else:
            del results
        alive.append([reference() is not None for reference in kept])
    finally:
        gc.enable()
    assert alive == [[True] * 8, [False] * 8]


def test_a_backward_pass_may_run_twice() -> None:
    given = tensors(rs.causal(N), 4, 2, torch.float64)
    out, lse = attend(rs.causal(N), 2, "ulysses", given)
    first, second = (torch.autograd.grad((out, lse), given[:3], given[3:], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_second_derivatives_raise(wanted: int) -> None:
    """Also if the loss is linear in the result, so that only the saved results connect the gradient with the inputs."""
    given = tensors(rs.causal(N), 4, 2, torch.float64)
    out, _ = attend(rs.causal(N), 2, "ulysses", given)
    (gradient,) = torch.autograd.grad(out.sum(), given[wanted : wanted + 1], create_graph=True)
    with pytest.raises(rs.KernelError, match="no kernel here computes second derivatives"):
        torch.autograd.grad(gradient.sum(), given[wanted : wanted + 1])


def test_activation_checkpointing_keeps_the_rows_of_the_second_run() -> None:
    given, found = tensors(rs.causal(N), 4, 2, torch.float64), []
    for again in (False, True):

        def call(*qkv: Tensor) -> Tensor:
            return attend(rs.causal(N), 2, "ulysses", [*qkv, *given[3:]])[0]

        out = checkpoint(call, *given[:3], use_reentrant=False) if again else call(*given[:3])
        found.append([out, *torch.autograd.grad(out, given[:3], given[3])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_interleaved_parts_keep_their_own_rows() -> None:
    """One part keeps rows, the other reads the rank's own, in one slot 0."""
    world, masks = rs.LocalWorld(3), (rs.causal(N), rs.documents([7, 9]))
    strategies = [("ulysses(heads=6, kv_heads=3)", "ring"), ("ulysses(heads=6, kv_heads=3, keep=False)", "ring")]
    found = []
    for pair in strategies:
        plans = [world.plans(mask, strategy=strategy, layout="zigzag") for mask, strategy in zip(masks, pair, strict=True)]
        joined = [rs.interleave(*parts) for parts in zip(*plans, strict=True)]
        joined[0].verify()
        given = tensors(joined[0].mask, 6, 3, torch.float64)
        found.append([bytes_moved(plan, rs.Shape(heads=6, kv_heads=3, head_dim=8), "backward") for plan in joined])
        strategy, layout = joined[0].strategy, joined[0].q_layout
        out, lse = attend(joined[0].mask, 3, strategy, given, layout)  # type: ignore[arg-type]
        found[-1] = [found[-1], out, lse, *torch.autograd.grad((out, lse), given[:3], given[3:])]  # type: ignore[list-item]
    (kept, *results), (again, *others) = found
    assert sum(sent for sent, _ in kept) < sum(sent for sent, _ in again)
    assert all(torch.equal(a, b) for a, b in zip(results, others, strict=True))
    assert joined[0].without_keeping() is joined[0]


def keeping(plan: Plan, kinds: set[str]) -> Plan:
    """Return a plan that keeps the keys ("kv") or the queries ("q") that it receives: then these keys are not sent again,
    and of the queries only dout is."""
    program = plan.program

    def moved(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        left = (t for t in transfers if t.what != "kv" or "kv" not in kinds)
        return tuple(replace(t, what="dout") if t.what == "q" and "q" in kinds else t for t in left)

    steps = (Step(sends=moved(step.sends), recvs=moved(step.recvs), tasks=step.tasks) for step in program.backward)
    q_slots, kv_slots = (
        (own, *(replace(slot, kept=of in kinds) for slot in received))
        for of, (own, *received) in (("q", program.q_slots), ("kv", program.kv_slots))
    )
    return replace(plan, program=replace(program, backward=tuple(steps), q_slots=q_slots, kv_slots=kv_slots))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("strategy", "kinds"), [("gather(stages=2)", {"kv"}), ("exchange(stages=1)", {"kv"}), ("pass_q(stages=1)", {"q"})], ids=str
)
def test_any_strategy_can_keep_what_it_receives(strategy: str, kinds: set[str], dtype: torch.dtype) -> None:
    """Beside the own rows, which the backward pass reads. All keys that a query sees are on one rank, or queries could not
    be kept."""
    mask = rs.documents([13, 9, 18], kv_lengths=[10, 20, 10], align="end")
    spans = [[(10, 30)], [(0, 10)], [(30, 40)]]
    plans = rs.LocalWorld(3).plans(mask, strategy=strategy, layout="round_robin", kv_layout=spans)
    kept = [keeping(plan, kinds) for plan in plans]
    verify(kept)
    given, found = tensors(mask, 4, 2, dtype), []
    for of_ranks in (kept, plans):
        result = rs.LocalWorld(3).run(of_ranks, *given[:3])
        found.append([*result, *torch.autograd.grad(result, given[:3], given[3:])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_queries_that_see_no_key_need_no_dout() -> None:
    """Their gradients are sent all the same."""
    mask, given = MASKS["nothing"], tensors(MASKS["nothing"], 4, 2, torch.float64)
    plans = []
    for plan in rs.LocalWorld(2).plans(mask, strategy="ulysses(heads=4, kv_heads=2)", layout="contiguous"):
        first, *others = plan.program.backward
        assert {t.what for t in (*first.sends, *first.recvs)} == {"dout"}
        plans.append(replace(plan, program=replace(plan.program, backward=(Step(tasks=first.tasks), *others))))
    verify(plans)
    result = rs.LocalWorld(2).run(plans, *given[:3])
    assert not any(grad.any() for grad in torch.autograd.grad(result, given[:3], given[3:]))


def test_a_plan_without_keeping_has_the_same_tasks() -> None:
    plan = rs.plan(rs.causal(N), world=4, rank=2, strategy="ulysses(heads=8, kv_heads=4)", dkv_dtype="bfloat16")
    without = plan.without_keeping()
    assert without.strategy == "ulysses(heads=8, kv_heads=4, keep=False)"
    assert without.program.dkv_dtype == "bfloat16"
    assert without.without_keeping() is without
    assert without.digest != plan.digest
    assert not without.program.keeps_rows
    for phase in PHASES:
        tasks = [[task for step in p.program.steps(phase) for task in step.tasks] for p in (plan, without)]
        assert tasks[0] == tasks[1]


# -- over gloo, and compiled -------------------------------------------------------------------------------------------


def of_rank(strategy: str, compiled: bool, seed: int = 0) -> list[Tensor]:
    """Return out, lse and gradients of this rank."""
    cp = rs.ContextParallel(None, rs.causal(N), strategy=strategy, layout="zigzag")
    given = [cp.shard(x.detach(), dim=2) for x in tensors(rs.causal(N), 4, 2, torch.float32, seed)]
    qkv = [x.requires_grad_() for x in given[:3]]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = rs.attention(q, k, v, plan=cp.plan, return_lse=True)
        return out, lse

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    out, lse = run(*qkv)
    return [out, lse, *torch.autograd.grad((out, lse), qkv, given[3:])]


def eager_and_compiled(rank: int) -> list[bool]:
    kept, again = of_rank("ulysses", False), of_rank("ulysses(keep=False)", False)
    compiled = of_rank("ulysses", True)
    return [torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(kept, again, compiled, strict=True)]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_keep_rows_and_compiled_ranks_compute_the_same_bits(pools: Pools, world: int) -> None:
    assert pools(world).run(eager_and_compiled) == [[True] * 5] * world


def different_ranks(rank: int, agreed: bool, how: str) -> str:
    """Run rank 1 in another way than rank 0: compiled, or with another option."""
    ranks = ProcessGroupTransport(dist.new_group(), timeout=20.0)
    cp = rs.ContextParallel(ranks, rs.causal(N), strategy="ulysses(keep=False)" if rank == 1 and how == "option" else "ulysses")
    qkv = cp.shard(*(x.detach() for x in tensors(rs.causal(N), 4, 2, torch.float32)[:3]), dim=2)
    compiled = torch.compile(cp.attention, backend="aot_eager")
    if agreed:
        cp.attention(*qkv)
        compiled(*qkv)
    try:
        (compiled if rank == 1 and how == "compiled" else cp.attention)(*qkv)
    except rs.RingspanError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.alone
@pytest.mark.parametrize(("agreed", "how"), [(False, "compiled"), (True, "compiled"), (False, "option")])
def test_ranks_that_differ_in_what_they_keep_raise(pools: Pools, agreed: bool, how: str) -> None:
    for error in pools(2).run(different_ranks, agreed, how):
        assert error.startswith("PeerMismatch: "), error
        assert agreed or ("keep=True" in error and "keep=False" in error)
        for words in ("as it runs compiled code", "FlopCounterMode, on all ranks or on none"):
            assert (words in error) == (how == "compiled" and not agreed)


@pytest.mark.parametrize(("keep", "changed", "fails"), [(True, "out", False), (False, "out", True), (True, "lse", True)])
def test_changes_of_results_before_the_backward_pass(keep: bool, changed: str, fails: bool) -> None:
    """The backward pass reads the kept out, not the one that was returned."""
    given, mask = tensors(rs.causal(N), 4, 2, torch.float64), rs.causal(N)
    plans = rs.LocalWorld(2).plans(mask, strategy=f"ulysses(heads=4, kv_heads=2, keep={keep})", layout="contiguous")
    config = config_for(plans[0], given[0], given[2], 8**-0.5, "auto")

    def gradients(change: bool) -> tuple[Tensor, ...]:
        leaves = [x.detach()[:, :, half].requires_grad_() for half in (slice(0, 20), slice(20, N)) for x in given[:3]]
        ranks = attend_ranks(plans, [tuple(leaves[:3]), tuple(leaves[3:])], config, InProcessTransport(2).run)
        losses = [(out * given[3][:, :, :20]).sum() for out, _ in ranks]
        if change:
            with torch.no_grad():
                getattr(ranks[0], changed).mul_(2.0)
        return torch.autograd.grad(sum(losses), leaves)

    if fails:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(change=True)
    else:
        assert all(torch.equal(a, b) for a, b in zip(gradients(change=True), gradients(change=False), strict=True))
