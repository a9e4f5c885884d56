"""``_ContextParallel``: a parallel style for modules with attention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ringspan.compat import (
    _context_parallel_shard,
    _ContextParallel,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    context_parallel_unshard,
    style,
)
from ringspan.compat.attention import MaskFromCallMode
from tests.compat.jobs import assert_near, mesh_of_all, options, qkv, single_process
from tests.conftest import Pools

SDPA = _ContextParallel.AttentionType.SDPA


class Attention(nn.Module):
    """As in torch's test, it holds the function itself, which patching a module of torch would not replace."""

    def __init__(self) -> None:
        super().__init__()
        self.sdpa = F.scaled_dot_product_attention

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.sdpa(*args, **kwargs)


def in_a_module(rank: int, tokens: int, is_causal: bool, balance: bool, rotation: str) -> None:
    mesh, whole = mesh_of_all(), qkv(tokens)
    want, want_grads = single_process(*whole, is_causal=is_causal)
    attention = parallelize_module(Attention(), mesh, _ContextParallel(seq_dim=2, attention_type=SDPA))
    balancer = _HeadTailLoadBalancer(tokens, mesh.size(), "cpu") if balance else None
    q, k, v = _context_parallel_shard(mesh, whole, (2,) * 3, load_balancer=balancer)
    for x in (q, k, v):
        x.requires_grad = True
    with options(rotation=rotation):
        _enable_context_parallel_dispatcher()
        out = attention(q, k, v, is_causal=is_causal)
        out.square().sum().backward()
        _disable_context_parallel_dispatcher()
    got = context_parallel_unshard(mesh, [out, q.grad, k.grad, v.grad], [2] * 4)
    for one, expected in zip(got, [want, *want_grads], strict=True):
        assert_near(one, expected)
    assert F.scaled_dot_product_attention(q, q, q).shape == q.shape  # outside the module, attention is local


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@pytest.mark.parametrize("balance", [True, False], ids=["balanced", "contiguous"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("world", "tokens"), [(2, 64), (4, 64), (4, 37)])
def test_attention_in_a_module(pools: Pools, world: int, tokens: int, is_causal: bool, balance: bool, rotation: str) -> None:
    pools(world).run(in_a_module, tokens, is_causal, balance, rotation)


class Layer(nn.Module):
    """A layer of a model, whose inputs are not queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, *, twice: bool) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if twice:
            q = F.scaled_dot_product_attention(q, k, v)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer()).double()


def run(layers: nn.Sequential, x: torch.Tensor, *, checkpointed: bool) -> torch.Tensor:
    for layer in layers:
        x = checkpoint(layer, x, twice=True, use_reentrant=False) if checkpointed else layer(x, twice=True)
    return x


def in_a_model(rank: int) -> None:
    """Two layers with two masks each, recomputed in backward. Parameter gradients sum to those of the whole."""
    mesh, x = mesh_of_all(), torch.randn(2, 21, 8, generator=torch.Generator().manual_seed(1)).double()
    whole = model()
    want = run(whole, x, checkpointed=False)
    want.square().sum().backward()
    parallel = _ContextParallel(2, SDPA)
    split = parallelize_module(model(), mesh, {"0": parallel, "1": parallel})
    (mine,) = _context_parallel_shard(mesh, [x], [1], _HeadTailLoadBalancer(21, mesh.size(), "cpu"))
    out = run(split, mine, checkpointed=True)
    out.square().sum().backward()
    torch.testing.assert_close(context_parallel_unshard(mesh, [out], [1])[0], want, rtol=0, atol=1e-12)
    for mine_p, p in zip(split.parameters(), whole.parameters(), strict=True):
        assert mine_p.grad is not None
        torch.distributed.all_reduce(mine_p.grad)
        torch.testing.assert_close(mine_p.grad, p.grad, rtol=0, atol=1e-11)


class ReturnArguments(nn.Module):
    def forward(self, *args: object, **kwargs: object) -> object:
        if kwargs.pop("fail", False):
            raise ZeroDivisionError
        return args, kwargs


def arguments_as_passed(rank: int) -> None:
    module = parallelize_module(ReturnArguments(), mesh_of_all(), _ContextParallel(attention_type=SDPA, seq_dim=2))
    q, k, v = qkv(4)
    for args, kwargs in [
        ((q, k, v), {}),
        ((q, k), {"value": v}),
        ((q,), {"key": k, "value": v}),
        ((), {"query": q, "key": k, "value": v}),
        ((q, k, v, None, 0.0), {"is_causal": True}),
    ]:
        got_args, got_kwargs = module(*args, **kwargs)
        assert all(a is b for a, b in zip(got_args, args, strict=True))
        assert list(got_kwargs) == list(kwargs)
        assert all(got_kwargs[name] is kwargs[name] for name in kwargs)
    with pytest.raises(ZeroDivisionError):
        module(fail=True)
    assert not torch.overrides._get_current_function_mode_stack()


class LeavesFirstInFirstOut(nn.Module):
    """Two threads are inside at the same time, and the one that entered first leaves first."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.second_is_inside, self.first_has_left = [threading.Event() for _ in range(3)]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_first: bool) -> torch.Tensor | None:
        if is_first:
            self.entered.set()
            assert self.second_is_inside.wait(60)
            return None
        self.second_is_inside.set()
        assert self.first_has_left.wait(60)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def two_threads(rank: int) -> None:
    """Each thread exits the mode that it entered, and the second thread's attention is context-parallel to its end."""
    modes: list[tuple[str, int, int]] = []  # what happened, in which thread, with which mode

    class RecordingMode(MaskFromCallMode):
        def __enter__(self) -> Self:
            modes.append(("enter", threading.get_ident(), id(self)))
            return super().__enter__()

        def __exit__(self, *raised: object) -> None:
            modes.append(("exit", threading.get_ident(), id(self)))
            super().__exit__(*raised)

    mesh, whole = mesh_of_all(), qkv(12)
    with patch.object(style, "MaskFromCallMode", RecordingMode):
        module = LeavesFirstInFirstOut()
        attention = parallelize_module(module, mesh, _ContextParallel(2, SDPA))
        q, k, v = _context_parallel_shard(mesh, whole, (2,) * 3)

        def first() -> None:
            attention(q, k, v, is_first=True)
            module.first_has_left.set()

        with ThreadPoolExecutor() as threads:
            other = threads.submit(first)
            assert module.entered.wait(60)
            out = attention(q, k, v, is_first=False)
            other.result()
    expected, _ = single_process(*whole, is_causal=True)
    assert_near(context_parallel_unshard(mesh, [out], [2])[0], expected)
    own, others = threading.get_ident(), [thread for _, thread, _ in modes if thread != threading.get_ident()]
    assert [event for event, _, _ in modes] == ["enter", "enter", "exit", "exit"]
    assert len(others) == 2
    for thread in (own, others[0]):
        assert len({mode for _, of, mode in modes if of == thread}) == 1, modes


JOBS = [in_a_model, arguments_as_passed, two_threads]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("job", JOBS, ids=[job.__name__ for job in JOBS])
def test_styles(pools: Pools, job: Callable[..., None], world: int) -> None:
    pools(world).run(job)


def test_the_style_is_a_parallel_style() -> None:
    parallel = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
    assert isinstance(parallel, ParallelStyle)
    assert (parallel.seq_dim, parallel.attention_type.value) == (2, "flex_attention")
    torchs = pytest.importorskip("torch.distributed.tensor.experimental._attention")._ContextParallel.AttentionType.FLEX
    assert _ContextParallel(2, torchs).attention_type is _ContextParallel.AttentionType.FLEX
    with pytest.raises(ValueError, match="attention_type must be one of"):
        _ContextParallel(2, "sdpa")  # type: ignore[arg-type]
