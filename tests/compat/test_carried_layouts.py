"""The layout of a call comes from what carries it, and never from other tensors that happen to be sharded or alive."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import ringspan as rs
from ringspan.compat import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    context_parallel,
    context_parallel_unshard,
)
from tests.compat.jobs import assert_near, mesh_of_all, qkv, single_process
from tests.compat.test_balancers import documents_mask
from tests.conftest import Pools
from tests.meshes import cpu_mesh

N, BLOCK = 64, 8
DOCUMENTS = [[[8, 24, 32], [40, 24]], [[16, 48], [32, 8, 24]]]  # of two batches, for each row

Make = Callable[[BlockMask, list[list[int]], int], _LoadBalancer | None]
BALANCERS: dict[str, Make] = {
    "none": lambda mask, lengths, world: None,
    "head-tail": lambda mask, lengths, world: _HeadTailLoadBalancer(N, world, "cpu"),
    "per document": lambda mask, lengths, world: _PerDocumentHeadTailLoadBalancer(lengths, world, "cpu"),
    "round robin": lambda mask, lengths, world: _PTRRLoadBalancer(mask, world),
}


class Flex(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)


class Sdpa(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return F.scaled_dot_product_attention(*args, **kwargs)


def flex_style(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(Flex(), mesh, _ContextParallel(2, _ContextParallel.AttentionType.FLEX))


def sdpa_style(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(Sdpa(), mesh, _ContextParallel(2, _ContextParallel.AttentionType.SDPA))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    b, tokens = torch.arange(len(q)).reshape(-1, 1, 1, 1), torch.arange(N)
    allowed = mask.mask_mod(b, torch.zeros(1, 1, 1, 1, dtype=torch.int64), tokens[:, None], tokens)
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=allowed)


def head_tail(mesh: DeviceMesh) -> _HeadTailLoadBalancer:
    return _HeadTailLoadBalancer(N, mesh.size(), "cpu")


def clones(mesh: DeviceMesh, whole: list[torch.Tensor], balancer: _LoadBalancer | None) -> list[torch.Tensor]:
    """Shards as they arrive in a model: ``.clone()`` and ``.to()`` make tensors that nothing has been recorded of."""
    return [x.clone() for x in _context_parallel_shard(mesh, whole, [2] * 3, balancer)]


# -- a sharded BlockMask -----------------------------------------------------------------------------------------------


def inputs_first_masks_second(rank: int, name: str, last: str) -> None:
    """The mask is sharded in a call of its own. ``last`` says what is sharded last."""
    mesh, whole, mask = mesh_of_all(), qkv(N), documents_mask(DOCUMENTS[0], block=BLOCK)
    balancer = BALANCERS[name](mask, DOCUMENTS[0], mesh.size())
    if last == "inputs":
        (mask_shard,) = _context_parallel_shard(mesh, [mask], [2], balancer)
    q, k, v = clones(mesh, whole, balancer)
    if last != "inputs":
        (mask_shard,) = _context_parallel_shard(mesh, [mask], [2], balancer)
    others = clones(mesh, whole, None if balancer else head_tail(mesh)) if last == "others" else []
    out = flex_style(mesh)(q, k, v, block_mask=mask_shard)
    _cp_options.enable_load_balance = balancer is not None  # for unsharding, which has several orders to choose from
    assert_near(context_parallel_unshard(mesh, [out], [2], balancer)[0], dense(*whole, mask))
    del others


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("last", ["mask", "inputs", "others"])
@pytest.mark.parametrize("name", BALANCERS)
def test_a_mask_that_was_sharded_in_its_own_call(pools: Pools, name: str, last: str, world: int) -> None:
    pools(world).run(inputs_first_masks_second, name, last)


def two_batches_in_flight(rank: int, name: str) -> None:
    """Both are sharded before either is attended to, as in pipeline schedules. Each mask has a layout of its own."""
    mesh, attend = mesh_of_all(), flex_style(mesh_of_all())
    batches = []
    for lengths in DOCUMENTS:
        mask = documents_mask(lengths, block=BLOCK)
        balancer = BALANCERS[name](mask, lengths, mesh.size())
        whole = [x + len(batches) for x in qkv(N)]
        shards = clones(mesh, whole, balancer)
        (mask_shard,) = _context_parallel_shard(mesh, [mask], [2], balancer)
        batches.append((whole, mask, balancer, shards, mask_shard))
    for whole, mask, balancer, shards, mask_shard in batches:
        out = attend(*shards, block_mask=mask_shard)
        assert_near(context_parallel_unshard(mesh, [out], [2], balancer)[0], dense(*whole, mask))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", BALANCERS)
def test_two_batches_in_flight(pools: Pools, name: str, world: int) -> None:
    pools(world).run(two_batches_in_flight, name)


# -- SDPA, whose calls carry no layout ---------------------------------------------------------------------------------


def after_a_block(rank: int, balance: bool, when: str) -> None:
    """A context_parallel block of the same length, opened and closed, changes nothing for the tensors outside it."""
    mesh, whole = mesh_of_all(), qkv(N)
    balancer = head_tail(mesh) if balance else None

    def block() -> None:
        with context_parallel(mesh, buffers=[torch.arange(N)], buffer_seq_dims=[0]):
            pass

    if when == "before":
        block()
    q, k, v = clones(mesh, whole, balancer)
    if when == "after":
        block()
    results = {is_causal: sdpa_style(mesh)(q, k, v, is_causal=is_causal) for is_causal in (True, False)}
    if when == "before" and not balance:  # the block was in head-tail order, and its results may be unsharded as well
        with pytest.raises(rs.InputError, match=r"contiguous and zigzag.*load_balancer="):
            context_parallel_unshard(mesh, [results[True]], [2])
        _cp_options.enable_load_balance = False
    for is_causal, out in results.items():
        for given in (None, balancer):
            assert_near(context_parallel_unshard(mesh, [out], [2], given)[0], single_process(*whole, is_causal=is_causal)[0])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("balance", [True, False], ids=["balanced", "contiguous"])
def test_sdpa_after_a_block(pools: Pools, balance: bool, when: str, world: int) -> None:
    pools(world).run(after_a_block, balance, when)


def several_live_shardings(rank: int) -> None:
    """Results of any sharding are unsharded while others of the same order are referenced."""
    mesh, x = mesh_of_all(), torch.arange(N)
    for balancer in (head_tail(mesh), None):
        kept: list[torch.Tensor] = []
        _cp_options.enable_load_balance = balancer is not None
        for _ in range(2):
            kept += _context_parallel_shard(mesh, [x], [0], balancer)
            for mine in kept:
                assert torch.equal(context_parallel_unshard(mesh, [mine * 2], [0])[0], x * 2)
                assert torch.equal(context_parallel_unshard(mesh, [mine], [0])[0], x)


def earlier_shardings(rank: int, names: tuple[str, str]) -> None:
    """A length that was sharded in two orders. No call may take one order for the other, before or after an
    unsharding."""
    mesh, whole = mesh_of_all(), qkv(N)
    balancers = [None if name == "none" else head_tail(mesh) for name in names]
    first = clones(mesh, whole, balancers[0])
    assert torch.equal(context_parallel_unshard(mesh, first, [2] * 3)[0], whole[0])
    second = clones(mesh, whole, balancers[1])
    for shards, balancer in zip((first, second), balancers, strict=True):
        with pytest.raises(rs.InputError, match=r"contiguous and zigzag.*enable_load_balance.*load_balancer="):
            context_parallel_unshard(mesh, shards, [2] * 3)
        with pytest.raises(rs.InputError, match=r"contiguous and zigzag.*enable_load_balance"):
            sdpa_style(mesh)(*shards, is_causal=True)
        if balancer is not None:
            assert torch.equal(context_parallel_unshard(mesh, shards, [2] * 3, balancer)[0], whole[0])
    for shards, balancer in zip((first, second), balancers, strict=True):
        _cp_options.enable_load_balance = balancer is not None
        assert torch.equal(context_parallel_unshard(mesh, shards, [2] * 3)[0], whole[0])
        out = sdpa_style(mesh)(*shards, is_causal=True)
        assert_near(context_parallel_unshard(mesh, [out], [2])[0], single_process(*whole, is_causal=True)[0])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("names", [("head-tail", "none"), ("none", "head-tail")])
def test_an_earlier_sharding_in_another_order(pools: Pools, names: tuple[str, str], world: int) -> None:
    pools(world).run(earlier_shardings, names)


def after_an_assignment(rank: int) -> None:
    """An assignment says the order of the tensors until then. Later shardings in another order are ambiguous again."""
    mesh, x = mesh_of_all(), torch.arange(N)
    (contiguous,) = _context_parallel_shard(mesh, [x], [0])
    _cp_options.enable_load_balance = False
    _context_parallel_shard(mesh, [x], [0], head_tail(mesh))
    with pytest.raises(rs.InputError, match=r"contiguous and zigzag.*load_balancer="):
        context_parallel_unshard(mesh, [contiguous], [0])


def a_length_never_sharded(rank: int) -> None:
    """It is gathered as the switch says: head-tail if load balancing is on, else in rank order."""
    mesh = mesh_of_all()
    _context_parallel_shard(mesh, [torch.arange(N)], [0], head_tail(mesh))
    mine = torch.arange(4) + 4 * rank
    for balance in (True, False):
        _cp_options.enable_load_balance = balance
        order = torch.arange(4 * mesh.size())
        if balance:
            order = _HeadTailLoadBalancer(len(order), mesh.size(), "cpu")._generate_indices(restore=True)[0].long()
        assert torch.equal(context_parallel_unshard(mesh, [mine], [0])[0], order)


def ambiguous(rank: int, alive: bool) -> None:
    """Two shardings in flight with different layouts. Whether tensors of the other are alive makes no difference."""
    mesh, whole = mesh_of_all(), qkv(N)
    gc.disable()
    try:
        q, k, v = clones(mesh, whole, head_tail(mesh))
        others: list[Any] = clones(mesh, whole, None)
        if not alive:
            others.append(others)  # a cycle, which only the garbage collector frees
            del others
            if rank:
                gc.collect()
        with pytest.raises(rs.InputError, match=r"contiguous and zigzag.*enable_load_balance"):
            sdpa_style(mesh)(q, k, v, is_causal=True)
        everything = sdpa_style(mesh)(q, k, v)  # needs no order
        assert torch.equal(context_parallel_unshard(mesh, [q], [2], head_tail(mesh))[0], whole[0])
        _cp_options.enable_load_balance = True
        out = sdpa_style(mesh)(q, k, v, is_causal=True)
        for got, is_causal in ((out, True), (everything, False)):
            assert_near(context_parallel_unshard(mesh, [got], [2])[0], single_process(*whole, is_causal=is_causal)[0])
    finally:
        gc.enable()


def inside_a_block(rank: int) -> None:
    """A block has its own layout. Sharding a sequence of its length in another order raises while it is open."""
    mesh, whole = mesh_of_all(), qkv(N)
    _context_parallel_shard(mesh, [torch.arange(N)], [0], head_tail(mesh))
    q, k, v = (x.clone() for x in whole)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        out = F.scaled_dot_product_attention(q.clone(), k, v, is_causal=True)
        in_a_module = sdpa_style(mesh)(q.clone(), k, v, is_causal=True)
        with pytest.raises(rs.InputError, match=r"in the order of <Layout zigzag.*outside of the block"):
            clones(mesh, whole, None)
        vars(_cp_options)["enable_load_balance"] = False  # as _context_parallel_shard without a balancer sets it
        with (
            pytest.raises(rs.InputError, match=r"in the order of <Layout zigzag.*outside of the block"),
            context_parallel(mesh, buffers=[torch.arange(N)], buffer_seq_dims=[0]),
        ):
            raise AssertionError  # attention over the outer buffers would be computed in the order of the inner block
        shards = clones(mesh, whole, theirs._HeadTailLoadBalancer(N, mesh.size(), "cpu"))
        again = F.scaled_dot_product_attention(*shards, is_causal=True)
        other_length = _context_parallel_shard(mesh, [torch.arange(N // 2)], [0])[0]
    assert torch.equal(context_parallel_unshard(mesh, [other_length], [0])[0], torch.arange(N // 2))
    _cp_options.enable_load_balance = True
    for got in (out, in_a_module, again):
        assert_near(context_parallel_unshard(mesh, [got], [2])[0], single_process(*whole, is_causal=True)[0])


def results_of_a_block(rank: int) -> None:
    """They are not taken for tensors of their length that were sharded in another order, nor the opposite."""
    mesh, whole = mesh_of_all(), qkv(N)
    shards = clones(mesh, whole, None)
    _context_parallel_shard(mesh, [torch.arange(2 * N)], [0], _HeadTailLoadBalancer(2 * N, mesh.size(), "cpu"))
    q, k, v = (x.clone() for x in whole)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    of_shards = sdpa_style(mesh)(*shards, is_causal=True)
    for result in (out, of_shards):
        with pytest.raises(rs.InputError, match=r"contiguous and zigzag.*load_balancer="):
            context_parallel_unshard(mesh, [result], [2])
    assert_near(context_parallel_unshard(mesh, [out], [2], head_tail(mesh))[0], single_process(*whole, is_causal=True)[0])
    _cp_options.enable_load_balance = False
    assert_near(context_parallel_unshard(mesh, [of_shards], [2])[0], single_process(*whole, is_causal=True)[0])


def other_balancers(rank: int) -> None:
    """Neither an SDPA call nor an unsharding without a balancer can say that shards are in another order."""
    mesh, whole = mesh_of_all(), qkv(N)
    balancer = _PerDocumentHeadTailLoadBalancer([[16, 48]], mesh.size(), "cpu")
    q, k, v = _context_parallel_shard(mesh, whole, [2] * 3, balancer)
    with pytest.raises(rs.InputError, match=r"_PerDocumentHeadTailLoadBalancer.*BlockMask.*layout="):
        sdpa_style(mesh)(q, k, v, is_causal=True)
    with pytest.raises(rs.InputError, match=r"_PerDocumentHeadTailLoadBalancer.*load_balancer="):
        context_parallel_unshard(mesh, [q], [2])
    out = sdpa_style(mesh)(q, k, v)
    assert_near(context_parallel_unshard(mesh, [out], [2], balancer)[0], single_process(*whole, is_causal=False)[0])
    (contiguous,) = _context_parallel_shard(mesh, whole[:1], [2])
    with pytest.raises(rs.InputError, match=r"_PerDocumentHeadTailLoadBalancer.*load_balancer=.*enable_load_balance"):
        context_parallel_unshard(mesh, [contiguous], [2])
    _cp_options.enable_load_balance = False
    assert torch.equal(context_parallel_unshard(mesh, [contiguous], [2])[0], whole[0])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "job",
    [
        several_live_shardings,
        after_an_assignment,
        a_length_never_sharded,
        inside_a_block,
        results_of_a_block,
        other_balancers,
    ],
)
def test_calls_that_carry_no_layout(pools: Pools, job: Callable[..., None], world: int) -> None:
    pools(world).run(job)


@pytest.mark.parametrize("alive", [True, False])
def test_two_layouts_in_flight(pools: Pools, alive: bool) -> None:
    pools(2).run(ambiguous, alive)


def another_mesh(rank: int) -> None:
    """What some ranks shard over one mesh does not affect their calls over a mesh with more ranks."""
    whole, pairs = qkv(N), cpu_mesh((2, 2), ("dp", "cp"))
    if rank < 2:  # uneven shards, and shards of the other order
        _context_parallel_shard(pairs["cp"], qkv(9), [2] * 3)
        _context_parallel_shard(pairs["cp"], whole, [2] * 3)
    mesh = mesh_of_all()
    shards = clones(mesh, whole, head_tail(mesh))
    out = sdpa_style(mesh)(*shards, is_causal=True)
    assert_near(context_parallel_unshard(mesh, [out], [2])[0], single_process(*whole, is_causal=True)[0])


def test_another_mesh(pools: Pools) -> None:
    pools(4).run(another_mesh)
