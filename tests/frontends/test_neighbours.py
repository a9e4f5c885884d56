"""``roll`` and ``halo`` over ranks against the whole sequence in one process, with gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

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


# -- documents and the mask -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("mask", "documents", "refused"),
    [
        (rs.documents([5, 3]), [5, 3], None),
        (rs.documents([5, 3]), [3, 5], (3, 5)),
        (rs.documents([5, 3]), [4, 4], (4, 5)),
        (rs.documents([5, 3]), [5, 0, 2, 1], None),  # parts of documents
        (rs.documents([5, 3]), [8], None),  # as without documents=
        (rs.causal(8), [3, 5], None),  # attention across documents
        (rs.chunked(8, 2), [4, 4], None),  # boundaries that are not those of documents
        (rs.chunked(8, 4), [3, 5], (3, 4)),
        (rs.Mask.from_bands([(0, 6, 0, 6, -5, 0)], 8), [3, 5], None),  # causal, and two tokens of padding
        (rs.documents([4, 4]) | rs.window(0, 0), [2, 6], (2, 4)),
        (rs.fold([[1], [2], [3, 4, 5, 6, 7, 8]]).mask(), [1, 1, 6], None),
        (rs.mask_mod(lambda b, h, q, k: (q * k) % 3 != 1, 8), [3, 5], None),  # what it lets see is not known
    ],
)
def test_documents_that_contradict_the_mask_are_refused(
    mask: rs.Mask, documents: list[int], refused: tuple[int, int] | None
) -> None:
    cp, x = rs.ContextParallel(None, mask, expect_attention=False), torch.arange(1, 9)[None]
    calls: dict[str, Callable[[], Any]] = {
        "roll": lambda: cp.roll(x, 1, documents=documents),
        "halo": lambda: cp.halo(x, before=1, documents=documents),
        "roll_plan": lambda: cp.roll_plan(1, documents=documents),
        "halo_plan": lambda: cp.halo_plan(before=1, documents=documents),
    }
    for name, call in calls.items():
        if refused is None:
            call()
        else:
            start, boundary = refused
            wanted = (
                rf"cp\.{name}\(documents=…\): a document starts at token {start}, .* boundary of the mask at token {boundary}"
            )
            with pytest.raises(rs.InputError, match=wanted):
                call()
    if refused is None:
        assert torch.equal(cp.roll(x, 1, documents=documents), rolled_alone(x, documents))


def rolled_alone(x: Tensor, documents: list[int]) -> Tensor:
    """Each document by itself, one token later."""
    return torch.cat([torch.cat([part[:, :1] * 0, part[:, :-1]], 1) for part in x.split(documents, dim=1)], dim=1)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cp, x: cp.roll(x, 1, dim=None), "dim must be an integer, not None"),
        (lambda cp, x: cp.halo(x, before=1, dim=1.0), "dim must be an integer, not 1.0"),
        (lambda cp, x: cp.roll(x, 10**30), "shift must be at most 2147483647 tokens, the longest sequence; got 10{30}"),
        (lambda cp, x: cp.halo(x, before=2**62), "before must be at most 2147483647 tokens"),
        (lambda cp, x: cp.roll_plan(-(10**30)), "shift must be at most 2147483647 tokens"),
        (lambda cp, x: cp.roll(nested(), 1), r"x is a nested tensor: give x\.values\(\)"),
        (lambda cp, x: cp.roll(torch.eye(8).to_sparse(), 1), "x has the layout torch.sparse_coo"),
        (lambda cp, x: cp.roll(x.to(torch.complex64).requires_grad_(), 1), r"torch\.view_as_real\(x\)"),
        (lambda cp, x: cp.roll(distributed(x), 1), r"x is a DTensor: give x\.to_local\(\)"),
        (lambda cp, x: cp.halo(distributed(x), before=1), r"x is a DTensor: give x\.to_local\(\)"),
    ],
)
def test_what_cannot_be_moved_is_named(call: Callable[[Any, Tensor], Any], message: str) -> None:
    cp = rs.ContextParallel(None, rs.causal(8), expect_attention=False)
    with pytest.raises(rs.InputError, match=message):
        call(cp, torch.zeros(1, 8))


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged)


def distributed(x: Tensor) -> Tensor:
    return DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()])


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    "call", [lambda cp: cp.roll_plan(-1), lambda cp: cp.halo_plan(before=1), lambda cp: cp.roll_plan(-1, documents=[3, 1, 4])]
)
def test_plans_under_masks_of_rows_are_refused(call: Callable[[Any], Any]) -> None:
    cp = rs.ContextParallel(None, rs.documents([[3, 1], [4]]), expect_attention=False)
    with pytest.raises(rs.InputError, match=r"cp\.(roll|halo)_plan does not support masks that differ between the 2 rows"):
        call(cp)


def gradient_on_one_rank(rank: int) -> str:
    cp = rs.ContextParallel(dist.new_group(), rs.causal(8), layout="zigzag", expect_attention=False, timeout=60)
    x = torch.ones(1, cp.plan.q_rows, requires_grad=rank == 0)
    try:
        cp.roll(x, 1)
    except rs.PeerMismatch as error:
        return str(error)
    return "no error"


def test_a_gradient_on_some_ranks_only_raises_in_the_forward_pass(pools: Pools) -> None:
    """The backward pass of the others would never come, and the rank would wait for the whole time limit."""
    for found in pools(2).run(gradient_on_one_rank):
        assert "cp.roll, differentiable" in found
