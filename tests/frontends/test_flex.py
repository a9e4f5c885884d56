"""FlexAttention under context parallelism: out, lse and gradients against the same functions on dense float64."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.frontends.flex import plan_of
from tests.conftest import Pools
from tests.flex_reference import dense_flex

N, B, H, G, D = 256, 2, 4, 2, 16
DOCUMENTS = 28
LAYOUTS = ("contiguous", "zigzag", "per_document", "round_robin", "balanced")
STRATEGIES = ("ring", "gather", "exchange", "pass_q", "ulysses", "hierarchical(per_node=2)", "hybrid(per_node=2)")


def document_ids() -> Tensor:
    """28 documents in each batch row, with other boundaries in each."""
    source = torch.Generator().manual_seed(1)
    cuts = torch.stack([torch.randperm(N - 1, generator=source)[: DOCUMENTS - 1] + 1 for _ in range(B)])
    return (torch.arange(N) >= cuts.sort().values[:, :, None]).sum(1)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def in_documents() -> Callable[..., Tensor]:
    ids = document_ids()
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q)


class Given(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias_HR: Tensor
    dout: Tensor
    dlse: Tensor

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """A learned bias for each head and distance."""
        return score + self.bias_HR[h, (q - k).clamp(-7, 7) + 7]

    @property
    def learned(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.bias_HR]


def given(dtype: torch.dtype = torch.float32) -> Given:
    source = torch.Generator().manual_seed(0)
    shapes = [(B, H, N, D), (B, G, N, D), (B, G, N, D), (H, 15), (B, H, N, D), (B, H, N)]
    tensors = [torch.randn(shape, generator=source).to(dtype) for shape in shapes]
    return Given(*(x.requires_grad_(i < 4) for i, x in enumerate(tensors)))


def truth(mask_mod: Callable[..., Tensor], *, biased: bool) -> list[Tensor]:
    """out, lse, dq, dk, dv and, if it is used, the gradient of the bias."""
    x = given(torch.float64)
    want = dense_flex(x.q, x.k, x.v, mask_mod, x.score_mod if biased else None)
    grads = torch.autograd.grad(want, x.learned if biased else x.learned[:3], (x.dout, x.dlse))
    return [*(y.detach() for y in want), *grads]


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    names = ("out", "lse", "dq", "dk", "dv", "dbias")
    for name, mine, exact in zip(names, got, want, strict=False):
        tolerance = 2e-6 if name in ("out", "lse") else 1e-5
        error = (mine.double() - exact).abs().max().item() / max(1.0, exact.abs().max().item())
        assert error <= tolerance, (name, error)


MASK_MODS = {"causal": lambda: (causal, None), "documents": lambda: (in_documents(), B)}


@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_strategies(name: str, layout: str) -> None:
    mask_mod, batch = MASK_MODS[name]()
    block_mask = create_block_mask(mask_mod, batch, None, N, N, device="cpu", BLOCK_SIZE=16)
    want = {biased: truth(mask_mod, biased=biased) for biased in (False, True)}
    for i, strategy in enumerate(STRATEGIES):
        x, biased = given(), i % 2 == 0
        out, aux = rs.LocalWorld(4).flex_attention(
            x.q,
            x.k,
            x.v,
            x.score_mod if biased else None,
            block_mask,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
            layout=layout,
            strategy=strategy,
        )
        assert isinstance(aux, tuple)
        grads = torch.autograd.grad((out, aux.lse), x.learned if biased else x.learned[:3], (x.dout, x.dlse))
        assert_close([out, aux.lse, *grads], want[biased])


# -- processes ---------------------------------------------------------------------------------------------------------


def split_flex(rank: int, name: str, layout: str, strategy: str, biased: bool, in_block: bool) -> list[Tensor]:
    """Attention of this rank, gathered: the same on every rank."""
    mask_mod, batch = MASK_MODS[name]()
    block_mask = create_block_mask(mask_mod, batch, None, N, N, device="cpu", BLOCK_SIZE=16)
    mask = rs.block_mask(block_mask) if in_block else rs.causal(N)
    cp = rs.ContextParallel(None, mask, layout=layout, strategy=strategy)
    x = given()
    q, k, v, dout, dlse = cp.shard(x.q.detach(), x.k.detach(), x.v.detach(), x.dout, x.dlse, dim=2)
    leaves = [y.requires_grad_() for y in (q, k, v)]
    with cp:
        # Either the block or the call has the mask.
        out, lse = flex_attention(
            *leaves, x.score_mod if biased else None, None if in_block else block_mask, enable_gqa=True, return_lse=True
        )
    torch.autograd.backward((out, lse), (dout, dlse))
    if biased:
        cp.sum_gradients([x.bias_HR])
    whole = [cp.unshard(y, dim=2).detach() for y in (out, lse, *(leaf.grad for leaf in leaves))]
    return [*whole, *([x.bias_HR.grad] if biased else [])]


PROCESSES = [
    (2, "causal", "zigzag", "ring", True, True),
    (2, "documents", "contiguous", "exchange", False, False),
    (2, "documents", "round_robin", "gather", True, True),
    (4, "causal", "per_document", "hierarchical(per_node=2)", False, False),
    (4, "documents", "balanced", "auto", True, False),
    (4, "documents", "zigzag", "ulysses", True, True),
    (4, "documents", "per_document", "pass_q", False, True),
    (4, "causal", "round_robin", "hybrid(per_node=2)", True, False),
]


@pytest.mark.parametrize(("world", "name", "layout", "strategy", "biased", "in_block"), PROCESSES)
def test_over_processes(pools: Pools, world: int, name: str, layout: str, strategy: str, biased: bool, in_block: bool) -> None:
    want = truth(MASK_MODS[name]()[0], biased=biased)
    for got in pools(world).run(split_flex, name, layout, strategy, biased, in_block):
        assert_close(got, want)


# -- the block ---------------------------------------------------------------------------------------------------------


def ragged(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q * 3 + k * k) % 7 < 4


def small(n: int = 40) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, n, 8, dtype=torch.float64) for _ in range(3)]


def blocks(function: Callable[..., Tensor] = ragged, n: int = 40) -> BlockMask:
    return create_block_mask(function, None, None, n, n, device="cpu", BLOCK_SIZE=16)


REFUSED: dict[str, tuple[Callable[[list[Tensor]], Any], type[Exception], str]] = {
    "another length": (
        lambda x: flex_attention(*x, block_mask=blocks(n=24)),
        rs.InputError,
        r"over 24 × 24 .*whole sequence is 40 × 40: make it with create_block_mask\(…, Q_LEN=40, KV_LEN=40\)",
    ),
    "no BlockMask": (lambda x: flex_attention(*x, block_mask=torch.ones(40, 40)), rs.InputError, "not Tensor"),  # type: ignore[arg-type]
    "shared heads": (lambda x: flex_attention(x[0], x[1][:, :1], x[2][:, :1]), rs.InputError, "enable_gqa=True"),
    "max_scores": (
        lambda x: flex_attention(*x, return_aux=AuxRequest(max_scores=True)),
        rs.InputError,
        "max_scores is not available",
    ),
    "twice": (
        lambda x: flex_attention(*x, return_lse=True, return_aux=AuxRequest(lse=True)),
        rs.InputError,
        "exclude each other",
    ),
    "three dims": (lambda x: flex_attention(*(y[0] for y in x)), rs.InputError, r"must be \(batch, heads, tokens, dim\)"),
}


@pytest.mark.usefixtures("world_of_one")
class TestBlock:
    def test_sdpa_with_a_mask_that_has_a_predicate(self) -> None:
        with rs.ContextParallel(None, rs.mask_mod(ragged, 40) & rs.causal()):
            out = F.scaled_dot_product_attention(*small(), is_causal=True)
        want = dense_flex(*small(), lambda b, h, q, k: ragged(b, h, q, k) & (k <= q)).out
        torch.testing.assert_close(out, want)

    def test_is_causal_where_the_function_is_not(self) -> None:
        with (
            rs.ContextParallel(None, rs.mask_mod(ragged, 40)),
            pytest.raises(rs.UnplannedAttention, match="lets queries see later keys"),
        ):
            F.scaled_dot_product_attention(*small(), is_causal=True)

    @pytest.mark.parametrize("call", [flex_attention, torch.compile(flex_attention)], ids=["eager", "compiled"])
    def test_without_a_block_mask_the_mask_is_that_of_the_block(self, call: Callable[..., Any]) -> None:
        with rs.ContextParallel(None, rs.causal(40)):
            out = call(*small(), lambda score, b, h, q, k: score * 2)
        torch.testing.assert_close(out, dense_flex(*small(), causal, lambda score, *_: score * 2).out)

    def test_autocast_chooses_the_dtype(self) -> None:
        q, k, v = (x.float() for x in small())
        with rs.ContextParallel(None, rs.causal(40)), torch.autocast("cpu", torch.bfloat16):
            out = flex_attention(q, k, v)
        assert out.dtype == torch.bfloat16
        half = [x.bfloat16() for x in (q, k, v)]
        torch.testing.assert_close(out.double(), dense_flex(*half, causal).out, atol=1e-2, rtol=1e-2)

    def test_a_block_mask_is_converted_once_unless_it_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looked: list[object] = []
        real = rs.block_mask
        monkeypatch.setattr("ringspan.frontends.flex.as_mask", lambda given: looked.append(given) or real(given))
        hidden = torch.zeros(40, dtype=torch.bool)

        def not_hidden(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return ragged(b, h, q, k) & ~hidden[k]

        made = blocks(not_hidden)
        with rs.ContextParallel(None, rs.full(40)):
            first, second = (flex_attention(*small(), block_mask=made) for _ in range(2))
            assert len(looked) == 1
            hidden[7] = True
            third = flex_attention(*small(), block_mask=made)
        assert len(looked) == 2
        torch.testing.assert_close(first, dense_flex(*small(), ragged).out)
        torch.testing.assert_close(second, first)
        torch.testing.assert_close(third, dense_flex(*small(), not_hidden).out)

    def test_a_second_call_plans_nothing_and_makes_no_context(self, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = small()
        cp, made = rs.ContextParallel(None, rs.full(40)), [blocks(), blocks(causal)]
        want = [cp.flex_attention(q, k, v, block_mask=one) for one in made]
        again = [rs.flex_attention(q, k, v, block_mask=one, plan=cp.plan) for one in made]
        for work in ("ringspan.frontends.flex.make_plan", "ringspan.frontends.context_parallel.ContextParallel"):
            monkeypatch.setattr(work, lambda *args, work=work, **kwargs: pytest.fail(f"{work} was called again"))
        for _ in range(2):
            torch.testing.assert_close([cp.flex_attention(q, k, v, block_mask=one) for one in made], want)
            torch.testing.assert_close([rs.flex_attention(q, k, v, block_mask=one, plan=cp.plan) for one in made], again)

    def test_a_block_mask_is_planned_for_the_hardware_and_shape_of_the_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[dict[str, Any]] = []
        monkeypatch.setattr(
            "ringspan.frontends.flex.make_plan", lambda *args, **given: asked.append(given) or rs.plan(*args, **given)
        )
        made, shapes = blocks(), [rs.Shape(heads=heads, kv_heads=2, head_dim=8) for heads in (2, 4)]
        for shape in shapes:
            rs.ContextParallel(None, rs.full(40), hardware="h200x1", shape=shape).flex_attention(*small(), block_mask=made)
        assert [(given["hardware"], given["shape"]) for given in asked] == [("h200x1", shape) for shape in shapes]

    def test_activation_checkpointing(self) -> None:
        cp = rs.ContextParallel(None, rs.full(40))
        q, k, v = (x.requires_grad_() for x in small())
        made = blocks()
        with cp:
            out = checkpoint(
                lambda *x: flex_attention(*x, block_mask=made), q, k, v, use_reentrant=False, context_fn=cp.checkpoint_context
            )
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        want = torch.autograd.grad(dense_flex(q, k, v, ragged).out.sum(), (q, k, v))
        torch.testing.assert_close(grads, want)
        with cp:
            checkpoint(lambda *x: flex_attention(*x, block_mask=made), q, k, v, use_reentrant=True).sum().backward()
        torch.testing.assert_close((q.grad, k.grad, v.grad), want)

    def test_other_threads_and_local_attention_are_not_intercepted(self) -> None:
        q, k, v = (x.float() for x in small())
        want = dense_flex(q, k, v, ragged).out.float()
        seen: list[Tensor] = []
        with rs.ContextParallel(None, rs.causal(40), expect_attention=False):
            thread = threading.Thread(target=lambda: seen.append(flex_attention(q, k, v, block_mask=blocks())))
            thread.start()
            thread.join()
            with rs.local_attention():
                seen.append(flex_attention(q, k, v, block_mask=blocks()))
        for out in seen:
            torch.testing.assert_close(out, want)

    def test_calls_are_not_intercepted_after_the_block_however_it_is_left(self) -> None:
        q, k, v = (x.float() for x in small())
        want, of_block = (dense_flex(q, k, v, mask).out.float() for mask in (ragged, causal))
        cp = rs.ContextParallel(None, rs.causal(40), expect_attention=False)
        with cp:
            with cp:
                torch.testing.assert_close(flex_attention(q, k, v), of_block)
            torch.testing.assert_close(flex_attention(q, k, v), of_block)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks()), want)
        with pytest.raises(ZeroDivisionError), cp:
            _ = 1 / 0
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks()), want)

    @pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
    def test_unsupported_calls_are_refused(self, call: Callable[..., Any], kind: type[Exception], message: str) -> None:
        with rs.ContextParallel(None, rs.full(40)), pytest.raises(kind, match=message):
            call(small())


def test_a_block_mask_is_planned_as_its_mask_would_be() -> None:
    """A slow link makes splitting heads the fastest, if their number is known. On the assumed machine it is not."""
    made = create_block_mask(lambda b, h, q, k: q >= 0, None, None, 4096, 4096, device="cpu")
    given: dict[str, Any] = {"hardware": "h200x1", "shape": rs.Shape(heads=32, kv_heads=8, head_dim=128)}
    like = rs.plan(rs.full(4096), world=16, **given)
    found = plan_of(made, like, "auto", **given)
    assert found.strategy == like.strategy != plan_of(made, like, "auto").strategy


# -- results and errors ------------------------------------------------------------------------------------------------


def test_returns_what_flex_attention_returns() -> None:
    q, k, v = (x.float() for x in small())
    world, made = rs.LocalWorld(3), blocks()
    plain, with_aux = (
        flex_attention(q, k, v, block_mask=made),
        flex_attention(q, k, v, block_mask=made, return_aux=AuxRequest(lse=True)),
    )
    torch.testing.assert_close(world.flex_attention(q, k, v, block_mask=made), plain)
    torch.testing.assert_close(world.flex_attention(q, k, v, None, made, return_lse=True), (plain, with_aux[1].lse))
    out, aux = world.flex_attention(q, k, v, None, made, return_aux=AuxRequest(lse=True))
    assert type(aux) is type(with_aux[1])
    torch.testing.assert_close((out, aux.lse), (plain, with_aux[1].lse))
    assert world.flex_attention(q, k, v, None, made, return_aux=AuxRequest())[1].lse is None


def test_a_captured_tensor_changed_since_planning_is_refused() -> None:
    ids = torch.randint(3, (2, 40))
    mask = rs.mask_mod(lambda b, h, q, k: ids[b, q] == ids[b, k], 40, batch=2)
    rs.LocalWorld(2).attention(*small(), mask=mask)
    ids[0, 0] += 1
    with pytest.raises(rs.InputError, match=r"changed in place after the mask was made.*make the mask again"):
        rs.LocalWorld(2).attention(*small(), mask=mask)


def test_a_captured_tensor_changed_before_backward_raises() -> None:
    q, k, v = (x.requires_grad_() for x in small())
    slope = torch.ones(2, dtype=torch.float64)
    out = rs.LocalWorld(2).attention(q, k, v, mask=rs.causal(40), score_mod=lambda score, b, h, q, k: score * slope[h])
    slope.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(("what", "count"), [("batch", 3), ("heads", 5)])
def test_a_mask_for_other_sizes_is_refused(what: str, count: int) -> None:
    mask = rs.mask_mod(lambda b, h, q, k: (q + k + b + 2 * h) % 3 == 0, 40, **{"batch": 2, "heads": 2, what: count})
    with pytest.raises(rs.InputError, match=f"is for {what}={count}, but q has 2: make it for these tensors"):
        rs.LocalWorld(2).attention(*small(), mask=mask)


def test_two_masks_at_once() -> None:
    with pytest.raises(rs.InputError, match="give one of the two"):
        rs.LocalWorld(2).flex_attention(*small(), block_mask=blocks(), mask=rs.causal(40))


def test_empty_blocks_of_rows_are_not_exchanged() -> None:
    """Four blocks on the diagonal, one for each rank: no rank needs rows of another."""
    world = rs.LocalWorld(4)
    made = create_block_mask(
        lambda b, h, q, k: (q // 16 == k // 16) & ((q + k) % 3 > 0), None, None, 64, 64, device="cpu", BLOCK_SIZE=16
    )
    world.flex_attention(*small(64), block_mask=made, strategy="exchange", layout="contiguous")
    assert [traffic.sent for traffic in world.traffic] == [0] * 4
