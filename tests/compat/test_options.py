"""Process-wide settings, and torch's table of what each ring step computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ringspan as rs
from ringspan.compat import (
    _CausalBehavior,
    _cp_options,
    _is_causal_behavior,
    _RotateMethod,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from ringspan.compat.call_settings import CallSettings
from ringspan.layouts import Layout, contiguous, zigzag
from ringspan.testing.assertions import assert_close
from tests.conftest import Pools


@pytest.fixture(autouse=True)
def restore_options() -> Iterator[None]:
    before = dict(vars(_cp_options))
    yield
    for name, value in before.items():
        setattr(_cp_options, name, value)


@pytest.mark.parametrize(
    ("word", "method", "strategy"),
    [("allgather", _RotateMethod.ALL_GATHER, "gather"), ("alltoall", _RotateMethod.ALL_TO_ALL, "ring")],
)
def test_rotate_methods_are_strategies(word: str, method: _RotateMethod, strategy: str) -> None:
    set_rotate_method(word)
    assert _cp_options.rotate_method is method
    assert _cp_options.strategy == strategy


def test_an_unknown_rotate_method_is_refused_and_changes_nothing() -> None:
    set_rotate_method("alltoall")
    with pytest.raises(NotImplementedError, match='use "allgather" or "alltoall"'):
        set_rotate_method("carousel")
    assert _cp_options.rotate_method is _RotateMethod.ALL_TO_ALL


@pytest.mark.parametrize(
    ("dtype", "converts", "sent"),
    [
        (torch.bfloat16, True, "float32"),
        (torch.bfloat16, False, "bfloat16"),
        (torch.float16, False, "float32"),
        (torch.float32, False, "float32"),
        (torch.float64, False, "float32"),
    ],
)
def test_the_dtype_of_gradient_messages(dtype: torch.dtype, converts: bool, sent: str) -> None:
    """ "float32" stands for the dtype in which they are summed, which is float64 for float64 tensors."""
    assert CallSettings(True, "ring", {}, converts).dkv_dtype(dtype) == sent


def gradients(rank: int, converts: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gradients of q, k, v of a causal attention in a block, with keys passed around the ring."""
    mesh = init_device_mesh("cpu", (4,))
    set_rotate_method("alltoall")
    _cp_options.convert_to_f32 = converts
    try:
        torch.manual_seed(0)
        whole = [torch.randn(1, 2, 64, 8, dtype=torch.float64).to(dtype) for _ in range(3)]
        with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2]):
            q, k, v = (x.detach().requires_grad_() for x in whole)
            F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum().backward()
            found = [x.grad for x in (q, k, v) if x.grad is not None]
        return tuple(context_parallel_unshard(mesh, found, [2, 2, 2]))
    finally:
        _cp_options.convert_to_f32 = True
        set_rotate_method("allgather")


def test_convert_to_f32_rounds_the_messages_of_bfloat16_tensors_only(pools: Pools) -> None:
    """False changes gradients of keys and values, by a few roundings, and nothing else."""
    for dtype, changes in ((torch.bfloat16, True), (torch.float32, False)):
        plain, rounded = (pools(4).run(gradients, converts, dtype)[0] for converts in (True, False))
        assert torch.equal(plain[0], rounded[0])
        for exact, sent in zip(plain[1:], rounded[1:], strict=True):
            assert torch.equal(exact, sent) is not changes
            assert_close(sent.double(), exact.double(), rtol=0, atol=float(exact.abs().max()) * 2**-6)


def visible_pairs(layout: Layout, rank: int, source: int) -> int:
    """How many pairs of a rank's queries and another rank's keys a causal mask allows, by counting them."""
    q, k = layout.positions(rank), layout.positions(source)
    return int((q[:, None] >= k[None, :]).sum())


@pytest.mark.parametrize("world", [1, 2, 4, 5])
@pytest.mark.parametrize("balanced", [False, True])
def test_the_causal_table_agrees_with_the_layouts(world: int, balanced: bool) -> None:
    _cp_options.enable_load_balance = balanced
    size = 4
    layout = (zigzag if balanced else contiguous)(rs.causal(2 * size * world), world)
    pairs = (2 * size) ** 2
    expected = {
        0: _CausalBehavior.SKIP,
        pairs: _CausalBehavior.NOT_IS_CAUSAL,
        pairs // 2: _CausalBehavior.NOT_IS_CAUSAL,  # zigzag: all pairs of one half
        pairs // 2 + size: _CausalBehavior.IS_CAUSAL,  # a triangle with its diagonal
    }
    for rank in range(world):
        for i in range(world):
            got = _is_causal_behavior(rank=rank, world_size=world, i=i, is_causal=True)
            assert got is expected[visible_pairs(layout, rank, (rank - i) % world)], (rank, i)
            assert _is_causal_behavior(rank, world, i, is_causal=False) is _CausalBehavior.NOT_IS_CAUSAL


def test_enum_values() -> None:
    assert [b.value for b in _CausalBehavior] == [None, False, True]
