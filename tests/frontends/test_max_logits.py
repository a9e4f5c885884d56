"""``return_max_logits``: the largest logit of each head over all ranks, against dense scores in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import ringspan as rs
from ringspan.errors import InputError, PeerMismatch
from ringspan.kernels.mods import ScoreMod, for_all_pairs
from ringspan.masks import BatchMask
from ringspan.testing.assertions import assert_close
from tests.conftest import Pools

N, B, H, G, D, E = 48, 2, 4, 2, 8, 6
MASKS = {
    "causal": rs.causal(N),
    "documents and window": rs.documents([11, 1, 20, 16]) & rs.window(left=6),
    "prefix": rs.prefix(N, 13),
    "rows without keys": rs.causal(N) - rs.Mask.from_bands([(5, 30, 0, N, -N, N)], N),
    "function": rs.mask_mod(lambda b, h, q, k: ((q * 7 + k * 3 + h) % 5 > 0) & (k <= q), N, heads=H),
}
STRATEGIES = ["ring", "gather", "exchange(stages=2)", "pass_q", "ulysses", "hybrid(per_node=2)", "hierarchical(per_node=2)"]
LAYOUTS = ["contiguous", "zigzag", "striped", "balanced"]


def tensors(seed: int = 0, n: int = N) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    sizes = ((H, D), (G, D), (G, E))
    return [torch.randn(B, h, n, d, generator=source, dtype=torch.float64, requires_grad=True) for h, d in sizes]


def expected(q: Tensor, k: Tensor, mask: rs.Mask, scale: float | None = None, score_mod: ScoreMod | None = None) -> Tensor:
    score = q.double() @ k.double().repeat_interleave(H // G, 1).mT * (D**-0.5 if scale is None else scale)
    if score_mod is not None:
        score = for_all_pairs(score_mod, given=1)(score, *(torch.arange(n) for n in score.shape))
    seen_HST = torch.stack([torch.from_numpy(mask.dense(h=h)) for h in range(H)])
    return score.masked_fill(~seen_HST, -torch.inf).amax((0, 2, 3)).detach()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MASKS)
def test_it_equals_dense_scores_over_strategies_and_layouts(name: str, strategy: str) -> None:
    q, k, v = tensors()
    for layout in LAYOUTS:
        got = rs.LocalWorld(4).attention(q, k, v, mask=MASKS[name], strategy=strategy, layout=layout, return_max_logits=True)
        assert len(got) == 2
        assert not got[1].requires_grad
        assert_close(got[1], expected(q, k, MASKS[name]), rtol=1e-13)


@pytest.mark.parametrize("scale", [0.7, -0.7, 0.0, 3])
def test_it_is_of_scaled_scores(scale: float) -> None:
    q, k, v = tensors()
    _, got = rs.LocalWorld(3).attention(q, k, v, mask=rs.causal(N), scale=scale, return_max_logits=True)
    assert_close(got, expected(q, k, rs.causal(N), scale), rtol=1e-13)


@pytest.mark.parametrize("strategy", ["exchange", "ulysses"])
@pytest.mark.parametrize("score_mod", [rs.softcap(0.5), rs.alibi(rs.alibi_slopes(H))], ids=["softcap", "alibi"])
def test_a_score_mod_comes_before_it(score_mod: ScoreMod, strategy: str) -> None:
    q, k, v = tensors()
    for mask in (rs.causal(N), MASKS["function"]):
        options: dict[str, Any] = {"mask": mask, "strategy": strategy, "score_mod": score_mod}
        _, got = rs.LocalWorld(2).attention(q, k, v, return_max_logits=True, **options)
        assert_close(got, expected(q, k, mask, None, score_mod), rtol=1e-6)  # slopes are float32


@pytest.mark.parametrize("backend", ["cpu", "eager", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_results_and_gradients_do_not_change(backend: str, dtype: torch.dtype) -> None:
    mask, found = MASKS["documents and window"], []
    for options in ({}, {"return_max_logits": True}):
        qkv = [x.detach().to(dtype).requires_grad_() for x in tensors()]
        out, lse, *largest = rs.LocalWorld(3).attention(*qkv, mask=mask, backend=backend, return_lse=True, **options)
        found.append([out, lse, *torch.autograd.grad(out.sum() + lse.sum(), qkv)])
    assert all(map(torch.equal, *found))
    (largest_H,) = largest
    assert largest_H.dtype == lse.dtype
    assert_close(largest_H.double(), expected(qkv[0], qkv[1], mask), rtol=1e-13 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_autocast_does_not_round_it(backend: str) -> None:
    """Nor what the eager kernel computes: tensors are cast in front of the call, or not at all."""
    qkv = [x.detach().float() for x in tensors()]
    options: dict[str, Any] = {"mask": rs.causal(N), "backend": backend, "return_lse": True, "return_max_logits": True}
    want = rs.LocalWorld(2).attention(*qkv, **options)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, rs.LocalWorld(2).attention(*qkv, **options), want))
    assert_close(want[2].double(), expected(*qkv[:2], rs.causal(N)), rtol=1e-6)


def test_a_head_that_sees_nothing_has_minus_infinity() -> None:
    q, k, v = tensors()
    nothing = rs.Mask.from_bands([], N)
    _, got = rs.LocalWorld(2).attention(q, k, v, mask=nothing, layout="contiguous", return_max_logits=True)
    assert got.tolist() == [-torch.inf] * H
    one_head = rs.mask_mod(lambda b, h, q, k: (h == 1) & (k <= q), N, heads=H)
    _, got = rs.LocalWorld(2).attention(q, k, v, mask=one_head, return_max_logits=True)
    assert (got == -torch.inf).tolist() == [True, False, True, True]


def test_a_nan_makes_its_head_nan_on_all_ranks() -> None:
    q, k, v = tensors()
    with torch.no_grad():
        q[1, 2, 40, 0] = torch.nan
    _, got = rs.LocalWorld(4).attention(q, k, v, mask=rs.causal(N), strategy="ring", return_max_logits=True)
    assert got.isnan().tolist() == [False, False, True, False]


def test_masks_of_the_rows_of_a_batch() -> None:
    q, k, v = tensors()
    mask = rs.documents([[10, N - 10], [20, 7, N - 27]]) & rs.window(left=3)
    assert isinstance(mask, BatchMask)
    _, got = rs.LocalWorld(2).attention(q, k, v, mask=mask, return_max_logits=True)
    rows = [expected(q[b : b + 1], k[b : b + 1], row) for b, row in enumerate(mask.rows)]
    assert_close(got, torch.stack(rows).amax(0), rtol=1e-13)


def attend_on_rank(rank: int, strategy: str) -> tuple[list[Tensor], list[bool]]:
    mask = MASKS["documents and window"]
    cp = rs.ContextParallel(None, mask, strategy=strategy, layout="zigzag")
    found, same = [], []
    for seed in range(3):
        qkv = [x.detach().requires_grad_() for x in cp.shard(*tensors(seed), dim=2)]
        options: dict[str, Any] = {"plan": cp.plan, "group": cp.group}
        out, largest = rs.attention(*qkv, return_max_logits=True, **options)
        plain = rs.attention(*qkv, **options)
        found.append(largest)
        grads = [torch.autograd.grad(x.square().sum(), qkv) for x in (out, plain)]
        same += [torch.equal(out, plain), *map(torch.equal, *grads)]
    return found, same


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "pass_q"])
def test_processes_return_the_maximum_of_all_ranks(pools: Pools, strategy: str) -> None:
    for found, same in pools(2).run(attend_on_rank, strategy):
        assert all(same)
        for seed, got in enumerate(found):
            q, k, _ = tensors(seed)
            assert_close(got, expected(q, k, MASKS["documents and window"]), rtol=1e-13)


def ask_on_one_rank(rank: int) -> str:
    plan = rs.plan(rs.causal(N), world=2, rank=rank, layout="contiguous")
    group = torch.distributed.new_group()  # whose connections are closed when the ranks differ
    q, k, v = (x[:, :, : N // 2].detach() for x in tensors())
    rs.attention(q, k, v, plan=plan, group=group)
    try:
        rs.attention(q, k, v, plan=plan, group=group, return_max_logits=rank == 0)
    except PeerMismatch as error:
        return str(error)
    return ""


def test_ranks_that_do_not_all_ask_for_it_raise(pools: Pools) -> None:
    for message in pools(2).run(ask_on_one_rank):
        assert "forward with max logits of plan" in message


def test_compiled_calls_return_it(world_of_one: None) -> None:
    plan = rs.plan(rs.causal(N), world=1, rank=0)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
        return rs.attention(q, k, v, plan=plan, scale=scale, return_lse=True, return_max_logits=True)

    for scale in (0.3, -0.3):
        found = []
        for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            qkv = tensors()
            out, lse, largest = function(*qkv, scale)
            assert not largest.requires_grad
            found.append([out, lse, largest, *torch.autograd.grad(out.sum() + lse.square().sum(), qkv)])
        assert all(map(torch.equal, *found))
        assert_close(largest, expected(*qkv[:2], rs.causal(N), scale), rtol=1e-13)


def test_flex_attention_returns_it_last(world_of_one: None) -> None:
    q, k, v = tensors()
    options: dict[str, Any] = {"enable_gqa": True, "return_max_logits": True}
    want = expected(q, k, rs.causal(N), None, rs.softcap(0.5))
    for outputs in ({}, {"return_lse": True}, {"return_aux": AuxRequest(lse=True)}):
        local = rs.LocalWorld(2).flex_attention(q, k, v, rs.softcap(0.5), mask=rs.causal(N), **options, **outputs)
        plan = rs.plan(rs.causal(N), world=1, rank=0)
        alone = rs.flex_attention(q, k, v, rs.softcap(0.5), plan=plan, **options, **outputs)
        for found in (local, alone):
            assert len(found) == 2 + bool(outputs)
            assert_close(found[-1], want, rtol=1e-13)  # type: ignore[arg-type]


def test_flex_attention_has_no_largest_score_of_each_query() -> None:
    with pytest.raises(InputError, match=r"return_max_logits=True of rs\.flex_attention"):
        rs.LocalWorld(2).flex_attention(*tensors(), enable_gqa=True, return_aux=AuxRequest(max_scores=True))
