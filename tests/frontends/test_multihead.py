"""``nn.MultiheadAttention`` and the layers built on it inside a block, against one process with the same mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.testing.assertions import assert_close
from tests.conftest import Pools

N, E = 12, 16
MASK = rs.causal(N) & rs.window(left=5)
HIDDEN = ~torch.from_numpy(MASK.dense())


def tokens(dim: int = E, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, N, dim, dtype=torch.float64, generator=source).requires_grad_()


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, 4, dtype=torch.float64, **({"batch_first": True} | options))
    for name, parameter in module.named_parameters():
        if "bias" in name:  # PyTorch starts with zeros
            nn.init.normal_(parameter)
    return module


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cp() -> Iterator[rs.ContextParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield rs.ContextParallel(None, MASK)
    dist.destroy_process_group()


SELF = [tokens()] * 3
CROSS = [tokens(), *[tokens(seed=1)] * 2]
MODULES: dict[str, tuple[dict[str, Any], list[Tensor]]] = {
    "self": ({}, SELF),
    "cross": ({}, CROSS),
    "three inputs": ({}, [tokens(seed=n) for n in range(3)]),
    "no bias": ({"bias": False}, SELF),
    "no bias, cross": ({"bias": False}, CROSS),
    "other dims": ({"kdim": 24, "vdim": 40}, [tokens(), tokens(24), tokens(40)]),
    "tokens first": ({"batch_first": False}, [x.detach().transpose(0, 1).requires_grad_() for x in CROSS]),
    "no batch": ({}, [x.detach()[0].requires_grad_() for x in CROSS]),
}


@pytest.mark.parametrize("how", ["eager", "compiled", "checkpoint"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_outputs_and_gradients(cp: rs.ContextParallel, name: str, training: bool, how: str) -> None:
    torch._dynamo.reset()
    options, inputs = MODULES[name]
    module = attention(**options).train(training)
    learned = [*{id(x): x for x in inputs}.values(), *module.parameters()]

    def call(*inputs: Tensor) -> Tensor:
        out: Tensor = module(*inputs, need_weights=False)[0]
        return out

    calls: dict[str, Callable[..., Tensor]] = {
        "eager": call,
        "compiled": torch.compile(call, backend="aot_eager", fullgraph=True),
        "checkpoint": lambda *inputs: checkpoint(call, *inputs, use_reentrant=False),
    }
    with cp:
        out = calls[how](*inputs)
    want = module(*inputs, attn_mask=HIDDEN, need_weights=False)[0]
    assert_close(out, want, atol=1e-12)
    for mine, theirs in zip(*(torch.autograd.grad(y.square().sum(), learned) for y in (out, want)), strict=True):
        assert_close(mine, theirs, atol=1e-11)


def test_evaluation_without_gradients_does_not_use_the_fused_layer(cp: rs.ContextParallel) -> None:
    model, x = encoder().eval(), tokens()
    with torch.no_grad():
        want = model(x, mask=HIDDEN)
        with cp:
            assert_close(model(x), want, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_evaluation_of_the_fused_layer_is_refused(cp: rs.ContextParallel, backend: str) -> None:
    """Dynamo does not tell PyTorch's layer that a mode is active, so that the layer chooses its fused kernel."""
    torch._dynamo.reset()
    model, x = encoder().eval(), tokens()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        want = model(x, mask=HIDDEN)
        with cp, pytest.raises(rs.UnplannedAttention, match="set_fastpath_enabled"):
            compiled(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with cp:
                assert_close(compiled(x), want, atol=1e-12)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_is_causal_is_checked_against_the_plan(cp: rs.ContextParallel) -> None:
    module, x = attention(), tokens()
    with cp:
        out = module(x, x, x, attn_mask=~torch.ones(N, N).tril().bool(), is_causal=True, need_weights=False)[0]
    assert_close(out, module(x, x, x, attn_mask=HIDDEN, need_weights=False)[0], atol=1e-12)
    with rs.ContextParallel(None, rs.full(N)), pytest.raises(rs.UnplannedAttention, match="lets queries see later keys"):
        module(x, x, x, attn_mask=HIDDEN, is_causal=True, need_weights=False)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {}, "need_weights=False"),
        ({}, {"need_weights": False, "key_padding_mask": torch.zeros(2, N).bool()}, "key_padding_mask"),
        ({}, {"need_weights": False, "attn_mask": HIDDEN}, "attn_mask of shape"),
        ({"dropout": 0.1}, {"need_weights": False}, "dropout_p=0.1"),
        ({"add_bias_kv": True}, {"need_weights": False}, "add keys on each rank"),
        ({"add_zero_attn": True}, {"need_weights": False}, "add keys on each rank"),
    ],
)
def test_what_the_ranks_cannot_compute_is_refused(
    cp: rs.ContextParallel, options: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    module, x = attention(**options), tokens()
    with cp, pytest.raises(rs.UnplannedAttention, match=message):
        module(x, x, x, **arguments)


def test_dropout_is_off_in_evaluation(cp: rs.ContextParallel) -> None:
    module, x = attention(dropout=0.1).eval(), tokens()
    with cp:
        out = module(x, x, x, need_weights=False)[0]
    assert_close(out, module(x, x, x, attn_mask=HIDDEN, need_weights=False)[0], atol=1e-12)


# -- processes --------------------------------------------------------------------------------------------------------


def over_processes(rank: int, training: bool) -> None:
    model, whole = encoder().train(training), tokens().detach()
    cp = rs.ContextParallel(None, MASK, layout="zigzag")
    with cp:
        out = model(cp.shard(whole, dim=1))
    out.square().sum().backward()
    cp.sum_gradients(model.parameters())
    alone = encoder().train(training)
    want = alone(whole, mask=HIDDEN)
    want.square().sum().backward()
    assert_close(cp.unshard(out.detach(), dim=1), want, atol=1e-12)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert_close(mine.grad, theirs.grad, atol=1e-10)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_over_processes(pools: Pools, training: bool) -> None:
    pools(2).run(over_processes, training)
