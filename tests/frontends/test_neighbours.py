"""``roll`` and ``halo`` over ranks against the whole sequence in one process, with gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.layouts import LAYOUTS
from ringspan.testing.assertions import assert_close
from tests.conftest import Pools

LENGTHS, WORLDS = range(1, 130), range(1, 9)


def dense_windows(x: Tensor, first: int, last: int, documents: list[int], fill: float) -> Tensor:
    """Token by token on dim 1: the tokens from ``first`` to ``last`` away of the same document."""
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    n = x.shape[1]
    rows = []
    for offset in range(first, last + 1):
        source = torch.arange(n) + offset
        there = (source >= 0) & (source < n)
        there &= document[source.clamp(0, n - 1)] == document
        moved = x[:, source.clamp(0, n - 1)]
        rows.append(torch.where(there[None, :, None], moved, fill))
    return torch.stack(rows, dim=2)


def cut(n: int, seed: int) -> list[int]:
    """Random documents, some of them empty, of ``n`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, n + 1, (seed % 5,), generator=generator).sort().values.tolist()
    return [b - a for a, b in zip([0, *edges], [*edges, n], strict=True)]


def check(n: int, world: int, layout: str) -> None:
    seed = 8 * n + world
    documents = cut(n, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, n, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    local = rs.LocalWorld(world)
    shift, before, after = (seed % 7) - 3, seed % 4, seed % 3
    cases: list[tuple[Tensor, Tensor]] = [
        (
            local.roll(x, shift, documents=documents, fill=-1.5, layout=layout),
            dense_windows(x, -shift, -shift, documents, -1.5)[:, :, 0],
        ),
        (
            local.halo(x, before=before, after=after, documents=documents, layout=layout),
            dense_windows(x, -before, after, documents, 0.0),
        ),
    ]
    for got, want in cases:
        assert_close(got, want)
        weight = torch.randn(want.shape, dtype=torch.float64, generator=generator)
        (dx,), (expected,) = (torch.autograd.grad((y * weight).sum(), x) for y in (got, want))
        assert_close(dx, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_of_lengths_and_worlds(layout: str) -> None:
    """Every length of up to 16 tokens and around multiples of the worlds, each on one world."""
    for n in [*range(1, 17), 24, 31, 32, 33, 63, 64, 65, 127, 128, 129]:
        check(n, 1 + n % 8, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_length_and_world(layout: str) -> None:
    for n in LENGTHS:
        for world in WORLDS:
            check(n, world, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_plan_is_a_plan_like_any_other(layout: str) -> None:
    """It verifies, explains itself, and moves the bytes that it says: each row once to each rank that needs it."""
    mask = rs.documents([40, 3, 50])
    data = rs.frontends.neighbours.Neighbours()
    data.plan = rs.plan(mask, world=4, rank=1, layout=layout)
    for made in (data.roll_plan(-1, documents=[40, 3, 50]), data.halo_plan(before=3)):
        assert "exchange" in made.verify().explain()
    x = torch.randn(1, 93, 6, dtype=torch.float64, requires_grad=True)
    local = rs.LocalWorld(4)
    local.halo(x, before=3, layout=data.plan.q_layout).sum().backward()
    rows = [sum(t.count for t in made.at(rank).transfers("forward", "sends")) for rank in range(4)]
    assert [traffic.sent for traffic in local.traffic] == [
        6 * 8 * (out + sum(t.count for t in made.at(rank).transfers("backward", "sends") if t.what == "dkv"))
        for rank, out in enumerate(rows)
    ]


def on_processes(rank: int, layout: str) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    documents = [5, 17, 0, 11]
    cp = rs.ContextParallel(None, rs.documents(documents), layout=layout)
    whole = torch.randn(33, 2, 3, dtype=torch.float64)
    x = cp.shard(whole, dim=0).requires_grad_()
    rolled = cp.roll(x, -1, dim=0, documents=documents)
    windows = cp.halo(x, before=2, dim=-3, documents=documents)
    tokens = cp.roll(cp.shard(torch.arange(33)[None], dim=1), -2, fill=-100)
    cp.sum(rolled.square()).backward(retain_graph=True)
    cp.sum(windows.sum(1).square()).backward()
    assert x.grad is not None
    return tuple(cp.unshard(y, dim=d) for y, d in ((rolled.detach(), 0), (windows.detach(), 0), (tokens, 1), (x.grad, 0)))


@pytest.mark.parametrize("layout", ["zigzag", "striped", "balanced"])
def test_over_processes(pools: Pools, layout: str) -> None:
    torch.manual_seed(0)
    documents = [5, 17, 0, 11]
    x = torch.randn(33, 2, 3, dtype=torch.float64, requires_grad=True)
    batch_first = x.transpose(0, 1)
    rolled = dense_windows(batch_first, 1, 1, documents, 0.0)[:, :, 0].transpose(0, 1)
    windows = dense_windows(batch_first, -2, 0, documents, 0.0).movedim(0, 2)
    (rolled.square().sum() + windows.sum(1).square().sum()).backward()
    assert x.grad is not None
    tokens = torch.tensor([[*range(2, 33), -100, -100]])
    for got in pools(3).run(on_processes, layout):
        for y, want in zip(got, (rolled, windows, tokens, x.grad), strict=True):
            assert_close(y, want, rtol=1e-14, atol=1e-14)


def test_half_precision_is_copied_and_second_derivatives_raise() -> None:
    x = torch.randn(1, 9, 4, dtype=torch.bfloat16, requires_grad=True)
    y = rs.LocalWorld(2).roll(x, 1)
    assert torch.equal(y[:, 1:], x[:, :-1])
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert dx.dtype == torch.bfloat16
    with pytest.raises(rs.KernelError, match="differentiated again"):
        dx.sum().backward()
    (dx,) = torch.autograd.grad(rs.LocalWorld(2).roll(x, 1).square().sum(), x, create_graph=True)
    with pytest.raises(rs.KernelError, match="differentiated again"):
        torch.autograd.grad(dx.square().sum(), x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rs.LocalWorld(2).roll(torch.zeros(1, 4), 1.5), "shift must be an integer number of tokens, not 1.5"),  # type: ignore[arg-type]
        (lambda: rs.LocalWorld(2).halo(torch.zeros(1, 4), before=-1), "must not be negative; got -1 and 0"),
        (lambda: rs.LocalWorld(2).roll(torch.zeros(1, 4), 1, documents=[3]), "3 tokens together, but the sequence has 4"),
        (lambda: rs.masks.offsets.offsets([4], 2, 1), "the first offset must not be after the last"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(rs.RingspanError, match=message):
        call()
