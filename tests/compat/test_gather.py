"""``flex_cp_allgather``: values, gradients, and PyTorch's checks of custom operators."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import ringspan as rs
from ringspan.compat import context_parallel_unshard, flex_cp_allgather, flex_cp_allgather_backward
from tests.compat.jobs import mesh_of_all
from tests.conftest import Pools


def passes_opcheck(rank: int) -> None:
    """Run by test_torchs_cases.py, as PyTorch's file has this case."""
    name = c10d._get_process_group_name(mesh_of_all().get_group())
    for grad in (False, True):
        for dim in (2, -1):
            k, v = torch.randn(2, 3, 4, 5, requires_grad=grad), torch.randn(2, 3, 4, 5, requires_grad=grad)
            torch.library.opcheck(flex_cp_allgather, (k, v, dim, name))


def gathers_keys_and_sums_gradients(rank: int) -> None:
    mesh = mesh_of_all()
    name, world = c10d._get_process_group_name(mesh.get_group()), mesh.size()
    k, v = (torch.full((1, 2, 3, d), float(rank)).requires_grad_() for d in (4, 6))
    whole_k, whole_v = flex_cp_allgather(k, v, 2, name)
    assert whole_k.shape == (1, 2, 3 * world, 4)
    assert whole_v.shape == (1, 2, 3 * world, 6)
    assert whole_k[0, 0, :, 0].tolist() == [float(r) for r in range(world) for _ in range(3)]
    weight = torch.arange(3.0 * world)[:, None] * (rank + 1)
    (whole_k * weight).sum().backward()
    assert k.grad is not None
    assert torch.equal(k.grad[0, 1, :, 2], torch.arange(3.0 * rank, 3.0 * rank + 3) * sum(range(1, world + 1)))
    with pytest.raises(rs.InputError, match="only equal shards can be gathered"):
        flex_cp_allgather(*[torch.zeros(1, 1, 2 + rank % 2, 4)] * 2, 2, name)
    weights = weight.expand(1, 2, -1, -1).contiguous()
    grad_k, grad_v = flex_cp_allgather_backward(weights, 2 * weights, 2, name)  # what autograd calls
    assert torch.equal(
        grad_k, torch.arange(3.0 * world)[3 * rank : 3 * rank + 3, None].expand(1, 2, 3, 1) * sum(range(world + 1))
    )
    assert torch.equal(grad_v, 2 * grad_k)


def errors_name_the_operation(rank: int) -> None:
    mesh = mesh_of_all()
    name = c10d._get_process_group_name(mesh.get_group())
    k = torch.zeros(1, 1, 2, 4)
    with patch.object(dist, "batch_isend_irecv", side_effect=RuntimeError("Invalid scalar type")):
        with pytest.raises(rs.TransportError, match="context_parallel_unshard failed"):
            context_parallel_unshard(mesh, [k], [2])
        with pytest.raises(rs.TransportError, match="flex_cp_allgather failed"):
            flex_cp_allgather(k, k, 2, name)


def test_errors_name_the_operation(pools: Pools) -> None:
    pools(2).run(errors_name_the_operation)


@pytest.mark.parametrize("world", [2, 4])
def test_gathers_keys_and_sums_gradients(pools: Pools, world: int) -> None:
    pools(world).run(gathers_keys_and_sums_gradients)
