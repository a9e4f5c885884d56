"""The custom operators: PyTorch's own checks of them, and that they compute what eager code computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ringspan as rs
from ringspan.engine import PlanHandle, attend, attend_by_id, is_traced
from ringspan.frontends.attention import registered_handle
from ringspan.testing.assertions import assert_close
from tests.engine.dense_comparison import EXACT, case

MASK = rs.causal(10) - rs.window(left=2, right=0) | rs.documents([4, 6])


@pytest.fixture(autouse=True, scope="module")
def group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def registered(mask: rs.Mask = MASK) -> PlanHandle:
    """Return the handle of the only rank."""
    return registered_handle(rs.plan(mask, world=1), None, "cpu")


@pytest.mark.parametrize(
    "tensors",
    [
        lambda: case(MASK)[:3],
        lambda: [x.clone().requires_grad_() for x in case(MASK)[:3]],
        lambda: [x.float().requires_grad_() for x in case(MASK, batch=1, heads=3, kv_heads=1, v_dim=7)[:3]],
        lambda: [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in case(MASK)[:3]],
    ],
    ids=["no gradient", "gradient", "float32, one key head", "strides"],
)
def test_opcheck_of_the_forward_operator(tensors: Callable[[], list[Tensor]]) -> None:
    handle = registered()
    torch.library.opcheck(torch.ops.ringspan.attend.default, (*tensors(), handle.id, 0.3))


@pytest.mark.parametrize("dlse", [True, False])
def test_opcheck_of_the_backward_operator(dlse: bool) -> None:
    handle, given = registered(), case(MASK)
    q, k, v, dout = given.q, given.k, given.v, given.dout.movedim(2, 0).contiguous()
    out, lse = torch.ops.ringspan.attend(q, k, v, handle.id, 0.3)
    args = (dout, torch.ones_like(lse) if dlse else None, q, k, v, out, lse, handle.id, 0.3)
    torch.library.opcheck(torch.ops.ringspan.attend_backward.default, args)


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_the_operator_computes_what_eager_code_computes(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    handle, given = registered(), case(MASK)
    found = []
    for traced in (True, False):
        monkeypatch.setattr("ringspan.engine.entry.is_traced", lambda traced=traced: traced)
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        result = attend(handle, *leaves, scale)
        assert ("ringspan" in str(result.out.grad_fn.next_functions[0][0])) == traced  # type: ignore[union-attr]
        found.append([*result, *torch.autograd.grad([*result], leaves, [given.dout, given.dlse])])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *found, strict=True):
        assert_close(a, b, atol=EXACT, what=name)


def test_second_derivatives_raise() -> None:
    leaves = [x.clone().requires_grad_() for x in case(MASK)[:3]]
    handle = registered()
    out, _ = attend_by_id(*leaves, handle.id, 0.3)
    (dq,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(rs.KernelError, match="no kernel here computes second derivatives"):
        dq.sum().backward()


def test_plain_eager_code_is_not_traced() -> None:
    assert not is_traced()
    with FakeTensorMode():
        assert is_traced()
