"""The operator: what PyTorch's own checks say of it, that it is the engine's attention, and who finds a seat."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ringspan as rs
from ringspan.engine import Call, Seat, attend_by_ticket, is_watched, operator, take_seat
from ringspan.kernels import cpu
from ringspan.planner import Plan
from ringspan.testing.assertions import assert_close
from ringspan.transports import InProcessTransport
from tests.engine.truth import EXACT, case

MASK = rs.causal(10) - rs.window(left=2, right=0) | rs.documents([4, 6])


def seated(mask: rs.Mask = MASK, name: str = "test") -> Seat:
    """The seat of the only rank."""
    plan = rs.plan(mask, world=1)

    def prepare(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Plan, Call]:
        return plan, Call(kernel=cpu, scale=scale, head_dim=q.shape[-1])

    return take_seat(name, Seat(prepare=prepare, run=InProcessTransport(1).run, processes=(0,)))


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
def test_what_pytorch_checks_of_operators(tensors: Callable[[], list[Tensor]]) -> None:
    seat = seated()
    torch.library.opcheck(torch.ops.ringspan.attend.default, (*tensors(), seat.ticket, 0.3))


@pytest.mark.parametrize("dlse", [True, False])
def test_what_pytorch_checks_of_the_backward_operator(dlse: bool) -> None:
    seat, given = seated(), case(MASK)
    q, k, v, dout = given.q, given.k, given.v, given.dout.movedim(2, 0).contiguous()
    out, lse = torch.ops.ringspan.attend(q, k, v, seat.ticket, 0.3)
    args = (dout, torch.ones_like(lse) if dlse else None, q, k, v, out, lse, seat.ticket, 0.3)
    torch.library.opcheck(torch.ops.ringspan.attend_backward.default, args)


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_it_is_the_engines_attention(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    seat, given = seated(), case(MASK)
    found = []
    for watched in (True, False):
        monkeypatch.setattr(operator, "is_watched", lambda watched=watched: watched)
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        result = seat.attend(*leaves, scale)
        assert ("ringspan" in str(result.out.grad_fn.next_functions[0][0])) == watched  # type: ignore[union-attr]
        found.append([*result, *torch.autograd.grad([*result], leaves, [given.dout, given.dlse])])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *found, strict=True):
        assert_close(a, b, atol=EXACT, what=name)


def test_no_gradient_of_a_gradient() -> None:
    leaves = [x.clone().requires_grad_() for x in case(MASK)[:3]]
    out, _ = attend_by_ticket(*leaves, seated().ticket, 0.3)
    (dq,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(rs.KernelError, match="no kernel here computes second derivatives"):
        dq.sum().backward()


def test_nobody_is_watching_eager_code() -> None:
    assert not is_watched()
    with FakeTensorMode():
        assert is_watched()


# -- seats -------------------------------------------------------------------------------------------------------------


def test_a_ticket_follows_from_the_name() -> None:
    first, second, other = seated(), seated(), seated(name="other")
    assert first.ticket.item() == second.ticket.item() != other.ticket.item()


def test_who_takes_a_seat_again_has_it() -> None:
    q, k, v, *_ = case(MASK)
    before = seated(MASK)
    after = seated(rs.full(10))
    found = [attend_by_ticket(q, k, v, seat.ticket, 0.3).out for seat in (before, after)]
    assert torch.equal(*found)


def test_a_seat_is_found_again_when_a_later_one_of_its_name_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "_latest", OrderedDict())
    q, k, v, *_ = case(MASK)
    first = seated(MASK)
    later = seated(rs.full(10))
    found = attend_by_ticket(q, k, v, first.ticket, 0.3).out
    operator._latest.clear()
    del later
    gc.collect()
    assert not torch.equal(found, attend_by_ticket(q, k, v, first.ticket, 0.3).out)


def test_seats_that_are_held_stay_and_others_go_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "MOST", 3)
    monkeypatch.setattr(operator, "_latest", OrderedDict())
    q, k, v, *_ = case(MASK)
    held, dropped = seated(name="held"), seated(name="dropped").ticket
    attend_by_ticket(q, k, v, dropped, 0.3)
    for i in range(operator.MOST):
        seated(name=f"later {i}")
    gc.collect()
    attend_by_ticket(q, k, v, held.ticket, 0.3)
    with pytest.raises(rs.InputError, match=r"no seat has ticket \d+.*Make it again"):
        attend_by_ticket(q, k, v, dropped, 0.3)
