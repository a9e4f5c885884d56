"""The ``with`` block in one process: which calls it intercepts, which it refuses, and that nothing remains after it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.frontends import attention_block
from ringspan.frontends import treatments as treatments_of_functions
from ringspan.kernels.reference import dense_attention

pytestmark = pytest.mark.usefixtures("world_of_one")

N = 12
MASK = rs.causal(N) & rs.window(left=3)


@pytest.fixture
def cp() -> rs.ContextParallel:
    return rs.ContextParallel(None, MASK, expect_attention=False)


def qkv(*lead: int, heads: int = 4, kv_heads: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*lead, h, N, 8, dtype=torch.float64, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: rs.Mask = MASK, **options: Any) -> torch.Tensor:
    return dense_attention(q, k, v, torch.from_numpy(mask.dense()), **options).out


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's own full attention."""
    return dense(q, k, v, rs.full(N))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-12)


# -- intercepted calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (qkv(2), {}),
        (qkv(2), {"is_causal": True}),
        (qkv(2), {"scale": 0.3}),
        (qkv(2, heads=4, kv_heads=2), {"enable_gqa": True}),
        (qkv(2, heads=4, kv_heads=1), {"enable_gqa": True}),
    ],
    ids=["plain", "is_causal", "scale", "gqa", "mqa"],
)
def test_sdpa_applies_the_plans_mask(cp: rs.ContextParallel, tensors: list[torch.Tensor], options: dict[str, Any]) -> None:
    with cp:
        out = F.scaled_dot_product_attention(*tensors, **options)
    assert close(out, dense(*tensors, scale=options.get("scale")))


def test_other_numbers_of_dims(cp: rs.ContextParallel) -> None:
    q, k, v = qkv(2)
    with cp:
        three = F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0])
        five = F.scaled_dot_product_attention(*(x.unsqueeze(0).expand(3, 2, 4, N, 8) for x in (q, k, v)))
    want = dense(q, k, v)
    assert close(three, want[:, 0])
    assert close(five, want.expand(3, 2, 4, N, 8))


def test_autocast_computes_in_its_dtype(cp: rs.ContextParallel) -> None:
    q, k, v = (x.detach().float() for x in qkv(2))
    with cp, torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert (out - dense(q, k, v)).abs().max() < 0.03


def test_checkpointed_attention_is_computed_again_inside_the_block(cp: rs.ContextParallel) -> None:
    q, k, v = qkv(2)
    with cp:
        out = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False, context_fn=cp.checkpoint_context)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    want = torch.autograd.grad(dense(q, k, v).square().sum(), (q, k, v))
    assert all(close(a, b) for a, b in zip(got, want, strict=True))


# -- refused calls ---------------------------------------------------------------------------------------------------

X = torch.randn(1, N, 8)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(N, N).bool()),
            rs.UnplannedAttention,
            "attn_mask of shape",
        ),
        (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.1),
            rs.UnplannedAttention,
            "dropout_p=0.1.*Set it to 0",
        ),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2]), rs.InputError, "enable_gqa=True"),
        (
            lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :3], v[:, :3], enable_gqa=True),
            rs.InputError,
            "4 query heads cannot share 3",
        ),
        (lambda q, k, v: nn.MultiheadAttention(8, 2)(X, X, X), rs.UnplannedAttention, "need_weights=False"),
    ],
    ids=["attn_mask", "dropout", "gqa not enabled", "heads do not divide", "MultiheadAttention"],
)
def test_calls_that_cannot_be_exact_are_refused(
    cp: rs.ContextParallel, call: Callable[..., Any], kind: Any, message: str
) -> None:
    with cp, pytest.raises(kind, match=message):
        call(*qkv(2))


def test_a_wrong_number_of_queries_is_refused_in_the_first_call_and_in_later_ones() -> None:
    """In the first call the ranks compare their lengths; later a rank that differs must not wait for the others."""
    q, k, v = qkv(2)
    with rs.ContextParallel(None, rs.causal(N) & rs.window(left=5)):
        with pytest.raises(rs.PeerMismatch, match="11 queries where the plan says 12"):
            F.scaled_dot_product_attention(q[:, :, 1:], k, v)
        F.scaled_dot_product_attention(q, k, v)
        with pytest.raises(rs.InputError, match="11 queries and 12 keys where the plan says 12 and 12"):
            F.scaled_dot_product_attention(q[:, :, 1:], k, v)


def test_is_causal_where_the_mask_is_not() -> None:
    with rs.ContextParallel(None, rs.prefix(N, 4)), pytest.raises(rs.UnplannedAttention, match="lets queries see later keys"):
        F.scaled_dot_product_attention(*qkv(2), is_causal=True)


def test_flex_attention_applies_the_mask_of_the_plan_and_its_operator_is_refused(cp: rs.ContextParallel) -> None:
    q, k, v = (x.detach() for x in qkv(2))
    with cp:
        assert close(flex_attention(q, k, v), dense(q, k, v))
        with pytest.raises(rs.UnplannedAttention, match=r"flex_attention would see only the keys of this rank: call torch\.nn"):
            torch.ops.higher_order.flex_attention(q, k, v, None, (), 1.0, {})


def test_local_attention_is_not_intercepted(cp: rs.ContextParallel) -> None:
    q, k, v = qkv(2)
    with cp:
        with rs.local_attention():
            assert close(F.scaled_dot_product_attention(q, k, v), plain(q, k, v))
        assert close(F.scaled_dot_product_attention(q, k, v), dense(q, k, v))
    with rs.local_attention(), cp:
        assert close(F.scaled_dot_product_attention(q, k, v), dense(q, k, v))


def test_local_attention_keeps_the_default_device(cp: rs.ContextParallel) -> None:
    try:
        torch.set_default_device("meta")
        with cp, rs.local_attention():
            assert torch.zeros(2).device.type == "meta"
            torch.set_default_device("cpu")
            assert torch.zeros(2).device.type == "cpu"
            torch.set_default_device("meta")
        assert torch.zeros(2).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.zeros(2).device.type == "cpu"


class Doubling(torch.Tensor):
    """A tensor whose attention gives twice the result."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return 2 * result if func is F.scaled_dot_product_attention else result


def test_local_attention_calls_the_torch_function_of_subclasses(cp: rs.ContextParallel) -> None:
    q, k, v = qkv(2)
    with cp, rs.local_attention():
        out = F.scaled_dot_product_attention(q.as_subclass(Doubling), k, v)
    assert close(out.as_subclass(torch.Tensor), 2 * plain(q, k, v))


def test_one_local_attention_can_be_entered_again(cp: rs.ContextParallel) -> None:
    q, k, v = qkv(2)
    local = rs.local_attention()
    with cp, local, cp, local:
        assert close(F.scaled_dot_product_attention(q, k, v), plain(q, k, v))
    with cp:
        assert close(F.scaled_dot_product_attention(q, k, v), dense(q, k, v))


def test_threads_may_share_one_local_attention(cp: rs.ContextParallel) -> None:
    """The main thread enters, another one with a block of its own enters, the main thread exits, then the other."""
    q, k, v = (x.detach() for x in qkv(2))
    other_mask = rs.causal(N)
    local, entered, exited, found = rs.local_attention(), threading.Event(), threading.Event(), []

    def other_thread() -> None:
        with rs.ContextParallel(None, other_mask):
            with local:
                entered.set()
                assert exited.wait(60)
                found.append(F.scaled_dot_product_attention(q, k, v))
            found.append(F.scaled_dot_product_attention(q, k, v))

    thread = threading.Thread(target=other_thread)
    with cp:
        with local:
            thread.start()
            assert entered.wait(60)
        exited.set()
        mine = F.scaled_dot_product_attention(q, k, v)
        thread.join()
    assert close(mine, dense(q, k, v))
    assert len(found) == 2
    assert close(found[0], plain(q, k, v))
    assert close(found[1], dense(q, k, v, other_mask))


class NotHashable:
    __hash__ = None  # type: ignore[assignment]
    __name__ = "scaled_dot_product_of_mine"

    def __call__(self, *args: Any) -> str:
        return "called"


def test_functions_that_cannot_be_kept_in_a_dictionary_are_recognised_too(cp: rs.ContextParallel) -> None:
    with cp, pytest.raises(rs.UnplannedAttention, match="scaled_dot_product_of_mine would see only the keys"):
        torch.overrides.handle_torch_function(NotHashable(), ())


def test_functions_made_for_one_call_do_not_pile_up(cp: rs.ContextParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    treatments: dict[Any, Any] = {}
    for module in (attention_block, treatments_of_functions):
        monkeypatch.setattr(module, "treatments", treatments)
    with cp:
        for n in range(10):
            assert torch.overrides.handle_torch_function(lambda n=n: n, ()) == n
        assert not treatments
        torch.ones(2).relu()
    assert {torch.ones, torch.Tensor.relu} <= treatments.keys()


@pytest.mark.parametrize(
    "call",
    [
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch._scaled_dot_product_attention_math,
    ],
    ids=["aten", "flash", "math"],
)
def test_other_attention_functions_are_refused(cp: rs.ContextParallel, call: Callable[..., Any]) -> None:
    with cp, pytest.raises(rs.UnplannedAttention, match="would see only the keys of this rank"):
        call(*qkv(2))


def test_the_engine_may_call_attention_operators_inside_blocks(cp: rs.ContextParallel) -> None:
    """The engine calls operators that are refused above, even inside two blocks."""
    tensors = qkv(2)
    with cp, cp:
        assert close(cp.attention(*tensors), dense(*tensors))
        assert close(rs.attention(*tensors, plan=cp.plan), dense(*tensors))
        assert close(rs.LocalWorld(2).attention(*tensors, mask=MASK), dense(*tensors))


def test_the_result_may_be_changed_in_place(cp: rs.ContextParallel) -> None:
    tensors = qkv(2)
    with cp:
        out = F.scaled_dot_product_attention(*tensors) + 0
        again = F.scaled_dot_product_attention(*tensors)
        again.mul_(2)
    assert close(again, 2 * out)


# -- after the block --------------------------------------------------------------------------------------------------


def test_after_an_exception_sdpa_is_pytorchs_again(cp: rs.ContextParallel) -> None:
    before = F.scaled_dot_product_attention
    tensors = qkv(2)
    with pytest.raises(ZeroDivisionError), cp:
        _ = 1 / 0
    with pytest.raises(rs.UnplannedAttention), cp:
        F.scaled_dot_product_attention(*tensors, dropout_p=0.5)
    assert F.scaled_dot_product_attention is before
    assert close(F.scaled_dot_product_attention(*tensors), plain(*tensors))


def test_blocks_nest_and_the_innermost_counts(cp: rs.ContextParallel) -> None:
    tensors = qkv(2)
    wider = cp.with_mask(rs.causal(N))
    with cp:
        with wider:
            assert close(F.scaled_dot_product_attention(*tensors), dense(*tensors, rs.causal(N)))
            with cp, cp:
                assert close(F.scaled_dot_product_attention(*tensors), dense(*tensors))
            assert close(F.scaled_dot_product_attention(*tensors), dense(*tensors, rs.causal(N)))
        assert close(F.scaled_dot_product_attention(*tensors), dense(*tensors))
    assert close(F.scaled_dot_product_attention(*tensors), plain(*tensors))


def test_the_block_belongs_to_its_thread(cp: rs.ContextParallel) -> None:
    tensors = qkv(2)
    matches: list[bool] = []
    with cp:
        thread = threading.Thread(
            target=lambda: matches.append(close(F.scaled_dot_product_attention(*tensors), plain(*tensors)))
        )
        thread.start()
        thread.join()
    assert matches == [True]


# -- attention that the block cannot see -------------------------------------------------------------------------------


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-1) @ v


def in_a_thread(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    thread = threading.Thread(target=F.scaled_dot_product_attention, args=(q, k, v))
    thread.start()
    thread.join()


@pytest.mark.parametrize("attend", [by_hand, in_a_thread, lambda q, k, v: None])
def test_a_block_without_attention_raises(attend: Callable[..., Any]) -> None:
    cp = rs.ContextParallel(None, MASK)
    with pytest.raises(rs.UnplannedAttention, match="no attention was intercepted in this block"), cp:
        attend(*qkv(1))
    with cp.with_mask(rs.full(N)), cp:  # the inner block intercepts the call
        F.scaled_dot_product_attention(*qkv(1))
    if attend is not by_hand:
        with cp:  # used before: an optimiser step, or a replay of a CUDA graph
            attend(*qkv(1))


def test_attention_by_hand_in_a_block_that_was_used_before_raises() -> None:
    cp = rs.ContextParallel(None, MASK)
    with cp:
        F.scaled_dot_product_attention(*qkv(1))
    with pytest.raises(rs.UnplannedAttention, match="no attention was intercepted in this block"), cp:
        by_hand(*qkv(1))
    with cp:  # beside attention that was intercepted: for rs.strict()
        by_hand(*qkv(1))
        F.scaled_dot_product_attention(*qkv(1))
    with cp, rs.local_attention():
        by_hand(*qkv(1))


def test_a_softmax_over_something_else_is_no_attention() -> None:
    cp = rs.ContextParallel(None, MASK)
    with cp:
        F.scaled_dot_product_attention(*qkv(1))
    with cp:
        torch.randn(2, N, 5).softmax(-1)


def test_functions_without_attention_may_run_before_attention() -> None:
    q, k, v = (x.detach() for x in qkv(1))
    with rs.ContextParallel(None, MASK):
        q = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (q,))
        found = F.scaled_dot_product_attention(q, k, v)
    assert close(found, dense(q, k, v))


def test_methods_of_the_block_count_as_attention() -> None:
    for cp in (rs.ContextParallel(None, MASK) for _ in range(2)):
        with cp, cp:
            cp.attention(*qkv(1))
    with rs.ContextParallel(None, MASK) as cp:
        cp.flex_attention(*qkv(1))


def test_a_block_with_local_attention_only_is_intended() -> None:
    with rs.ContextParallel(None, MASK), rs.local_attention():
        F.scaled_dot_product_attention(*qkv(1))


def test_another_error_is_not_replaced() -> None:
    with pytest.raises(ZeroDivisionError), rs.ContextParallel(None, MASK):
        1 / 0  # noqa: B018


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_calls_count(fullgraph: bool) -> None:
    torch._dynamo.reset()
    attend = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=fullgraph)
    for _ in range(3):  # traced in the first block only
        with rs.ContextParallel(None, MASK):
            attend(*qkv(1))


other_package = torch.library.Library("flash_attn_of_a_test", "DEF")
for operator in ("_flash_attn_forward", "varlen_fwd", "rotary", "_flash_attn_backward"):
    other_package.define(f"{operator}(Tensor q, Tensor k, Tensor v) -> Tensor")
    other_package.impl(operator, lambda q, k, v: q.clone(), "CPU")


@pytest.mark.parametrize("operator", ["_flash_attn_forward", "varlen_fwd"])
@pytest.mark.parametrize("overload", [False, True])
def test_attention_of_other_packages_is_refused_by_name(cp: rs.ContextParallel, operator: str, overload: bool) -> None:
    packet = getattr(torch.ops.flash_attn_of_a_test, operator)
    message = rf"the operator flash_attn_of_a_test\.{operator}.* would see only the keys of this rank"
    with cp, pytest.raises(rs.UnplannedAttention, match=message):
        (packet.default if overload else packet)(*qkv(1))
    with cp, rs.local_attention():
        packet(*qkv(1))


@pytest.mark.parametrize("operator", ["rotary", "_flash_attn_backward"])
def test_other_operators_of_such_a_package_are_not(cp: rs.ContextParallel, operator: str) -> None:
    q, k, v = qkv(1)
    with cp:
        assert torch.equal(getattr(torch.ops.flash_attn_of_a_test, operator)(q, k, v), q)
