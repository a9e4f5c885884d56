"""A ``context_parallel`` block belongs to its task: other tasks, threads and callers of generators are not inside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.compat import _context_parallel_shard, context_parallel, context_parallel_unshard
from ringspan.compat.meshes import innermost_block
from ringspan.layouts import zigzag
from tests.compat.jobs import assert_near, mesh_of_all, qkv, single_process
from tests.conftest import Pools

N = 32


def head_tail_of(rank: int, world: int, n: int) -> Tensor:
    return torch.from_numpy(zigzag(rs.full(n), world).positions(rank))


async def with_its_own_block(mesh: DeviceMesh, n: int, waits: int) -> None:
    """Open a block, let the other tasks run, and use the block's order."""
    whole, positions = qkv(n), torch.arange(n)
    want, _ = single_process(*whole, is_causal=True)
    q, k, v = (x.clone() for x in whole)
    with context_parallel(mesh, buffers=[q, k, v, positions], buffer_seq_dims=[2, 2, 2, 0]):
        for _ in range(waits):
            await asyncio.sleep(0)
        assert list(innermost_block(mesh) or ()) == [n]
        assert torch.equal(context_parallel_unshard(mesh, [positions], [0])[0], torch.arange(n))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        (got,) = context_parallel_unshard(mesh, [out], [2])
        assert_near(got, want)
    assert innermost_block(mesh) is None


async def without_a_block(mesh: DeviceMesh, n: int, waits: int) -> None:
    """Shard in sequence order while other tasks are inside blocks of the same length."""
    for _ in range(waits):
        await asyncio.sleep(0)
    assert innermost_block(mesh) is None
    (shard,) = _context_parallel_shard(mesh, [torch.arange(n)], [0])
    assert torch.equal(shard, torch.arange(n).chunk(mesh.size())[mesh.get_local_rank()])
    (got,) = context_parallel_unshard(mesh, [shard], [0])
    assert torch.equal(got, torch.arange(n))


def tasks(rank: int, waits: tuple[int, int, int]) -> None:
    mesh = mesh_of_all()

    async def main() -> None:
        await asyncio.gather(
            with_its_own_block(mesh, N, waits[0]),
            with_its_own_block(mesh, 2 * N, waits[1]),
            without_a_block(mesh, N, waits[2]),
        )

    asyncio.run(main())
    assert innermost_block(mesh) is None


@pytest.mark.parametrize("waits", [(3, 1, 0), (1, 3, 0), (2, 2, 1)])
def test_tasks_have_their_own_blocks(pools: Pools, waits: tuple[int, int, int]) -> None:
    """The first block is left last, first, and while a task that has no block runs in between."""
    pools(2).run(tasks, waits)


def in_a_generator(rank: int) -> None:
    mesh = mesh_of_all()

    def batches() -> Iterator[Tensor]:
        positions = torch.arange(N)
        with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
            yield positions.clone()

    generator = batches()
    shard = next(generator)
    assert torch.equal(shard, head_tail_of(rank, mesh.size(), N))
    with pytest.raises(rs.UnplannedAttention, match=r"sharding was called while the generator .*batches is suspended"):
        context_parallel_unshard(mesh, [shard], [0])
    next(generator, None)
    assert torch.equal(context_parallel_unshard(mesh, [shard], [0])[0], torch.arange(N))


def test_a_suspended_generator_does_not_lend_its_block(pools: Pools) -> None:
    pools(2).run(in_a_generator)


def left_by_an_error(rank: int) -> None:
    mesh, positions = mesh_of_all(), torch.arange(N)
    with pytest.raises(ZeroDivisionError), context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
        raise ZeroDivisionError
    assert innermost_block(mesh) is None
    assert torch.equal(positions, torch.arange(N))


def test_an_error_closes_the_block(pools: Pools) -> None:
    pools(2).run(left_by_an_error)
