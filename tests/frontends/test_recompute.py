"""Activation checkpointing in blocks: attention is computed again as it was, wherever the backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringspan as rs
from ringspan.frontends.recompute import _entries
from ringspan.testing.assertions import assert_close
from ringspan.torch_private.checkpoints import any_hooks

pytestmark = pytest.mark.usefixtures("world_of_one")

N = 12
MASK = rs.causal(N) & rs.window(left=3)
OTHER = rs.causal(N)
LINEAR = nn.Linear(8, 8, dtype=torch.float64)

Layer = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not _entries.stack
    assert not any_hooks()


def attend(x: Tensor) -> Tensor:
    return LINEAR(F.scaled_dot_product_attention(x, 2 * x, x.sin()))


def dense(x: Tensor, mask: rs.Mask) -> Tensor:
    seen = torch.from_numpy(mask.dense())
    return LINEAR(F.scaled_dot_product_attention(x, 2 * x, x.sin(), attn_mask=seen))


def gradients(y: Tensor, x: Tensor, backward: Callable[[Tensor], None] = Tensor.backward) -> list[Tensor]:
    """Of x and of the linear layer. By backward(), since a reentrant checkpoint refuses torch.autograd.grad."""
    x.grad = LINEAR.weight.grad = None
    backward(y.square().sum())
    assert x.grad is not None
    assert LINEAR.weight.grad is not None
    return [x.grad, LINEAR.weight.grad]


def tokens() -> Tensor:
    return torch.randn(1, 2, N, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def flex(x: Tensor) -> Tensor:
    return LINEAR(flex_attention(x, 2 * x, x.sin()))  # type: ignore[arg-type]


def save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op == torch.ops.ringspan.attend.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def nested(reentrant: bool, other: bool) -> Layer:
    def layers(x: Tensor) -> Tensor:
        return checkpoint(attend, checkpoint(attend, x, use_reentrant=other), use_reentrant=other)

    return lambda x: checkpoint(layers, x, use_reentrant=reentrant)


def twice(x: Tensor) -> Tensor:
    return attend(attend(x))


ONCE, TWICE = partial(dense, mask=MASK), lambda x: dense(dense(x, MASK), MASK)
WAYS: dict[str, tuple[Callable[[bool], Layer], Layer]] = {
    "SDPA": (lambda reentrant: lambda x: checkpoint(attend, x, use_reentrant=reentrant), ONCE),
    "flex": (lambda reentrant: lambda x: checkpoint(flex, x, use_reentrant=reentrant), ONCE),
    "two calls": (lambda reentrant: lambda x: checkpoint(twice, x, use_reentrant=reentrant), TWICE),
    "nested": (lambda reentrant: nested(reentrant, reentrant), TWICE),
    "mixed": (lambda reentrant: nested(reentrant, not reentrant), TWICE),
    "compiled": (
        lambda reentrant: lambda x: checkpoint(torch.compile(attend, backend="aot_eager"), x, use_reentrant=reentrant),
        ONCE,
    ),
}


@pytest.mark.parametrize("backward_in_block", [True, False], ids=["backward in the block", "backward after it"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_without_checkpoints(way: str, reentrant: bool, backward_in_block: bool) -> None:
    torch._dynamo.reset()
    make, exact = WAYS[way]
    layer, cp, x = make(reentrant), rs.ContextParallel(None, MASK), tokens()
    want = gradients(exact(x), x)
    with cp:
        y = layer(x)
        if backward_in_block:
            got = gradients(y, x)
    assert_close(y, exact(x), atol=1e-12)
    if not backward_in_block:
        got = gradients(y, x)
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, atol=1e-12)


def test_selective_checkpoints_need_no_context_of_the_block() -> None:
    x = tokens()
    with rs.ContextParallel(None, MASK):
        policy = partial(create_selective_checkpoint_contexts, save_attention)
        y = checkpoint(attend, x, use_reentrant=False, context_fn=policy)
    for mine, theirs in zip(gradients(y, x), gradients(ONCE(x), x), strict=True):
        assert_close(mine, theirs, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_blocks_that_the_function_opens_are_opened_by_it_again(reentrant: bool) -> None:
    """Attention of the function outside its block stays local, attention in its block has the mask of that block."""
    cp, other, x = rs.ContextParallel(None, MASK), rs.ContextParallel(None, OTHER), tokens()

    def layer(x: Tensor) -> Tensor:
        with other:
            y = attend(x)
        return y + attend(x)

    y = checkpoint(layer, x, use_reentrant=reentrant)
    for mine, theirs in zip(gradients(y, x), gradients(dense(x, OTHER) + dense(x, rs.full(N)), x), strict=True):
        assert_close(mine, theirs, atol=1e-12)
    with cp:
        y = checkpoint(layer, x, use_reentrant=reentrant)
    for mine, theirs in zip(gradients(y, x), gradients(dense(x, OTHER) + dense(x, MASK), x), strict=True):
        assert_close(mine, theirs, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_local_attention_around_a_checkpoint_and_inside_one(reentrant: bool) -> None:
    cp, other, x = rs.ContextParallel(None, MASK), rs.ContextParallel(None, OTHER), tokens()

    def first_local(x: Tensor) -> Tensor:
        with rs.local_attention():
            y = attend(x)
            with other:
                y = y + attend(x)
        return y + attend(x)

    with cp:
        y = checkpoint(first_local, x, use_reentrant=reentrant)
        with rs.local_attention():
            y = y + checkpoint(attend, x, use_reentrant=reentrant)
            with other:
                y = y + checkpoint(first_local, x, use_reentrant=reentrant)
    full = dense(x, rs.full(N))
    want = full + dense(x, OTHER) + dense(x, MASK) + full + full + 2 * dense(x, OTHER)
    assert_close(y, want, atol=1e-12)
    for mine, theirs in zip(gradients(y, x), gradients(want, x), strict=True):
        assert_close(mine, theirs, atol=1e-12)


# PyTorch disables a block while it handles one of the first two. Schedules of pipelines call the engine itself.
BACKWARD: dict[str, Callable[[Tensor], None]] = {
    "method": Tensor.backward,
    "function": torch.autograd.backward,
    "engine": lambda loss: torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    ),
}
LOCAL, LOCAL_TWICE = partial(dense, mask=rs.full(N)), lambda x: dense(dense(x, rs.full(N)), rs.full(N))


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("around", ["nothing", "local_attention", "another block"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("way", ["SDPA", "two calls", "nested", "mixed"])
def test_checkpoints_that_were_made_outside_the_block_of_the_backward_pass(
    way: str, reentrant: bool, around: str, backward: str
) -> None:
    make, exact = WAYS[way]
    layer, cp, x = make(reentrant), rs.ContextParallel(None, OTHER, expect_attention=False), tokens()
    if around == "nothing":
        y = layer(x)
    elif around == "local_attention":
        with cp, rs.local_attention():
            y = layer(x)
    else:
        with rs.ContextParallel(None, MASK):
            y = layer(x)
    if around != "another block":
        exact = LOCAL if exact is ONCE else LOCAL_TWICE
    want = gradients(exact(x), x)
    assert_close(y, exact(x), atol=1e-12)
    with cp:
        got = gradients(y, x, BACKWARD[backward])
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_compiled_function_of_a_checkpoint_outside_the_block_of_the_backward_pass_is_refused(reentrant: bool) -> None:
    torch._dynamo.reset()
    x = tokens()
    y = checkpoint(torch.compile(attend, backend="aot_eager"), x, use_reentrant=reentrant)
    with rs.ContextParallel(None, OTHER), pytest.raises(rs.UnplannedAttention, match=r"call backward\(\) outside of the block"):
        gradients(y, x, BACKWARD["engine"])


def test_hooks_of_the_user_stay_where_they_are() -> None:
    packed: list[str] = []

    def hooks(name: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(name) or x, lambda x: x)

    def layer(x: Tensor) -> Tensor:
        with hooks("inner"):
            return attend(x)

    x = tokens()
    with rs.ContextParallel(None, MASK), hooks("outer"):
        y = checkpoint(layer, x, use_reentrant=False)
    assert packed
    assert packed[-1] in ("inner", "outer")
    for mine, theirs in zip(gradients(y, x), gradients(ONCE(x), x), strict=True):
        assert_close(mine, theirs, atol=1e-12)


class OtherCheckpoint(torch.autograd.Function):
    """A checkpoint as other libraries have it."""

    @staticmethod
    def forward(ctx: Any, function: Layer, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


def test_checkpoints_of_other_libraries_need_the_block_inside() -> None:
    cp, x = rs.ContextParallel(None, MASK), tokens()

    def layer(x: Tensor) -> Tensor:
        with cp:
            return attend(x)

    with cp, pytest.raises(rs.UnplannedAttention, match="autograd function OtherCheckpoint"):
        OtherCheckpoint.apply(attend, x)
    with cp:
        y = OtherCheckpoint.apply(layer, x)
        OtherCheckpoint.apply(attend, x.detach())  # needs no gradient
    for mine, theirs in zip(gradients(y, x), gradients(ONCE(x), x), strict=True):
        assert_close(mine, theirs, atol=1e-12)
