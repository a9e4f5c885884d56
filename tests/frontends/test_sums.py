"""Losses over several axes of a mesh: the value and the gradient of the one mean that a single process would have taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ringspan as rs
from ringspan.frontends import sums
from ringspan.testing.assertions import assert_close
from ringspan.transports import collectives
from tests.conftest import Pools
from tests.engine.test_memory import MemoryCounter
from tests.meshes import cpu_mesh

N, REPLICAS, CP = 13, 2, 2

OVER: dict[str, Callable[[DeviceMesh], Any]] = {
    "two axes": lambda mesh: mesh["dp", "cp"],
    "flattened": lambda mesh: mesh["dp", "cp"]._flatten(),
    "process group": lambda mesh: torch.distributed.group.WORLD,
}


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Token losses of two batches, one with many tokens that count and one with few; and a parameter."""
    torch.manual_seed(0)
    x = torch.randn(REPLICAS, 3, N, dtype=torch.float64)
    weights = (torch.rand(REPLICAS, 3, N) < torch.tensor([0.9, 0.2]).view(2, 1, 1)).double()
    return x, weights, torch.tensor(1.5, dtype=torch.float64, requires_grad=True)


def replica_of(mesh: DeviceMesh) -> int:
    return mesh.get_local_rank("dp")


def mean_over_replicas(rank: int, over: str, grads: str) -> tuple[float, float]:
    mesh = cpu_mesh((REPLICAS, CP), ("dp", "cp"))
    cp = rs.ContextParallel(mesh["cp"], rs.causal(N))
    x, weights, scale = data()
    mine, w = cp.shard(x[replica_of(mesh)], weights[replica_of(mesh)], dim=1)
    ranks = OVER[over](mesh)
    loss = cp.mean((mine * scale).square(), w, over=ranks, grads=grads)  # type: ignore[arg-type]
    loss.backward()
    cp.sum_gradients([scale], over=ranks)
    assert scale.grad is not None
    return loss.item(), scale.grad.item() / (1 if grads == "summed" else REPLICAS * CP)


@pytest.mark.parametrize("grads", ["summed", "averaged"])
@pytest.mark.parametrize("over", OVER)
def test_the_mean_is_over_all_replicas(pools: Pools, over: str, grads: str) -> None:
    x, weights, scale = data()
    loss = ((x * scale).square() * weights).sum() / weights.sum()
    (gradient,) = torch.autograd.grad(loss, scale)
    for got in pools(REPLICAS * CP).run(mean_over_replicas, over, grads):
        assert got == pytest.approx((loss.item(), gradient.item()), rel=1e-14)


def batches_accumulated(rank: int) -> tuple[float, float]:
    cp = rs.ContextParallel(None, rs.causal(N))
    x, weights, scale = data()
    total = weights.sum()
    losses = []
    for batch, counts in zip(x, weights, strict=True):
        mine, w = cp.shard(batch, counts, dim=1)
        loss = cp.sum((mine * scale).square() * w) / total
        loss.backward()
        losses.append(loss.item())
    cp.sum_gradients([scale])
    assert scale.grad is not None
    return sum(losses), scale.grad.item()


def test_accumulated_sums_are_the_mean_over_all_batches(pools: Pools) -> None:
    x, weights, scale = data()
    loss = ((x * scale).square() * weights).sum() / weights.sum()
    (gradient,) = torch.autograd.grad(loss, scale)
    for got in pools(4).run(batches_accumulated):
        assert got == pytest.approx((loss.item(), gradient.item()), rel=1e-14)


def gradients_of_split_parameters(rank: int) -> tuple[list[float], list[float]]:
    mesh = cpu_mesh((2, 2), ("cp", "tp"))
    cp = rs.ContextParallel(mesh["cp"], rs.causal(N))

    def split(x: Tensor) -> DTensor:
        return DTensor.from_local(x, mesh["tp"], [Shard(0)])

    used, elsewhere = (torch.nn.Parameter(split(torch.zeros(2))) for _ in range(2))
    used.grad = split(torch.full((2,), rank + 1.0))
    elsewhere.grad = split(torch.full((2,), rank + 1.0)) if cp.rank == 0 else None
    cp.sum_gradients([used, elsewhere])
    assert isinstance(used.grad, DTensor)
    assert isinstance(elsewhere.grad, DTensor)
    return used.grad.to_local().tolist(), elsewhere.grad.to_local().tolist()


def test_gradients_of_dtensor_parameters(pools: Pools) -> None:
    """Ranks 0 and 2 share one half of the parameter, 1 and 3 the other."""
    found = pools(4).run(gradients_of_split_parameters)
    assert found == [([4.0] * 2, [1.0] * 2), ([6.0] * 2, [2.0] * 2)] * 2


# -- precision and memory of sum_gradients -----------------------------------------------------------------------------


def half_precision_gradients(rank: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The summed gradients of one contiguous and one transposed parameter, and this rank's own."""
    sums.BUCKET_BYTES = 64  # several buckets, and gradients that span two
    torch.manual_seed(rank)
    parameters = [torch.nn.Parameter(torch.zeros(n, 3, dtype=dtype)) for n in (1, 5, 20)]
    parameters.append(torch.nn.Parameter(torch.zeros(4, 5, dtype=dtype).t()))
    own = [torch.randn(p.shape) * 8 ** torch.randint(0, 4, p.shape) for p in parameters]
    own = [x.to(dtype) for x in own]
    for p, x in zip(parameters, own, strict=True):
        p.grad = torch.empty_like(p).copy_(x)
    rs.ContextParallel(None, rs.causal(N)).sum_gradients(parameters)
    sums.BUCKET_BYTES = 32 * 2**20
    return [p.grad for p in parameters if p.grad is not None], own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_are_summed_in_float32_and_rounded_once(pools: Pools, dtype: torch.dtype) -> None:
    results = pools(3).run(half_precision_gradients, dtype)
    for i in range(4):
        exact = torch.stack([own[i].double() for _, own in results]).sum(0)
        for summed, _ in results:
            assert summed[i].dtype == dtype
            if dtype == torch.float32:
                assert_close(summed[i].double(), exact, atol=1e-3)
            else:  # sums of three values of 11 bits are exact in float32, but for the smallest
                assert torch.equal(summed[i], exact.float().to(dtype))


def gradients_with_other_strides_on_rank_1(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Summed gradients, all but the last transposed on rank 1 only: two small, one larger than a bucket, one small."""
    sums.BUCKET_BYTES = 64
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((2, 3), (2, 2), (9, 5), (3,))]
    for i, p in enumerate(parameters):
        values = torch.arange(p.numel(), dtype=dtype).view(p.shape) + 8 * i + rank
        p.grad = values.t().contiguous().t() if rank == 1 else values
    rs.ContextParallel(None, rs.causal(N)).sum_gradients(parameters)
    sums.BUCKET_BYTES = 32 * 2**20
    return [p.grad for p in parameters if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ranks_may_hold_a_gradient_with_different_strides(pools: Pools, dtype: torch.dtype) -> None:
    for summed in pools(2).run(gradients_with_other_strides_on_rank_1, dtype):
        for i, (x, shape) in enumerate(zip(summed, ((2, 3), (2, 2), (9, 5), (3,)), strict=True)):
            expected = 2 * torch.arange(x.numel(), dtype=torch.float64).view(shape) + 16 * i + 1
            assert torch.equal(x.double(), expected.to(dtype).double())


PIECE = 512  # elements


def sum_tied_weights(rank: int) -> list[float]:
    """A weight that two modules share is given twice. It is larger than a bucket, so it is summed where it is."""
    weight = torch.nn.Parameter(torch.zeros(sums.BUCKET_BYTES // 4 + 1))
    weight.grad = torch.ones_like(weight)
    rs.ContextParallel(None, rs.causal(N)).sum_gradients([weight, weight])
    return weight.grad[:1].tolist()


def test_tied_weights_are_summed_once(pools: Pools) -> None:
    assert pools(2).run(sum_tied_weights) == [[2.0], [2.0]]


def extra_memory_of_sum_gradients(rank: int, dtype: torch.dtype, size: int) -> int:
    sums.BUCKET_BYTES = 2**16
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for _ in range(8)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    cp = rs.ContextParallel(None, rs.causal(N))
    collectives.SMALL, collectives.PIECE = PIECE, PIECE
    with MemoryCounter([x for p in parameters for x in (p, p.grad) if x is not None]) as memory:
        cp.sum_gradients(parameters)
    sums.BUCKET_BYTES = 32 * 2**20
    collectives.SMALL, collectives.PIECE = 4096, 2**20
    assert all(p.grad is not None and (p.grad == 2).all() for p in parameters)
    return memory.peak


@pytest.mark.parametrize(
    ("dtype", "size", "extra"),
    [(torch.bfloat16, 2**17, 2**16), (torch.float32, 2**17, 0), (torch.float32, 100, 2**16)],
    ids=["half precision", "in place", "small"],
)
def test_summing_gradients_needs_one_bucket_of_memory(pools: Pools, dtype: torch.dtype, size: int, extra: int) -> None:
    buffers = 4 * 2 * PIECE  # of the all-reduce: what the peer has sent, and the sum
    for peak in pools(2).run(extra_memory_of_sum_gradients, dtype, size):
        assert extra <= peak <= extra + buffers


def error_for_other_words(rank: int) -> str:
    try:
        rs.ContextParallel(None, rs.causal(N)).mean(torch.ones(3), grads="average")  # type: ignore[arg-type]
    except rs.InputError as error:
        return str(error)
    return "nothing"


def test_an_unknown_way_to_combine_gradients_is_refused(pools: Pools) -> None:
    assert all(said.startswith('grads must be "summed" or "averaged"') for said in pools(2).run(error_for_other_words))
