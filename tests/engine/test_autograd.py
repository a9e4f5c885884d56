"""The autograd function, and the errors for tensors that do not fit each other."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.engine import AttentionConfig, attend_ranks, shape_of
from ringspan.kernels import cpu
from ringspan.testing.assertions import assert_close
from ringspan.transports import InProcessTransport
from tests.engine.dense_comparison import EXACT, case
from tests.plans.examples import STRATEGIES

MASK = rs.causal(10) - rs.window(left=2, right=0) | rs.documents([4, 6])


def tensors(**changed: tuple[int, ...]) -> list[Tensor]:
    shapes = {"q": (2, 6, 10, 8), "k": (2, 3, 10, 8), "v": (2, 3, 10, 5), **changed}
    return [torch.zeros(shape) for shape in shapes.values()]


def test_shape_of_reads_the_sizes_of_q_k_and_v() -> None:
    assert shape_of(*tensors()) == rs.Shape(batch=2, heads=6, kv_heads=3, head_dim=8, v_dim=5, dtype="float32")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (tensors(q=(6, 10, 8)), "q must be (batch, heads, tokens, dim); got (6, 10, 8)"),
        (tensors(v=(1, 2, 3, 10, 5)), "v must be (batch, heads, tokens, dim); got (1, 2, 3, 10, 5)"),
        (tensors(k=(1, 3, 10, 8)), "q, k and v must have one batch size: q (2, 6, 10, 8), k (1, 3, 10, 8), v (2, 3, 10, 5)"),
        (tensors(v=(2, 3, 9, 5)), "k and v must have as many heads and tokens as each other"),
        (tensors(v=(2, 6, 10, 5)), "k and v must have as many heads and tokens as each other"),
        (tensors(k=(2, 3, 10, 4)), "q and k must have one head dim"),
        (tensors(q=(2, 7, 10, 8)), "7 query heads cannot share 3 key heads evenly"),
        (tensors(k=(2, 0, 10, 8), v=(2, 0, 10, 5)), "6 query heads cannot share 0 key heads evenly"),
        ([x.int() for x in tensors()], "attention is computed in float16, bfloat16, float32, float64; got torch.int32"),
        ([tensors()[0].double(), *tensors()[1:]], "q, k and v must have one dtype and device; q is torch.float64 on cpu, k is"),
    ],
)
def test_shape_of_refuses_tensors_that_do_not_fit(given: list[Tensor], message: str) -> None:
    with pytest.raises(rs.InputError) as error:
        shape_of(*given)
    assert message in str(error.value)


@pytest.mark.parametrize("needs", [n for n in product([True, False], repeat=3) if any(n)])
def test_only_inputs_that_require_gradients_get_them(needs: tuple[bool, ...]) -> None:
    given = case(MASK)
    leaves = [x.clone().requires_grad_(need) for x, need in zip(given[:3], needs, strict=True)]
    every = [x.clone().requires_grad_() for x in given[:3]]
    for qkv in (leaves, every):
        out = rs.LocalWorld(3).attention(*qkv, mask=MASK, layout="zigzag")
        (out * given.dout).sum().backward()
    for leaf, full, need in zip(leaves, every, needs, strict=True):
        assert (leaf.grad is not None) == need
        if need:
            assert torch.equal(leaf.grad, full.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("uses", ["out", "lse", "both"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_out_and_of_lse(strategy: str, uses: str) -> None:
    """gradcheck compares with finite differences of the forward pass."""
    mask = rs.causal(5) - rs.window(left=0) | rs.documents([2, 3])
    given = case(mask, heads=2, kv_heads=1, head_dim=2, v_dim=1, batch=1)
    leaves = [x.clone().requires_grad_() for x in given[:3]]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, ...]:
        result = rs.LocalWorld(3).attention(q, k, v, mask=mask, strategy=strategy, layout="zigzag", return_lse=True)
        return {"out": result.out, "lse": result.lse, "both": tuple(result)}[uses]

    assert torch.autograd.gradcheck(attention, leaves)


def test_the_gradient_of_an_empty_row_is_zero() -> None:
    """This holds even if the loss uses its lse, -inf: the gradient of a sum of squares is then -inf as well."""
    mask = rs.Mask.from_bands([(0, 2, 0, 6, -9, 9), (4, 6, 1, 3, -9, 9)], 7, 6)
    empty = [2, 3, 6]
    given = case(mask)
    for world in (1, 2, 3):
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        result = rs.LocalWorld(world).attention(*leaves, mask=mask, return_lse=True)
        assert result.lse[:, :, empty].isneginf().all()
        assert (result.out[:, :, empty] == 0).all()
        dq, dk, dv = torch.autograd.grad([*result], leaves, [given.dout, 2 * result.lse.detach()])
        assert (dq[:, :, empty] == 0).all()
        assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("power", [1, 2])
def test_no_gradient_of_a_gradient(power: int) -> None:
    """This includes a loss with a constant gradient, where PyTorch would silently drop the second derivative."""
    leaves = [x.clone().requires_grad_() for x in case(MASK)[:3]]
    out = rs.LocalWorld(2).attention(*leaves, mask=MASK)
    (dq,) = torch.autograd.grad((out**power).sum(), leaves[:1], create_graph=True)
    with pytest.raises(rs.KernelError, match="no kernel here computes second derivatives"):
        (out.sum() + dq.sum()).backward()


@pytest.mark.parametrize("power", [1, 2, 3])
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_no_gradient_of_a_gradient_for_some_inputs(power: int, wanted: int) -> None:
    """torch.autograd.grad runs only what lies on a path to its inputs."""
    leaves = [x.clone().requires_grad_() for x in case(MASK)[:3]]
    out = rs.LocalWorld(2).attention(*leaves, mask=MASK)
    (dq,) = torch.autograd.grad((out**power).sum(), leaves[:1], create_graph=True)
    with pytest.raises(rs.KernelError, match="no kernel here computes second derivatives"):
        torch.autograd.grad(out.sum() + dq.square().sum(), leaves[wanted])


def test_create_graph_alone_does_not_change_gradients() -> None:
    found = []
    for create_graph in (False, True):
        leaves = [x.clone().requires_grad_() for x in case(MASK)[:3]]
        out = rs.LocalWorld(2).attention(*leaves, mask=MASK)
        found.append(torch.autograd.grad(out.sum(), leaves, create_graph=create_graph))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_input_changed_in_place_before_backward_raises() -> None:
    q, k, v = (x.clone().requires_grad_() for x in case(MASK)[:3])
    config = AttentionConfig(kernel=cpu, scale=1.0, head_dim=q.shape[-1])
    (result,) = attend_ranks([rs.plan(MASK, world=1)], [(q.detach(), k, v)], config, InProcessTransport(1).run)
    with torch.no_grad():
        q.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_results_have_the_dtype_of_the_inputs_and_a_wide_lse(dtype: torch.dtype, backend: str) -> None:
    q, k, v = (x.to(dtype).requires_grad_() for x in case(MASK)[:3])
    result = rs.LocalWorld(3).attention(q, k, v, mask=MASK, strategy="ring", return_lse=True, backend=backend)
    assert (result.out.dtype, result.lse.dtype) == (dtype, torch.float32)
    result.out.sum().backward()
    assert [x.grad.dtype for x in (q, k, v)] == [dtype] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_kernels_agree(strategy: str) -> None:
    given = case(MASK)
    found = []
    for backend in ("cpu", "reference"):
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        result = rs.LocalWorld(4).attention(*leaves, mask=MASK, strategy=strategy, return_lse=True, backend=backend)
        found.append([*result, *torch.autograd.grad([*result], leaves, [given.dout, given.dlse])])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *found, strict=True):
        assert_close(a, b, atol=EXACT, what=name)
