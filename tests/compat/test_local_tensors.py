"""Sharding and the style with LocalTensors, by which torch simulates all ranks in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringspan.compat import (
    _context_parallel_shard,
    _ContextParallel,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    context_parallel_unshard,
)
from ringspan.torch_private.process_groups import on_each_simulated_rank

WORLD = 4


@pytest.fixture
def simulated_mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    with LocalTensorMode(WORLD):
        yield init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    dist.destroy_process_group()


def of_ranks(x: torch.Tensor) -> list[torch.Tensor]:
    assert isinstance(x, LocalTensor)
    return [x._local_tensors[rank] for rank in range(WORLD)]


HEAD_TAIL = _HeadTailLoadBalancer(32, WORLD, "cpu")
PER_DOCUMENT = _PerDocumentHeadTailLoadBalancer([[8, 24], [16, 16]], WORLD, "cpu")

# A balancer, and the tokens of each batch row in rank order.
CASES: dict[str, tuple[_LoadBalancer | None, list[list[int]]]] = {
    "none": (None, [list(range(32))] * 2),
    "head-tail": (HEAD_TAIL, HEAD_TAIL._generate_indices().tolist() * 2),
    "per document and row": (PER_DOCUMENT, PER_DOCUMENT._generate_indices().tolist()),
}


@pytest.mark.parametrize(("balancer", "order"), CASES.values(), ids=CASES)
def test_shard_and_unshard_all_ranks(
    simulated_mesh: DeviceMesh, balancer: _LoadBalancer | None, order: list[list[int]]
) -> None:
    x, positions = torch.randn(2, 32, 3), torch.arange(32).expand(2, 32)
    mine, here = _context_parallel_shard(simulated_mesh, [x, positions], [1, -1], balancer)
    assert torch.cat(of_ranks(here), dim=1).tolist() == order
    for shard, at in zip(of_ranks(mine), of_ranks(here), strict=True):
        assert torch.equal(shard, torch.stack([row[i] for row, i in zip(of_ranks(x)[0], at, strict=True)]))
    whole, *_ = context_parallel_unshard(simulated_mesh, [mine + 0], [1], balancer)
    assert all(torch.equal(every, of_ranks(x)[0]) for every in of_ranks(whole))


class Echo(nn.Module):
    def forward(self, *args: object, **kwargs: object) -> object:
        return args, kwargs


@pytest.mark.parametrize("kind", _ContextParallel.AttentionType)
def test_the_style_passes_arguments_on(simulated_mesh: DeviceMesh, kind: _ContextParallel.AttentionType) -> None:
    module = parallelize_module(Echo(), simulated_mesh, _ContextParallel(2, kind))
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    args, kwargs = module(q, k, value=v, is_causal=True)
    assert [x is y for x, y in zip(args, (q, k), strict=True)] == [True, True]
    assert kwargs["value"] is v
    assert kwargs["is_causal"] is True


def test_a_pytorch_without_local_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed._local_tensor", None)
    assert on_each_simulated_rank(unchanged) is unchanged


def unchanged() -> None: ...
