"""Every test case of PyTorch's ``test/distributed/tensor/test_attention.py``, under its name, on CPUs over gloo.

The cases of the hooks of ``_ContextParallel`` are in ``test_torchs_hooks.py``.

PyTorch's file needs several GPUs. Here each case runs over 2 and 4 processes, against float64 attention of one process.
``docs/compat.md`` lists where the expectations differ, and why. The classes have the names of PyTorch's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ringspan.compat import (
    _CausalBehavior,
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    _is_causal_behavior,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    _RotateMethod,
    context_parallel,
    context_parallel_unshard,
    register_cp_sharding_rules,
    set_rotate_method,
    unregister_cp_sharding_rules,
)
from tests.compat.jobs import assert_near, mesh_of_all, qkv, single_process
from tests.compat.test_gather import passes_opcheck
from tests.compat.test_local_tensors import simulated_mesh  # noqa: F401 (a fixture)
from tests.conftest import Pools

ROTATIONS = {"allgather": _RotateMethod.ALL_GATHER, "alltoall": _RotateMethod.ALL_TO_ALL}
DIM = 2  # of the tokens


class SdpaModule(nn.Module):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        sdpa = F.scaled_dot_product_attention
        self.sdpa = torch.compile(sdpa, fullgraph=True, backend="aot_eager") if compiled else sdpa

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return self.sdpa(*args, **kwargs)


def ring_attention_sdpa(rank: int, cases: list[dict[str, Any]]) -> None:
    """All cases one after the other in the same processes, as in PyTorch's file: none may affect the next."""
    torch._dynamo.reset()  # PyTorch limits how often one function is compiled, in all jobs of a worker together
    for case in cases:
        _ring_attention_sdpa(mesh_of_all(), **case)


def _ring_attention_sdpa(
    mesh: DeviceMesh,
    *,
    is_causal: bool,
    compiled: bool,
    load_balance: bool,
    rotation: str,
    forward_only: bool,
    use_context: bool,
) -> None:
    set_rotate_method(rotation)
    assert _cp_options.rotate_method is ROTATIONS[rotation]
    whole = qkv(32 * mesh.size())
    want, want_grads = single_process(*whole, is_causal=is_causal)
    q, k, v = (x.clone() for x in whole)
    if use_context:
        _cp_options.enable_load_balance = load_balance
        context = context_parallel(mesh, buffers=(q, k, v), buffer_seq_dims=(DIM,) * 3)
        context.__enter__()
        attention: Any = SdpaModule(compiled)
    else:
        style = _ContextParallel(seq_dim=DIM, attention_type=_ContextParallel.AttentionType.SDPA)
        attention = parallelize_module(SdpaModule(compiled), mesh, style)
        balancer = _HeadTailLoadBalancer(q.size(DIM), mesh.size(), q.device) if load_balance else None
        q, k, v = _context_parallel_shard(mesh, (q, k, v), (DIM,) * 3, load_balancer=balancer)
        _enable_context_parallel_dispatcher()
    for x in (q, k, v):
        x.requires_grad = True
    with torch.set_grad_enabled(not forward_only):
        out = attention(q, k, v, is_causal=is_causal)
    if not forward_only:
        out.square().sum().backward()
    grads = [x.grad for x in (q, k, v)]
    for x in (q, k, v):
        x.requires_grad = False
    if use_context:
        context.__exit__(None, None, None)
    else:
        _disable_context_parallel_dispatcher()
    (got,) = context_parallel_unshard(mesh, [out], [DIM])
    assert_near(got, want)
    if not forward_only:
        got_grads = context_parallel_unshard(mesh, grads, [DIM] * 3)
        for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
            assert_near(got_grad, want_grad)


def sdpa_of_a_short_sequence(rank: int) -> None:
    """As many tokens as ranks, and lengths that 2 × ranks do not divide. The switch is as before after the block."""
    mesh = mesh_of_all()
    for tokens, balance in product((mesh.size(), 3 * mesh.size(), 2 * mesh.size() + 1), (True, False)):
        _cp_options.enable_load_balance = balance
        want, want_grads = single_process(*qkv(tokens), is_causal=True)
        buffers = qkv(tokens)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[DIM] * 3):
            for x in buffers:
                x.requires_grad = True
            out = F.scaled_dot_product_attention(*buffers, is_causal=True)
            out.square().sum().backward()
            got, *got_grads = context_parallel_unshard(mesh, [out, *(x.grad for x in buffers)], [DIM] * 4)
            for x in buffers:
                x.requires_grad = False
        assert _cp_options.enable_load_balance is balance
        for one, expected in zip((got, *got_grads), (want, *want_grads), strict=True):
            assert_near(one, expected)


def check_causal_behavior() -> None:
    causal, everything, nothing = _CausalBehavior.IS_CAUSAL, _CausalBehavior.NOT_IS_CAUSAL, _CausalBehavior.SKIP
    for balance, table in ((False, [[causal, nothing], [causal, everything]]), (True, [[causal, everything]] * 2)):
        _cp_options.enable_load_balance = balance
        assert _is_causal_behavior(rank=0, world_size=4, i=0, is_causal=False) is everything
        for rank, i in product(range(2), range(2)):
            assert _is_causal_behavior(rank=rank, world_size=2, i=i, is_causal=True) is table[rank][i]
    _cp_options.enable_load_balance = True


class TestRingAttention:
    @pytest.mark.parametrize("world", [2, 4])
    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_ring_attention_sdpa(self, pools: Pools, compiled: bool, world: int) -> None:
        """PyTorch skips the compiled cases. Compiled modules are tested in test_compiled_style.py."""
        cases = [
            {
                "is_causal": is_causal,
                "compiled": compiled,
                "load_balance": balance,
                "rotation": rotation,
                "forward_only": forward_only,
                "use_context": use_context,
            }
            for is_causal, balance, rotation, forward_only, use_context in product(
                (True, False), (True, False), ROTATIONS, (True, False), (True, False)
            )
        ]
        pools(world).run(ring_attention_sdpa, cases)

    def test_is_causal_behavior(self) -> None:
        check_causal_behavior()

    @pytest.mark.parametrize("world", [2, 4])
    def test_context_parallel_sdpa_short_sequence(self, pools: Pools, world: int) -> None:
        pools(world).run(sdpa_of_a_short_sequence)


# -- FlexAttention -----------------------------------------------------------------------------------------------------


class FlexModule(nn.Module):
    flex = staticmethod(torch.compile(flex_attention))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.flex(*args, **kwargs)


def causal_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def random_lengths(total: int, documents: int, chunk: int, seed: int) -> list[int]:
    """Random lengths with this sum, each a multiple of ``chunk``."""
    cuts = sorted(random.Random(seed).sample(range(1, total // chunk), documents - 1))
    return [(b - a) * chunk for a, b in zip([0, *cuts], [*cuts, total // chunk], strict=True)]


def document_mask(lengths: list[list[int]]) -> Any:
    """Causal attention within each document, for each row of the batch."""
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    starts = torch.stack([torch.tensor([0, *accumulate(row)])[:-1] for row in lengths])

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        of_q, of_k = ids[b, q], ids[b, k]
        return (of_q == of_k) & causal_mask(b, h, q - starts[b, of_q], k - starts[b, of_k])

    return mask_mod


BALANCERS: dict[str, Callable[[int, int, list[list[int]], BlockMask], _LoadBalancer | None]] = {
    "none": lambda n, world, lengths, mask: None,
    "_HeadTailLoadBalancer": lambda n, world, lengths, mask: _HeadTailLoadBalancer(n, world, torch.device("cpu")),
    "_PerDocumentHeadTailLoadBalancer": lambda n, world, lengths, mask: _PerDocumentHeadTailLoadBalancer(
        lengths, world, torch.device("cpu")
    ),
    "_PTRRLoadBalancer": lambda n, world, lengths, mask: _PTRRLoadBalancer(mask, world),
}


def dense(whole: list[torch.Tensor], mask_mod: Any) -> list[torch.Tensor]:
    """Out, lse and the gradients of the sum of out, in float64."""
    q, k, v = (x.double().requires_grad_() for x in whole)
    n, rows = torch.arange(q.shape[DIM]), torch.arange(len(q)).reshape(-1, 1, 1, 1)
    allowed = mask_mod(rows, torch.zeros(1, 1, 1, 1, dtype=torch.int64), n[:, None], n)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, float("-inf"))
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    return [x.detach() for x in (out, lse, *torch.autograd.grad(out.sum(), (q, k, v)))]


def cp_flex_attention(rank: int, n: int, name: str, batch: int, documents: int) -> None:
    mesh = mesh_of_all()
    world, whole = mesh.size(), qkv(n, batch=batch, heads=2)
    lengths = [random_lengths(n, documents, 2 * world, seed) for seed in range(batch)] if documents else []
    mask_mod = document_mask(lengths) if documents else causal_mask
    want = dense(whole, mask_mod)
    block_mask = create_block_mask(mask_mod, B=batch if documents else 1, H=1, Q_LEN=n, KV_LEN=n, device="cpu")
    balancer = BALANCERS[name](n, world, lengths, block_mask)
    module = FlexModule()
    parallelize_module(module, mesh, _ContextParallel(DIM, _ContextParallel.AttentionType.FLEX))
    *tensors, mask_shard = _context_parallel_shard(
        mesh, [*(x.clone() for x in whole), block_mask], [DIM] * 4, load_balancer=balancer
    )
    for x in tensors:
        x.requires_grad = True
    out, aux = module(*tensors, block_mask=mask_shard, return_aux=AuxRequest(lse=True))
    out.sum().backward()
    results = [out, aux.lse, *(x.grad for x in tensors)]
    got = context_parallel_unshard(mesh, buffers=results, seq_dims=[DIM] * 5, load_balancer=balancer)
    for one, expected in zip(got, want, strict=True):
        assert_near(one, expected)


class TestCPFlexAttention:
    @pytest.mark.parametrize("world", [2, 4])
    @pytest.mark.parametrize("name", ["none", "_HeadTailLoadBalancer", "_PTRRLoadBalancer"])
    @pytest.mark.parametrize("blocks", [1, 0.5], ids=["a block a rank", "half a block a rank"])
    def test_cp_flex_attention_causal_mask(self, pools: Pools, blocks: float, name: str, world: int) -> None:
        """PyTorch raises NotImplementedError for less than a block a rank. Here these lengths work."""
        pools(world).run(cp_flex_attention, int(128 * blocks) * world, name, 1, 0)

    @pytest.mark.parametrize("world", [2, 4])
    @pytest.mark.parametrize("name", BALANCERS)
    @pytest.mark.parametrize("batch", [2, 4])
    def test_cp_flex_attention_document_mask(self, pools: Pools, batch: int, name: str, world: int) -> None:
        pools(world).run(cp_flex_attention, 128 * world, name, batch, 28)


# -- the operator ------------------------------------------------------------------------------------------------------


class TestCPCustomOps:
    @pytest.mark.parametrize("world", [2, 4])
    def test_flex_cp_custom_op(self, pools: Pools, world: int) -> None:
        pools(world).run(passes_opcheck)


# -- sharding ----------------------------------------------------------------------------------------------------------


def head_and_tail(x: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    chunks = x.chunk(2 * world, dim)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], dim)


def sharded(mesh: DeviceMesh, positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions and their shard, which is sharded together with q, k and v."""
    n = positions.shape[dim]
    rest = [torch.ones(4, n) for _ in range(3)]
    balancer = _HeadTailLoadBalancer(n, mesh.size(), torch.device("cpu"))
    shard, *others = _context_parallel_shard(mesh, [positions, *rest], [dim, 1, 1, 1], load_balancer=balancer)
    assert all(other.shape == (4, n // mesh.size()) for other in others)
    return positions, shard


def context_parallel_shard(rank: int, expanded: bool) -> None:
    mesh = mesh_of_all()
    positions, dim = (torch.arange(32).expand(4, 32), 1) if expanded else (torch.arange(32), 0)
    whole, shard = sharded(mesh, positions, dim)
    assert torch.equal(shard, head_and_tail(whole, dim, rank, mesh.size()))


def attention_shard_without_cp(rank: int) -> None:
    """Outside a block, attention of DTensors is PyTorch's, and the registered rules do not change it.

    On CUDA, PyTorch's test finds a result that is not split over the tokens. On CPUs SDPA is decomposed into operators
    that keep the queries split and gather the keys, so the values are compared.
    """
    mesh, whole = mesh_of_all(), qkv(64)
    tensors = [distribute_tensor(x, mesh, [Shard(2)]) for x in whole]
    with sdpa_kernel(SDPBackend.MATH):
        expected, _ = single_process(*whole, is_causal=False)
        register_cp_sharding_rules()
        for _ in range(2):
            out = F.scaled_dot_product_attention(*tensors)
            assert isinstance(out, DTensor)
            assert_near(out.full_tensor(), expected)
            unregister_cp_sharding_rules(clear_the_cache=True)


class TestSharding:
    @pytest.mark.parametrize("world", [2, 4])
    def test_context_parallel_shard(self, pools: Pools, world: int) -> None:
        pools(world).run(context_parallel_shard, False)

    @pytest.mark.parametrize("world", [2, 4])
    def test_context_parallel_shard_with_positions(self, pools: Pools, world: int) -> None:
        pools(world).run(context_parallel_shard, True)

    @pytest.mark.parametrize("world", [2, 4])
    def test_attention_shard_without_cp(self, pools: Pools, world: int) -> None:
        pools(world).run(attention_shard_without_cp)


class TestWithLocalTensor:
    """The cases that PyTorch repeats with LocalTensors, which simulate all ranks in one process."""

    def test_is_causal_behavior(self, simulated_mesh: DeviceMesh) -> None:  # noqa: F811
        check_causal_behavior()

    @pytest.mark.parametrize("expanded", [False, True])
    def test_context_parallel_shard(self, simulated_mesh: DeviceMesh, expanded: bool) -> None:  # noqa: F811
        positions, dim = (torch.arange(32).expand(4, 32), 1) if expanded else (torch.arange(32), 0)
        whole, shard = sharded(simulated_mesh, positions, dim)
        assert isinstance(shard, LocalTensor)
        for rank, of_rank in shard._local_tensors.items():
            expected = head_and_tail(whole._local_tensors[rank], dim, rank, simulated_mesh.size())
            assert torch.equal(of_rank, expected)
