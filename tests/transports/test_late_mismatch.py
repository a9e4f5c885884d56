"""Ranks that come apart after they have agreed on their plans: every rank raises, and no rank computes a wrong number."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import ringspan as rs
from ringspan.kernels.reference import dense_attention
from ringspan.transports import ProcessGroupTransport
from tests.conftest import Pools

pytestmark = pytest.mark.alone

WORLD, N = 3, 24
LIMIT = 10.0  # seconds: the time limit of the group
SOON = 4.0  # seconds in which all ranks must have raised, on a loaded machine; one second of them is the watchdog's patience

Report = tuple[str, str, float]


class Layers:
    """Two plans that the ranks have agreed on, forward and backward, over one group of their own."""

    def __init__(self, rank: int, strategy: str, backend: str | None = None) -> None:
        group = ProcessGroupTransport(dist.new_group(backend=backend), timeout=LIMIT)
        masks = (rs.causal(N), rs.full(N))
        self.cps = [rs.ContextParallel(group, m, strategy=strategy, layout="zigzag") for m in masks]
        self.differs = rank == 1
        torch.manual_seed(0)
        whole = torch.randn(3, 1, 6, N, 8, dtype=torch.float64)
        self.expected = [self.cps[0].shard(dense_attention(*whole, torch.from_numpy(m.dense())).out, dim=2) for m in masks]
        self.qkv = [x.requires_grad_() for x in self.cps[0].shard(*whole.unbind(), dim=2)]
        for n in (0, 1):
            self.attend(n).sum().backward()

    def attend(self, n: int, **options: Any) -> Tensor:
        """Attend with plan n. A result that is returned is the right one."""
        out = self.cps[n].attention(*self.qkv, **options)
        if not options:
            assert torch.allclose(out, self.expected[n], rtol=0, atol=1e-12), "a wrong number"
        return out


def other_order(layers: Layers) -> None:
    for n in (1, 0) if layers.differs else (0, 1):
        layers.attend(n)


def extra_call(layers: Layers) -> None:
    for n in (1, 0, 1) if layers.differs else (0, 1, 0):
        layers.attend(n)


def skipped_call(layers: Layers) -> None:
    for n in (1,) if layers.differs else (0, 1):
        layers.attend(n)
    layers.cps[0].mean(torch.ones(2))


def skipped_equal_layer(layers: Layers) -> None:
    """The calls of the layers are equal, so that the first call of another kind is the one that differs."""
    for _ in range(2 if layers.differs else 3):
        layers.attend(0)
    layers.cps[0].mean(torch.ones(2))


def other_scale(layers: Layers) -> None:
    layers.attend(0, scale=0.25 if layers.differs else 0.5)


def backward_on_other_ranks_only(layers: Layers) -> None:
    out = layers.attend(0)
    if not layers.differs:
        out.sum().backward()
    layers.attend(1)


def mean_skipped(layers: Layers) -> None:
    cp = layers.cps[0]
    if not layers.differs:
        cp.mean(torch.ones(4))
    layers.attend(0)


def gradients_in_another_order(layers: Layers) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    cp = layers.cps[0]
    for p in parameters[::-1] if layers.differs else parameters:
        cp.sum_gradients([p])
        p.grad = torch.ones_like(p)
        cp.sum_gradients([p])


def fewer_gradients(layers: Layers) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5, 7)]
    layers.cps[0].sum_gradients(parameters[:2] if layers.differs else parameters)


def unshard_of_another_dtype(layers: Layers) -> None:
    x = layers.qkv[0].detach()
    layers.cps[0].unshard(x.float() if layers.differs else x, dim=2)


def unshard_of_another_width(layers: Layers) -> None:
    x = layers.qkv[0].detach()
    layers.cps[0].unshard(x[..., :4] if layers.differs else x, dim=2)


def mean_of_another_dtype(layers: Layers) -> None:
    layers.cps[0].mean(torch.ones(4, dtype=torch.float64 if layers.differs else torch.float32))


def score_mods_in_another_order(layers: Layers) -> None:
    mods = [rs.softcap(0.5), rs.softcap(50.0)]
    for score_mod in mods:  # agreed
        rs.attention(*layers.qkv, plan=layers.cps[0].plan, group=layers.cps[0].group, score_mod=score_mod)
    for score_mod in mods[::-1] if layers.differs else mods:
        rs.attention(*layers.qkv, plan=layers.cps[0].plan, group=layers.cps[0].group, score_mod=score_mod)


def other_key_heads(layers: Layers) -> None:
    q, k, v = (x.detach() for x in layers.qkv)
    layers.cps[0].attention(q, k[:, :2], v[:, :2])  # agreed
    layers.cps[0].attention(q, k[:, :2], v[:, :2]) if layers.differs else layers.cps[0].attention(q, k, v)
    layers.cps[0].mean(torch.ones(2))


def equal_layers_differentiated_in_another_order(layers: Layers) -> None:
    first, second = layers.attend(0), layers.attend(0)
    for out in (second, first) if layers.differs else (first, second):
        out.sum().backward()


def another_layer_differentiated(layers: Layers) -> None:
    first, second = layers.attend(0), layers.attend(0)
    (second if layers.differs else first).sum().backward()


def shifts_differentiated_in_another_order(layers: Layers) -> None:
    x = layers.qkv[0].detach().requires_grad_()
    first, second = layers.cps[0].roll(x, -1, dim=2), layers.cps[0].roll(2 * x, -1, dim=2)
    for out in (second, first) if layers.differs else (first, second):
        out.sum().backward()


def mean_and_sum_in_another_order(layers: Layers) -> None:
    cp, x = layers.cps[0], torch.ones(2)
    for reduce in (cp.sum, cp.mean) if layers.differs else (cp.mean, cp.sum):
        reduce(x)


def other_treatment_of_gradients(layers: Layers) -> None:
    layers.cps[0].sum(torch.ones(2), grads="averaged" if layers.differs else "summed")


def parameters_in_another_order(layers: Layers) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    layers.cps[0].sum_gradients(parameters[::-1] if layers.differs else parameters)


def unshard_of_another_layout(layers: Layers) -> None:
    other = rs.ContextParallel(layers.cps[0].group, rs.causal(N), layout="contiguous", strategy="ring")
    (other if layers.differs else layers.cps[0]).unshard(layers.qkv[0].detach(), dim=2)


CASES: dict[str, Callable[[Layers], None]] = {
    job.__name__: job
    for job in (
        other_order,
        extra_call,
        skipped_call,
        skipped_equal_layer,
        other_scale,
        backward_on_other_ranks_only,
        mean_skipped,
        gradients_in_another_order,
        fewer_gradients,
        unshard_of_another_dtype,
        unshard_of_another_width,
        mean_of_another_dtype,
        score_mods_in_another_order,
        other_key_heads,
        equal_layers_differentiated_in_another_order,
        another_layer_differentiated,
        shifts_differentiated_in_another_order,
        mean_and_sum_in_another_order,
        other_treatment_of_gradients,
        parameters_in_another_order,
        unshard_of_another_layout,
    )
}


def come_apart(rank: int, case: str, strategy: str) -> Report:
    layers = Layers(rank, strategy)
    start = time.monotonic()
    try:
        CASES[case](layers)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", time.monotonic() - start


@pytest.mark.parametrize("case", ["score_mods_in_another_order", "other_key_heads"])
def test_no_key_moves_and_another_call_still_raises(pools: Pools, case: str) -> None:
    check(pools(WORLD).run(come_apart, case, "pass_q"))


@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("case", ["other_order", "skipped_call", "backward_on_other_ranks_only"])
def test_attention_that_comes_apart_raises_on_every_rank(pools: Pools, case: str, strategy: str) -> None:
    check(pools(WORLD).run(come_apart, case, strategy))


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("other_order", "skipped_call", "backward_on_other_ranks_only")])
def test_calls_that_come_apart_raise_on_every_rank(pools: Pools, case: str) -> None:
    check(pools(WORLD).run(come_apart, case, "ring"))


def check(reports: list[Report]) -> None:
    for kind, message, seconds in reports:
        assert kind == "PeerMismatch", reports
        assert "the ranks make different calls: call " in message
        assert "rank 1" in message
        assert seconds < SOON
    assert len({message for _, message, _ in reports}) <= 2  # rank 1 is compared with one or the other of its peers


def other_order_on_two_backends(rank: int) -> Report:
    """As after ``init_process_group()`` without a backend on a machine with a GPU, where the group has gloo for CPUs only."""
    layers = Layers(rank, "ring", "cpu:gloo,cuda:gloo")
    start = time.monotonic()
    try:
        other_order(layers)
    except rs.RingspanError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", 0.0


def test_a_group_with_a_backend_for_each_device(pools: Pools) -> None:
    check(pools(WORLD).run(other_order_on_two_backends))


def dispatch_mode_on_rank_1(rank: int) -> str:
    """Under a mode, attention is an operator, whose backward pass does not know its forward call."""
    layers = Layers(rank, "ring")
    try:
        with FlopCounterMode(display=False) if layers.differs else nullcontext():
            layers.attend(0).sum().backward()
    except rs.PeerMismatch as error:
        return str(error)
    return "no error"


def test_a_dispatch_mode_on_one_rank_is_explained(pools: Pools) -> None:
    for message in pools(WORLD).run(dispatch_mode_on_rank_1):
        assert "a dispatch mode such as FlopCounterMode, does not know the forward call" in message


def attend_after_a_pause_of_rank_1(rank: int, strategy: str) -> float:
    """Rank 1 is late, in the forward and in the backward pass. ``attend`` checks the result."""
    layers = Layers(rank, strategy)
    start = time.monotonic()
    for n in (0, 1):
        time.sleep(2.5 if layers.differs else 0.0)
        out = layers.attend(n)
        time.sleep(1.5 if layers.differs else 0.0)
        out.sum().backward()
    layers.cps[0].mean(torch.ones(2))
    return time.monotonic() - start


def test_a_rank_that_is_late_is_no_error(pools: Pools) -> None:
    assert min(pools(WORLD).run(attend_after_a_pause_of_rank_1, "ring")) > 7.0


def refuse_on_rank_1_and_go_on(rank: int) -> list[str]:
    """Rank 1 raises in a call that needs nothing of the others, and its next call is late."""
    group = ProcessGroupTransport(dist.new_group(), timeout=LIMIT)
    cp = rs.ContextParallel(group, rs.documents([8, 8, 8]), layout="contiguous", strategy="exchange")
    q, k, v = cp.shard(*torch.randn(3, 1, 2, N, 8).unbind(), dim=2)
    cp.attention(q, k, v)
    errors = []
    try:
        cp.attention(q, k[:, :, 1:] if rank == 1 else k, v)
    except rs.InputError as error:
        errors.append(type(error).__name__)
    time.sleep(2.5 if rank == 1 else 0.0)
    cp.unshard(cp.attention(q, k, v), dim=2)
    return errors


def test_an_error_that_no_peer_depends_on_ends_no_later_call(pools: Pools) -> None:
    assert pools(WORLD).run(refuse_on_rank_1_and_go_on) == [[], ["InputError"], []]
