"""LocalWorld as a user meets it; that its numbers are right is the fuzz's job (tests/test_fuzz.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ringspan as rs
from ringspan.kernels.reference import dense_attention

N = 29


def qkv(
    heads: int = 4, kv_heads: int = 4, n: int = N, m: int = N, dim: int = 8, v_dim: int = 8, **options: Any
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, n, dim), (2, kv_heads, m, dim), (2, kv_heads, m, v_dim)]
    return [torch.randn(shape, **options) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_result_has_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv())
    out = rs.LocalWorld(3).attention(q, k, v, mask=rs.causal(N))
    want = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True)
    assert out.dtype == dtype
    assert out.shape == q.shape
    assert (out - want).abs().max() <= 4 * torch.finfo(dtype).eps


def test_more_ranks_than_tokens() -> None:
    q, k, v = qkv(n=3, m=3, dtype=torch.float64)
    out = rs.LocalWorld(8).attention(q, k, v, mask=rs.causal(3))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_no_tokens_at_all() -> None:
    q, k, v = qkv(n=0, m=5)
    out, lse = rs.LocalWorld(2).attention(q, k, v, mask=rs.full(0, 5), return_lse=True)
    assert out.shape == (2, 4, 0, 8)
    assert lse.shape == (2, 4, 0)


def test_a_query_that_sees_nothing_is_zero_and_has_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(dtype=torch.float64))
    blind = rs.full(N) - rs.Mask.from_bands([(5, 9, 0, N, -N, N)], N)
    out, lse = rs.LocalWorld(3).attention(q, k, v, mask=blind, return_lse=True)
    out.sum().backward()
    assert (out[:, :, 5:9] == 0).all()
    assert (lse[:, :, 5:9] == -torch.inf).all()
    assert q.grad is not None
    assert (q.grad[:, :, 5:9] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))  # type: ignore[arg-type]


def test_gradients_by_finite_differences() -> None:
    """gradcheck knows nothing of us: out and lse, in q, k and v."""
    q, k, v = (x[:1, :, :, :2].requires_grad_() for x in qkv(2, 1, n=6, m=7, dtype=torch.float64))
    mask = rs.causal(6, 7, align="end") & rs.window(left=4)

    def f(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rs.LocalWorld(2).attention(*tensors, mask=mask, strategy="exchange", layout="striped", return_lse=True)

    assert torch.autograd.gradcheck(f, (q, k, v))


def test_only_some_inputs_need_gradients() -> None:
    q, k, v = qkv(dtype=torch.float64)
    v.requires_grad_()
    rs.LocalWorld(2).attention(q, k, v, mask=rs.causal(N)).sum().backward()
    assert v.grad is not None
    assert q.grad is None


def test_nan_is_not_swallowed() -> None:
    q, k, v = qkv(dtype=torch.float64)
    q[:, :, 4] = torch.nan
    for world in (1, 3):
        out, lse = rs.LocalWorld(world).attention(q, k, v, mask=rs.causal(N), return_lse=True)
        rotten = torch.isnan(out).all(-1)
        assert rotten[:, :, 4].all()
        assert torch.isnan(lse)[:, :, 4].all()
        assert not torch.isnan(out[:, :, :4]).any()
        assert not torch.isnan(out[:, :, 5:]).any()


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_that_is_not_positive(scale: float) -> None:
    tensors = [x.requires_grad_() for x in qkv(dtype=torch.float64)]
    got = rs.LocalWorld(3).attention(*tensors, mask=rs.causal(N), scale=scale)
    want = dense_attention(*tensors, torch.from_numpy(rs.causal(N).dense()), scale=scale).out
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), tensors) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_custom_layout() -> None:
    def halves(mask: rs.Mask, world: int) -> list[list[tuple[int, int]]]:
        return [[(0, 10)], [(10, mask.lengths[0])]]

    q, k, v = qkv(dtype=torch.float64)
    out = rs.LocalWorld(2).attention(q, k, v, mask=rs.causal(N), layout=halves)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_traffic_is_counted_over_calls() -> None:
    world = rs.LocalWorld(2)
    q, k, v = qkv()
    for calls in (1, 2):
        world.attention(q, k, v, mask=rs.full(N), strategy="gather", layout="contiguous")
        # 14 and 15 tokens, 2 × 4 heads, 8 + 8 wide, 4 bytes
        assert [t.sent for t in world.traffic] == [calls * tokens * 2 * 4 * 16 * 4 for tokens in (14, 15)]


GOOD = {"mask": rs.causal(N)}


@pytest.mark.parametrize(
    ("tensors", "options", "kind", "message"),
    [
        (qkv(n=N + 1, m=N + 1), {}, rs.InputError, f"q has {N + 1} tokens.*over {N} × {N}"),
        (qkv(m=N + 1), {}, rs.InputError, f"k has {N + 1}"),
        (qkv(heads=6), {}, rs.InputError, "6 query heads cannot share 4 key heads"),
        ([x[0] for x in qkv()], {}, rs.InputError, r"q must be \(batch, heads, tokens, dim\)"),
        ([x.int() for x in qkv()], {}, rs.InputError, "float16, bfloat16, float32, float64; got torch.int32"),
        ([*qkv()[:2], qkv()[2].double()], {}, rs.InputError, "one dtype"),
        ([qkv()[0], qkv(dim=4)[1], qkv()[2]], {}, rs.InputError, "one head dim"),
        ([*qkv()[:2], qkv(kv_heads=2)[2]], {}, rs.InputError, "k and v must have as many heads"),
        ([qkv()[0], *(x[:1] for x in qkv()[1:])], {}, rs.InputError, "one batch size"),
        (qkv(), {"mask": rs.window(left=3)}, rs.MaskError, "full.n. & window"),
        (qkv(), {"layout": "zagzig"}, rs.LayoutError, "zigzag"),
        (qkv(), {"layout": [[(0, 20)], [(10, N)]]}, rs.LayoutError, "token 10 is owned twice"),
        (qkv(), {"layout": [[(0, 20)], [(21, N)]]}, rs.LayoutError, "token 20 has no owner"),
        (qkv(m=4), {"mask": rs.full(N, 4), "layout": "per_document"}, rs.LayoutError, "one sequence for queries and keys"),
        (qkv(dim=0, v_dim=0), {}, rs.InputError, "at least 1 wide"),
        (qkv(), {"strategy": "rong"}, rs.PlanError, "did you mean ring"),
        (qkv(), {"strategy": "gather(stages=0)"}, rs.PlanError, "at least 1"),
        (qkv(), {"backend": "abacus"}, rs.KernelError, "eager, reference"),
        (qkv(), {"backend": "flsh"}, rs.UnknownKernel, "did you mean flash"),
        (qkv(), {"mask": None}, rs.MaskError, r"rs\.full\(n\) if every query sees every key; got None"),
        (qkv(), {"scale": "x"}, rs.InputError, "scale must be a number, .* got 'x'"),
        (qkv(), {"score_mod": 3}, rs.InputError, r"takes \(score, b, h, q, k\).*; 3 does not: 'int' object is not callable"),
        (qkv(), {"score_mod": lambda score: score}, rs.InputError, "does not: .* takes 1 positional argument but 5 were given"),
        (qkv(), {"score_mod": lambda *given: None}, rs.InputError, "must return the new score, a tensor; .* returns None"),
        (qkv(), {"score_mod": lambda *given: 0.0}, rs.InputError, "must return the new score, a tensor; .* returns 0.0"),
        (qkv(), {"score_mod": rs.alibi(torch.ones(3))}, rs.InputError, "made for 3 heads, but q has 4: .* one row for each"),
        (qkv(), {"score_mod": rs.alibi(torch.ones(5))}, rs.InputError, "made for 5 heads, but q has 4"),
        (qkv(), {"score_mod": rs.relative_bias(torch.ones(1, 3))}, rs.InputError, "made for 1 heads, but q has 4"),
    ],
)
def test_errors_name_the_input_and_the_remedy(tensors: Any, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        rs.LocalWorld(2).attention(*tensors, **{**GOOD, **options})


def test_an_error_raised_by_a_score_mod_is_not_replaced() -> None:
    def broken(score: torch.Tensor, *pair: torch.Tensor) -> torch.Tensor:
        return score + "nothing"  # type: ignore[operator]

    with pytest.raises(TypeError, match="str"):
        rs.LocalWorld(2).attention(*qkv(), mask=rs.causal(N), score_mod=broken)


@pytest.mark.parametrize("world", [0, -1, 1.5, None])
def test_a_world_has_at_least_one_rank(world: Any) -> None:
    with pytest.raises(rs.LayoutError, match="world must be"):
        rs.LocalWorld(world)


def test_compiled_code_breaks_the_graph_at_local_world() -> None:
    mask, (q, k, v) = rs.causal(101), torch.randn(3, 1, 4, 101, 16).unbind()

    def doubled(q: torch.Tensor) -> torch.Tensor:
        return rs.LocalWorld(4).attention(q * 1.5, k, v, mask=mask) * 2

    assert torch.equal(torch.compile(doubled, backend="aot_eager")(q), doubled(q))
