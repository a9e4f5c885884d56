"""``varlen_attn`` under context parallelism: out, lse and gradients against dense float64."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.testing.assertions import assert_close
from tests.conftest import Pools

LENGTHS = [5, 1, 0, 17, 9]
KV_LENGTHS = [7, 1, 0, 12, 20]
N, H, G, D = sum(LENGTHS), 4, 2, 8
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "left": (3, 0), "both": (2, 4), "right": (-1, 2)}
HAS_GQA = "enable_gqa" in varlen_attn.__kwdefaults__
LSE = AuxRequest(lse=True)


class Given(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def given(*, kv_heads: int = H, keys: int = N, dtype: torch.dtype = torch.float64) -> Given:
    source = torch.Generator().manual_seed(0)
    shapes = [(N, H, D), (keys, kv_heads, D), (keys, kv_heads, D), (N, H, D), (H, N)]
    tensors = [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes]
    return Given(*(x.requires_grad_(i < 3) for i, x in enumerate(tensors)))


def cu_seq(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def visible(lengths: list[int], kv_lengths: list[int], window: tuple[int, int]) -> Tensor:
    """The mask pair by pair, by the definition of flash attention: aligned at the end of each document."""
    seen = torch.zeros(sum(lengths), sum(kv_lengths), dtype=torch.bool)
    q0 = k0 = 0
    for n, m in zip(lengths, kv_lengths, strict=True):
        for q in range(n):
            for k in range(m):
                distance = k - (q + m - n)
                before, after = window[0] < 0 or distance >= -window[0], window[1] < 0 or distance <= window[1]
                seen[q0 + q, k0 + k] = before and after
        q0, k0 = q0 + n, k0 + m
    return seen


def truth(x: Given, seen: Tensor, scale: float | None = None) -> list[Tensor]:
    """out, lse, dq, dk and dv, dense."""
    k, v = (y.repeat_interleave(H // y.shape[1], dim=1) for y in (x.k, x.v))
    scores = torch.einsum("qhd,khd->hqk", x.q, k) * (D**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    out = torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp().nan_to_num(), v)
    is_empty = ~seen.any(1)
    loss = (out * x.dout).sum() + (lse * x.dlse).masked_fill(is_empty, 0).sum()
    return [out.detach(), lse.detach(), *(g.nan_to_num() for g in torch.autograd.grad(loss, x[:3]))]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("strategy", ["ring", "gather", "exchange", "pass_q", "ulysses"])
def test_local_world(window: str, strategy: str) -> None:
    x, cu = given(kv_heads=G), cu_seq(LENGTHS)
    layout = "zigzag" if strategy == "ring" else "balanced"
    options: Any = {"window_size": WINDOWS[window], "scale": 0.3, "enable_gqa": True, "strategy": strategy, "layout": layout}
    out, lse = rs.LocalWorld(3).varlen_attn(*x[:3], cu, cu, 17, 17, return_aux=LSE, **options)
    grads = torch.autograd.grad((out, lse), x[:3], (x.dout, x.dlse))
    want = truth(given(kv_heads=G), visible(LENGTHS, LENGTHS, WINDOWS[window]), 0.3)
    for mine, exact in zip((out, lse, *grads), want, strict=True):
        assert_close(mine, exact, atol=1e-12)


@pytest.mark.parametrize("window", ["full", "causal", "both"])
def test_local_world_with_other_numbers_of_keys(window: str) -> None:
    x = given(keys=sum(KV_LENGTHS))
    options: Any = {"window_size": WINDOWS[window], "layout": "contiguous"}
    out = rs.LocalWorld(2).varlen_attn(*x[:3], cu_seq(LENGTHS), cu_seq(KV_LENGTHS), 17, 20, **options)
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out, x[:3], x.dout)
    y = given(keys=sum(KV_LENGTHS))
    want = truth(y._replace(dlse=torch.zeros_like(y.dlse)), visible(LENGTHS, KV_LENGTHS, WINDOWS[window]))
    for mine, exact in zip((out, *grads), (want[0], *want[2:]), strict=True):
        assert_close(mine, exact, atol=1e-12)


def test_local_world_wants_gqa_to_be_enabled() -> None:
    x, cu = given(kv_heads=G), cu_seq(LENGTHS)
    with pytest.raises(rs.InputError, match="enable_gqa=True"):
        rs.LocalWorld(2).varlen_attn(*x[:3], cu, cu, 17, 17)


# -- processes --------------------------------------------------------------------------------------------------------


def in_block(rank: int, strategy: str, layout: str, windows: list[str], gqa: bool, mode: str) -> list[list[Tensor]]:
    """For each window out, lse, dq, dk and dv of the whole sequence."""
    cp = rs.ContextParallel(None, rs.documents(LENGTHS), strategy=strategy, layout=layout)
    cu, found = cu_seq(LENGTHS), []
    for name in windows:

        def call(q: Tensor, k: Tensor, v: Tensor, name: str = name) -> tuple[Tensor, Tensor]:
            options: Any = {"enable_gqa": True} if gqa and HAS_GQA else {}
            return varlen_attn(q, k, v, cu, cu, 17, 17, window_size=WINDOWS[name], scale=0.3, return_aux=LSE, **options)  # type: ignore[return-value]

        x = given(kv_heads=G if gqa else H)
        q, k, v = cp.shard(*x[:3], dim=0)
        with cp:
            if mode == "checkpoint":
                out, lse = checkpoint(call, q, k, v, use_reentrant=False, context_fn=cp.checkpoint_context)
            elif mode == "compile":
                out, lse = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
            else:
                out, lse = call(q, k, v)
        loss = (out * cp.shard(x.dout, dim=0)).sum() + (lse * cp.shard(x.dlse, dim=1)).sum()
        grads = torch.autograd.grad(loss, x[:3])
        for g in grads:
            dist.all_reduce(g)
        found.append([cp.unshard(out.detach(), dim=0), cp.unshard(lse.detach(), dim=1), *grads])
    return found


@pytest.mark.parametrize(
    ("strategy", "layout", "windows", "gqa", "mode"),
    [
        ("ring", "zigzag", [*WINDOWS], True, "eager"),
        ("auto", "auto", ["causal", "left"], False, "eager"),
        ("pass_q", "contiguous", ["full", "left"], False, "checkpoint"),
        ("exchange", "balanced", ["causal", "both"], True, "compile"),
    ],
)
def test_over_processes(pools: Pools, strategy: str, layout: str, windows: list[str], gqa: bool, mode: str) -> None:
    for found in pools(2).run(in_block, strategy, layout, windows, gqa, mode):
        for name, got in zip(windows, found, strict=True):
            want = truth(given(kv_heads=G if gqa else H), visible(LENGTHS, LENGTHS, WINDOWS[name]), 0.3)
            for mine, exact in zip(got, want, strict=True):
                assert_close(mine, exact, atol=1e-12)


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cp(world_of_one: None) -> rs.ContextParallel:
    return rs.ContextParallel(None, rs.documents(LENGTHS))


def test_a_call_with_the_plans_own_mask_uses_the_plan(cp: rs.ContextParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    import ringspan.frontends.varlen as front_end

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr(front_end, "make_plan", refuse)
    x, cu = given(), cu_seq(LENGTHS)
    with cp:
        out = varlen_attn(*x[:3], cu, cu, 17, 17, window_size=(-1, 0))
    assert_close(out, truth(given(), visible(LENGTHS, LENGTHS, (-1, 0)))[0], atol=1e-12)


def test_a_change_of_cu_seq_is_seen(cp: rs.ContextParallel) -> None:
    """Also one that does not change the version of the tensor, as by a collective."""
    x, cu = given(), cu_seq(LENGTHS)
    with cp:
        varlen_attn(*x[:3], cu, cu, 17, 17)
        cu.numpy()[1] = 4
        with pytest.raises(rs.InputError, match="documents of 4, 2, 17, 9 tokens"):
            varlen_attn(*x[:3], cu, cu, 17, 17)


def test_documents_without_tokens_do_not_count(cp: rs.ContextParallel) -> None:
    x, padded = given(), cu_seq([0, *LENGTHS, 0, 0])
    with cp:
        out = varlen_attn(*x[:3], padded, padded, 17, 17, window_size=(-1, 0))
    assert_close(out, truth(given(), visible(LENGTHS, LENGTHS, (-1, 0)))[0], atol=1e-12)


def test_documents_given_by_ids(world_of_one: None) -> None:
    """Documents of one token in a row are one band, a diagonal."""
    lengths = [1, 1, 1, 20, 1, 1, 7]
    ids = [i for i, n in enumerate(lengths) for _ in range(n)]
    cp, x, cu = rs.ContextParallel(None, rs.documents(ids=ids)), given(), cu_seq(lengths)
    with cp:
        out = varlen_attn(*x[:3], cu, cu, 20, 20, window_size=(-1, -1))
    assert_close(out, truth(given(), visible(lengths, lengths, (-1, -1)))[0], atol=1e-12)


def test_cross_attention(world_of_one: None) -> None:
    mask = rs.documents(LENGTHS, kv_lengths=KV_LENGTHS, align="end")
    cp, x = rs.ContextParallel(None, mask, layout="contiguous"), given(keys=sum(KV_LENGTHS))
    for name, window in WINDOWS.items():
        with cp:
            out = varlen_attn(*x[:3], cu_seq(LENGTHS), cu_seq(KV_LENGTHS), 17, 20, window_size=window)
        want = truth(given(keys=sum(KV_LENGTHS)), visible(LENGTHS, KV_LENGTHS, window))[0]
        assert_close(out, want, atol=1e-12, what=name)


@pytest.mark.parametrize(
    ("lengths", "kv_lengths", "message"),
    [
        ([N], [N], "documents of 32 tokens, but the plan's mask documents.* has documents of 5, 1, 17, 9 tokens"),
        ([5, 1, 16, 10], [5, 1, 16, 10], "documents of 5, 1, 16, 10 tokens"),
        ([5, 1, 17, 8, 1], [5, 1, 17, 8, 1], "rs.documents"),
        ([5, 1, 17, 9], [5, 17, 1, 9], "documents of 5, 1 × 17, 17 × 1, 9 tokens"),
        ([5, 1, 17, 9], [5, 1, 26], "4 documents and cu_seq_k has 3"),
        ([3, 5], [3, 5], "cu_seq_q ends at 8, but the plan's sequence has 32 tokens.*whole sequence"),
    ],
)
def test_other_documents_are_refused(cp: rs.ContextParallel, lengths: list[int], kv_lengths: list[int], message: str) -> None:
    x = given()
    with cp, pytest.raises(rs.InputError, match=message):
        varlen_attn(*x[:3], cu_seq(lengths), cu_seq(kv_lengths), 17, 17)


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        (torch.tensor([1, N]), "start at 0"),
        (torch.tensor([0, 20, 10, N]), "never decrease"),
        (torch.tensor([0.0, N]), "1-D tensor of whole numbers"),
        (torch.tensor([[0, N]]), "1-D tensor of whole numbers"),
        (torch.tensor([], dtype=torch.int32), "start at 0"),
    ],
)
def test_malformed_cu_seq_is_refused(cp: rs.ContextParallel, cu: Tensor, message: str) -> None:
    x = given()
    with cp, pytest.raises(rs.InputError, match=message):
        varlen_attn(*x[:3], cu, cu, 17, 17)


def test_a_mask_with_a_function_has_no_known_documents(world_of_one: None) -> None:
    scattered = torch.randint(0, 2, (N, N), generator=torch.Generator().manual_seed(0)).bool()
    cp = rs.ContextParallel(None, rs.mask_mod(lambda b, h, q, k: scattered[q, k], N))
    x, cu = given(), cu_seq(LENGTHS)
    with cp, pytest.raises(rs.InputError, match="decided by a function"):
        varlen_attn(*x[:3], cu, cu, 17, 17)


def test_is_causal_of_the_operator(cp: rs.ContextParallel) -> None:
    """varlen_attn sets it from window_size. PyTorch's kernels let it override the right side of the window."""
    x, cu = given(), cu_seq(LENGTHS)
    with cp:
        out, lse, _ = torch.ops.torch_attn._varlen_attn(*x[:3], cu, cu, 17, 17, True, None, [3, 5])
    want = truth(given(), visible(LENGTHS, LENGTHS, (3, 0)))
    assert_close(out, want[0], atol=1e-12)
    assert_close(lse, want[1], atol=1e-12)


def test_four_dims_are_refused(cp: rs.ContextParallel) -> None:
    x, cu = torch.randn(1, N, H, D), cu_seq(LENGTHS)
    with cp, pytest.raises(rs.InputError, match="3 dims"):
        torch.ops.torch_attn._varlen_attn(x, x, x, cu, cu, 17, 17)


@pytest.mark.skipif(not HAS_GQA, reason="from torch 2.12 on")
@pytest.mark.parametrize("options", [{"seqused_k": torch.tensor([1])}, {"block_table": torch.zeros(1, 1, dtype=torch.int32)}])
def test_a_kv_cache_is_refused(cp: rs.ContextParallel, options: dict[str, Any]) -> None:
    x, cu = given(), cu_seq(LENGTHS)
    key = x.k.unsqueeze(0) if "block_table" in options else x.k
    with cp, pytest.raises(rs.UnplannedAttention, match="KV cache"):
        varlen_attn(x.q, key, key, cu, cu, 17, 17, **options)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="from torch 2.12 on")
def test_the_out_variant_is_refused(cp: rs.ContextParallel) -> None:
    x, cu = given(), cu_seq(LENGTHS)
    with cp, pytest.raises(rs.UnplannedAttention, match="call varlen_attn, without out"):
        varlen.varlen_attn_out(torch.empty(N, H, D), *x[:3], cu, cu, 17, 17)


class Packed(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return varlen_attn(q.tanh(), k, v, cu, cu, 17, 17, window_size=(4, 0))  # type: ignore[return-value]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_for_all_documents(world_of_one: None, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Packed(), backend=backend, fullgraph=True)
    for n, lengths in enumerate((LENGTHS, [9, 1, 9, 3, 10], [2, 28, 0, 1, 1])):
        cp, x = rs.ContextParallel(None, rs.documents(lengths)), given()
        with cp, torch._dynamo.config.patch(error_on_recompile=n > 0):
            out = compiled(*x[:3], cu_seq(lengths))
        grads = torch.autograd.grad(out, x[:3], x.dout)
        y = given()
        tanh = y._replace(q=y.q.tanh().detach().requires_grad_(), dlse=torch.zeros_like(y.dlse))
        want = truth(tanh, visible(lengths, lengths, (4, 0)))
        want[2] = want[2] * (1 - tanh.q.detach() ** 2)
        for mine, exact in zip((out, *grads), (want[0], *want[2:]), strict=True):
            assert_close(mine, exact, atol=1e-12)


def test_compiled_code_checks_the_documents_of_each_call(cp: rs.ContextParallel) -> None:
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(Packed(), backend="eager", fullgraph=True)
    x = given()
    with cp:
        compiled(*x[:3], cu_seq(LENGTHS))
        with pytest.raises(rs.InputError, match="documents of 5, 1, 16, 10 tokens"):
            compiled(*x[:3], cu_seq([5, 1, 16, 10]))


def test_a_compiled_program_can_run_backward_after_the_block_is_gone(world_of_one: None) -> None:
    torch._dynamo.reset()
    cp, x = rs.ContextParallel(None, rs.documents(LENGTHS)), given()
    with cp:
        out = torch.compile(Packed(), backend="aot_eager", fullgraph=True)(*x[:3], cu_seq(LENGTHS))
    del cp
    torch._dynamo.reset()
    gc.collect()
    dk = torch.autograd.grad(out, x.k, x.dout)[0]
    y = given()
    tanh = y._replace(q=y.q.tanh().detach().requires_grad_(), dlse=torch.zeros_like(y.dlse))
    assert_close(dk, truth(tanh, visible(LENGTHS, LENGTHS, (4, 0)))[3], atol=1e-12)
