"""Plan handles: what is prepared once, what ranks with bad tensors do, and how the registry finds handles."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.engine.handles import HandleRegistry, PlanHandle, registry
from ringspan.transports import ProcessGroupTransport
from tests.conftest import Pools

pytestmark = pytest.mark.alone

N = 24
LIMIT = 8.0  # seconds that a rank waits for its peers

BAD: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "dtype": lambda q, k, v: (q, k.float(), v),
    "key heads": lambda q, k, v: (q, torch.cat([k, k], 1)[:, :3], torch.cat([v, v], 1)[:, :3]),
    "rows": lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:]),
}


def tensors(cp: rs.ContextParallel) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = cp.shard(*(torch.randn(1, 2, N, 8, dtype=torch.float64) for _ in range(3)), dim=2)
    return q, k, v


def bad_tensors_on_rank_1(rank: int, how: str, agreed: bool) -> tuple[str, float]:
    """What each rank raises, and after how many seconds. With ``agreed``, the ranks have made a good call before."""
    ranks = ProcessGroupTransport(
        dist.new_group(), timeout=LIMIT
    )  # a group of its own: one whose exchange timed out cannot be used again
    cp = rs.ContextParallel(ranks, rs.causal(N), strategy="ring")
    given = tensors(cp)
    if agreed:
        cp.attention(*given)
    start = time.monotonic()
    try:
        cp.attention(*(BAD[how](*given) if rank == 1 else given))
    except rs.RingspanError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


@pytest.mark.parametrize("how", BAD)
def test_bad_tensors_after_an_agreement_raise_at_once(pools: Pools, how: str) -> None:
    (peer, waited), (failing, seconds), (other, _) = pools(3).run(bad_tensors_on_rank_1, how, True)
    assert failing.startswith("InputError: ")
    assert seconds < 1.0
    # The peers exchange rows. They find the error of rank 1 when they have waited for a while.
    for message in (peer, other):
        assert re.match(r"PeerFailed: rank 1 raised InputError in call \d+ \(forward of plan .*\): ", message)
        assert failing.removeprefix("InputError: ").splitlines()[0] in message
    assert waited < LIMIT


@pytest.mark.parametrize(
    ("how", "failing_says", "peers_say"),
    [
        ("dtype", "InputError: q, k and v must have one dtype", "PeerFailed: rank 1 cannot make this call: InputError: "),
        (
            "key heads",
            "InputError: 2 query heads cannot share 3 key heads",
            "PeerFailed: rank 1 cannot make this call: InputError: ",
        ),
        ("rows", "PeerMismatch: rank 1 has 7 keys where the plan", "PeerMismatch: rank 1 has 7 keys where the plan"),
    ],
)
def test_bad_tensors_in_the_first_call_raise_on_every_rank(pools: Pools, how: str, failing_says: str, peers_say: str) -> None:
    (peer, _), (failing, seconds), (other, _) = pools(3).run(bad_tensors_on_rank_1, how, False)
    assert failing.startswith(failing_says)
    assert seconds < LIMIT
    assert peer == other
    assert peer.startswith(peers_say)


def call_that_rank_1_refuses(rank: int, what: str) -> tuple[str, float]:
    """What each rank raises in its first call, and after how many seconds."""
    ranks = ProcessGroupTransport(dist.new_group(), timeout=LIMIT)
    visible = torch.ones(2, N, N, dtype=torch.bool)
    visible[1, 3, 2] = False
    mask = rs.mask_mod(lambda b, h, q, k: visible[h, q, k], N, heads=2) if what == "changed mask" else rs.causal(N)
    cp = rs.ContextParallel(ranks, mask, strategy="ring")
    handle = PlanHandle(plan=cp.plan, group=ranks)
    heads, given = 2, tensors(cp)
    if rank == 1:
        if what == "changed mask":
            visible[1, 4, 4] = False
        elif what == "kernel":
            handle = replace(handle, backend="flash")
        elif what == "score_mod":
            heads = 3
        elif what == "plan":
            handle = replace(handle, plan=replace(cp.plan, strategy="none", program=replace(cp.plan.program, heads=(3, 3))))
    score_mod = rs.alibi(torch.ones(heads, dtype=torch.float64)) if what == "score_mod" else None
    start = time.monotonic()
    try:
        handle.prepare(*given, 0.5, score_mod)
    except rs.RingspanError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("kernel", "KernelError: "),
        ("changed mask", "InputError: a tensor that the function of"),
        ("score_mod", "InputError: this score_mod was made for 3 heads"),
        ("plan", "PlanError: "),
    ],
)
def test_a_first_call_that_one_rank_refuses_raises_on_every_rank(pools: Pools, what: str, message: str) -> None:
    (peer, waited), (refused, _), (other, _) = pools(3).run(call_that_rank_1_refuses, what)
    assert refused.startswith(message)
    assert waited < LIMIT
    assert peer == other
    assert peer.startswith(f"PeerFailed: rank 1 cannot make this call: {message}")


# -- in this process: preparing a call, and the registry -----------------------------------------------------------------


@pytest.fixture
def group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroupTransport]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield ProcessGroupTransport()
    dist.destroy_process_group()


def handle_of(group: ProcessGroupTransport) -> PlanHandle:
    return PlanHandle(plan=rs.plan(rs.causal(6), world=1, rank=0), group=group)


def qkv(heads: int = 4, rows: int = 6) -> list[Tensor]:
    return [torch.ones(1, h, rows, 8) for h in (heads, 2, 2)]


def test_a_call_is_prepared_once(group_of_one: ProcessGroupTransport) -> None:
    handle = handle_of(group_of_one)
    plan, config = handle.prepare(*qkv(), 0.5)
    assert plan is handle.plan
    assert (config.head_dim, config.scale, config.mods) == (8, 0.5, None)
    again = PlanHandle(plan=handle.plan, group=group_of_one).prepare(*qkv(), 0.5)
    assert again[1] is config
    assert handle.prepare(*qkv(), 0.25)[1].scale == 0.25
    assert handle.prepare(*(x.double() for x in qkv()), 0.5)[1] is not config


def heads_of_a_prepared_plan(rank: int) -> tuple[object, bool]:
    cp = rs.ContextParallel(None, rs.causal(N), strategy="ulysses(heads=8, kv_heads=8)")
    handle = PlanHandle(plan=cp.plan, group=cp.group)
    q, k, v = qkv(rows=N // 2)
    plan, _ = handle.prepare(q, k, v, 0.5)
    return plan.program.heads, handle.prepare(q, k, v, 0.5)[0] is plan


def test_a_plan_that_splits_heads_is_fitted_to_the_tensors(pools: Pools) -> None:
    assert pools(2).run(heads_of_a_prepared_plan) == [((4, 2), True)] * 2


def test_prepared_calls_do_not_keep_a_plan_alive(group_of_one: ProcessGroupTransport) -> None:
    """Without a reference cycle: the tensors of its mask would live until the next garbage collection."""
    gc.disable()
    try:
        copy = replace(rs.plan(rs.causal(6), world=1, rank=0), rank=0)  # not in the cache of plans
        PlanHandle(plan=copy, group=group_of_one).prepare(*qkv(), 0.5)
        alive = ref(copy)
        del copy
        assert alive() is None
    finally:
        gc.enable()


def test_a_plan_of_another_rank_is_refused(group_of_one: ProcessGroupTransport) -> None:
    with pytest.raises(rs.InputError, match="this is the plan of rank 1 of 2, but this process is rank 0 of 1"):
        PlanHandle(plan=rs.plan(rs.causal(6), world=2, rank=1), group=group_of_one)


def test_an_id_follows_from_the_name(group_of_one: ProcessGroupTransport) -> None:
    registry, handle = HandleRegistry(), handle_of(group_of_one)
    first, second, other = (registry.register(name, handle) for name in ("a", "a", "b"))
    assert first.id.item() == second.id.item() != other.id.item()  # type: ignore[union-attr]


def test_the_last_handle_of_an_id_is_found(group_of_one: ProcessGroupTransport) -> None:
    registry = HandleRegistry()
    first, later = (registry.register("a", replace(handle_of(group_of_one), backend=name)) for name in ("cpu", "eager"))
    assert registry.find(first.id).backend == "eager"  # type: ignore[arg-type]
    number = torch.tensor(first.id.item())  # type: ignore[union-attr]
    del later
    assert registry.find(number).backend == "cpu"
    del first
    with pytest.raises(rs.InputError, match=r"no plan is registered under id \d+: .*Make it again"):
        registry.find(number)


def test_an_id_that_autograd_has_saved_keeps_its_handle(group_of_one: ProcessGroupTransport) -> None:
    """A backward pass may run after the ContextParallel is gone."""
    q, k, v = (x.requires_grad_() for x in qkv())
    registered = registry.register("saved", handle_of(group_of_one))
    number, alive = int(registered.id), ref(registered.id.ringspan_handle)  # type: ignore[arg-type, union-attr]
    out, _ = torch.ops.ringspan.attend(q, k, v, registered.id, 0.5)
    del registered
    assert registry.find(torch.tensor(number)) is alive()
    out.sum().backward()
    assert q.grad is not None
    del out
    assert alive() is None


def test_a_compiled_program_keeps_the_handle_of_its_plan(group_of_one: ProcessGroupTransport) -> None:
    plan = rs.plan(rs.causal(6), world=1, rank=0)
    attention = torch.compile(lambda q, k, v: rs.attention(q, k, v, plan=plan), fullgraph=True, backend="aot_eager")
    q, k, v = (x.requires_grad_() for x in qkv())
    for _ in range(2):
        out = attention(q, k, v)
        gc.collect()
        torch.autograd.grad(out.sum(), q)


def test_a_deleted_context_frees_the_tensors_of_its_mask(group_of_one: ProcessGroupTransport) -> None:
    def make() -> tuple[rs.ContextParallel, ref[Tensor]]:
        visible = torch.ones(2, N, N, dtype=torch.bool)
        visible[1, 3, 2] = False
        return rs.ContextParallel(group_of_one, rs.mask_mod(lambda b, h, q, k: visible[h, q, k], N, heads=2)), ref(visible)

    cp, alive = make()
    assert alive() is not None
    del cp
    gc.collect()
    assert alive() is None


def test_a_deleted_context_frees_its_group(group_of_one: ProcessGroupTransport) -> None:
    group = dist.new_group([0])
    cp = rs.ContextParallel(group, rs.causal(6))
    cp.attention(*qkv(heads=2))
    alive = ref(group)
    dist.destroy_process_group(group)
    del group, cp
    gc.collect()
    assert alive() is None
