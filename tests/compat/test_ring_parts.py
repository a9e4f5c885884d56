"""torch's parts of a ring: rotaters, the merger, ``_templated_ring_attention``, ``_create_cp_block_mask``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

import ringspan as rs
from ringspan.compat import (
    _AllGatherRotater,
    _AllToAllRotater,
    _context_parallel_shard,
    _create_cp_block_mask,
    _create_rotater,
    _HeadTailLoadBalancer,
    _RingRotater,
    _RotateMethod,
    _SDPAMerger,
    _templated_ring_attention,
    _templated_ring_attention_backward,
    context_parallel_unshard,
)
from tests.compat.jobs import assert_near, mesh_of_all, options, qkv, single_process
from tests.compat.test_block_masks import cells
from tests.conftest import Pools


def rotate(rank: int, method: _RotateMethod | None) -> None:
    mesh = mesh_of_all()
    rotater, mine = _create_rotater(mesh.get_group(), 2, method), torch.arange(6.0) + 10 * rank
    assert isinstance(rotater, _RingRotater)
    assert type(rotater) is (_AllToAllRotater if method is _RotateMethod.ALL_TO_ALL else _AllGatherRotater)
    buffer = mine
    for i in range(1, mesh.size()):
        rotater.exchange_buffers(buffer)
        buffer = rotater.next_buffer()
        assert torch.equal(buffer, torch.arange(6.0) + 10 * ((rank - i) % mesh.size()))
    with pytest.raises(ValueError, match="call exchange_buffers first"):
        _create_rotater(mesh.get_group(), 2, method).next_buffer()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", [*_RotateMethod, None])
def test_rotaters(pools: Pools, method: _RotateMethod | None, world: int) -> None:
    pools(world).run(rotate, method)


def test_an_unknown_rotate_method_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="use a member of _RotateMethod"):
        _create_rotater(None, 2, "ring")  # type: ignore[arg-type]


def parts_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q @ k.mT
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("has_last_dim", [False, True], ids=["lse", "cuDNN's lse"])
@pytest.mark.parametrize("partial", [False, True])
def test_the_merger(partial: bool, has_last_dim: bool) -> None:
    """``partial``: the second keys are seen by the second half of the queries only."""
    q, k, v = (x.double() for x in qkv(8))
    whole, first_half = parts_of(q, k, v), parts_of(q[:, :, :4], k[:, :, :4], v[:, :, :4])
    merger = _SDPAMerger(convert_to_f32=False, seq_dim=2)
    for keys, queries in ((slice(0, 4), slice(None)), (slice(4, 8), slice(4, 8) if partial else slice(None))):
        out, lse = parts_of(q[:, :, queries], k[:, :, keys], v[:, :, keys])
        merger.step(out, lse[..., None] if has_last_dim else lse, partial=partial and keys.start > 0)
    expected = [torch.cat([a, b[:, :, 4:]], dim=2) if partial else b for a, b in zip(first_half, whole, strict=True)]
    out, lse = merger.results()
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1][..., None] if has_last_dim else expected[1])


def test_the_merger_rounds_once() -> None:
    q, k, v = (x.bfloat16() for x in qkv(64))
    merged = {}
    for convert in (True, False):
        merger = _SDPAMerger(convert_to_f32=convert, seq_dim=2)
        with pytest.raises(ValueError, match="call step first"):
            merger.results()
        for i in range(0, 64, 4):
            merger.step(*parts_of(q, k[:, :, i : i + 4], v[:, :, i : i + 4]), partial=False)
        merged[convert] = merger.results()
        assert [x.dtype for x in merged[convert]] == [torch.bfloat16, torch.bfloat16]
    expected, _ = parts_of(*(x.double() for x in (q, k, v)))
    errors = {convert: (out.double() - expected).abs().mean() for convert, (out, _) in merged.items()}
    assert errors[True] < errors[False]


def ring_attention(rank: int, is_causal: bool, balance: bool, rotation: str) -> None:
    mesh, whole = mesh_of_all(), qkv(16)
    want, want_grads = single_process(*whole, is_causal=is_causal)
    balancer = _HeadTailLoadBalancer(16, mesh.size(), "cpu") if balance else None
    q, k, v = _context_parallel_shard(mesh, whole, [2] * 3, balancer)
    with options(rotation=rotation):
        group, op = mesh.get_group(), F.scaled_dot_product_attention
        out, lse = _templated_ring_attention(group, 2, op, q, k, v, is_causal=is_causal, dropout_p=0.0)
        grads = _templated_ring_attention_backward(
            group, 2, op, 2 * out, "grad_out", q, k, v, out, lse, is_causal, dropout_p=0.0, scale=None
        )
        scaled, _ = _templated_ring_attention(group, 2, op, q, k, v, is_causal, scale=0.1)
        with pytest.raises(rs.UnplannedAttention, match="attn_bias"):
            _templated_ring_attention(group, 2, op, q, k, v, is_causal, attn_bias=torch.zeros(2, 2))
        with pytest.raises(rs.UnplannedAttention, match="dropout_p"):
            _templated_ring_attention(group, 2, op, q, k, v, is_causal, dropout_p=0.5)
        with pytest.raises(NotImplementedError, match="lengths must be equal"):
            _templated_ring_attention(group, 2, op, q, k[:, :, 1:], v[:, :, 1:], is_causal=True)
    got = context_parallel_unshard(mesh, [out, *grads], [2] * 4)
    for one, expected in zip(got, [want, *want_grads], strict=True):
        assert_near(one, expected)
    wide = [x.double() for x in whole]
    expected = F.scaled_dot_product_attention(*wide, is_causal=is_causal, scale=0.1)
    assert_near(context_parallel_unshard(mesh, [scaled], [2])[0], expected)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@pytest.mark.parametrize("balance", [True, False], ids=["balanced", "contiguous"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_ring_attention(pools: Pools, is_causal: bool, balance: bool, rotation: str, world: int) -> None:
    pools(world).run(ring_attention, is_causal, balance, rotation)


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 40)


def block_mask_of_a_function(rank: int, name: str) -> None:
    """The same mask as that of ``create_block_mask``, sharded in a call of its own."""
    mesh = mesh_of_all()
    balancers: dict[str, Callable[[], Any]] = {
        "switch on": lambda: None,
        "switch off": lambda: None,
        "head-tail": lambda: _HeadTailLoadBalancer(512, mesh.size(), "cpu"),
    }
    balancer = balancers[name]()
    blocks = ((128, 128),) if torch.__version__ >= "2.15" else ()
    with options(balance=name == "switch on"):
        ours: Any = _create_cp_block_mask
        shard = ours(window, 1, 1, 512, 512, *blocks, mesh, balancer)
    whole = create_block_mask(window, 1, 1, 512, 512, device="cpu")
    order = None if name == "switch off" else _HeadTailLoadBalancer(512, mesh.size(), "cpu")
    (expected,) = _context_parallel_shard(mesh, [whole], [0], order)
    assert torch.equal(cells(shard, 1, 1), cells(expected, 1, 1))


@pytest.mark.parametrize("name", ["switch on", "switch off", "head-tail"])
def test_block_mask_of_a_function(pools: Pools, name: str) -> None:
    pools(2).run(block_mask_of_a_function, name)
