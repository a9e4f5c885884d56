"""DTensors over meshes of real processes: placements that are exact, and those that are not and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import flex_attention

import ringspan as rs
from ringspan.frontends.dtensor.offsets import ShardExtents, extents_of, shard_score_mod
from ringspan.kernels.reference import dense_attention
from tests.conftest import Pools
from tests.flex_reference import dense_flex
from tests.meshes import cpu_mesh

BATCH, HEADS, KV_HEADS, N, DIM, V_DIM = 2, 4, 2, 12, 8, 6
MASK = rs.documents([5, 7])


def data() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM))
    return [torch.randn(BATCH, heads, N, dim, dtype=torch.float64, requires_grad=True) for heads, dim in shapes]


def truth() -> list[Tensor]:
    q, k, v = data()
    out = dense_attention(q, k, v, torch.from_numpy(MASK.dense())).out
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


# What lies beside the axis of the sequence, whose tokens are always split.
BESIDE: dict[str, Placement] = {"batch": Shard(0), "heads": Shard(1), "nothing": Replicate()}


def attended(rank: int, beside: str, how: str, axes: tuple[str, str]) -> list[Tensor]:
    """out, dq, dk and dv as whole tensors, from DTensors on a 2 × 2 mesh."""
    mesh = cpu_mesh((2, 2), axes)
    cp = rs.ContextParallel(mesh["cp"], MASK, layout="contiguous")
    placements = [Shard(2) if axis == "cp" else BESIDE[beside] for axis in axes]
    q, k, v = (distribute_tensor(x.detach(), mesh, placements).requires_grad_() for x in data())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    if how == "rs.attention":
        out = rs.attention(q, k, v, plan=cp.plan, group=mesh["cp"])
    else:
        torch._dynamo.reset()
        with cp:
            out = (torch.compile(attend, backend="aot_eager", fullgraph=True) if how == "compiled" else attend)(q, k, v)
    assert isinstance(out, DTensor)
    assert list(out.placements) == placements
    out.square().sum().backward()
    return [x.full_tensor().detach() for x in (out, q.grad, k.grad, v.grad)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("beside", "how", "axes"),
    [
        *((beside, "block", ("dp", "cp")) for beside in BESIDE),
        ("heads", "block", ("cp", "tp")),
        ("heads", "rs.attention", ("cp", "tp")),
        ("heads", "compiled", ("cp", "tp")),
    ],
)
def test_dtensors_give_the_results_of_whole_tensors(pools: Pools, beside: str, how: str, axes: tuple[str, str]) -> None:
    want = truth()
    for found in pools(4).run(attended, beside, how, axes):
        for got, true in zip(found, want, strict=True):
            assert torch.allclose(got, true, atol=1e-12)


# -- functions ---------------------------------------------------------------------------------------------------------


def by_member(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Seen is something else in each member of the batch and each head, and no band."""
    return (q * 3 + k * k + b * 5 + h) % 7 < 4


def biased(bias_BH: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, k: score + bias_BH[b, h] * (q - k)


def bias() -> Tensor:
    return torch.arange(BATCH * HEADS, dtype=torch.float64).view(BATCH, HEADS).sin().requires_grad_()


def with_functions(rank: int, placements: list[Placement], how: str) -> list[Tensor]:
    """out, dq, dk, dv and the gradient of the bias, where there is one, of DTensors on a 2 × 2 mesh."""
    mesh = cpu_mesh((2, 2), ("dp", "cp"))
    cp = rs.ContextParallel(mesh["cp"], rs.mask_mod(by_member, N, batch=BATCH, heads=HEADS), layout="contiguous")
    q, k, v = (distribute_tensor(x.detach(), mesh, placements).requires_grad_() for x in data())
    learned, plain = bias(), partial(F.scaled_dot_product_attention, enable_gqa=True)
    torch._dynamo.reset()
    with cp:
        if how == "score_mod":
            out = flex_attention(q, k, v, biased(learned), enable_gqa=True)
        else:
            out = (torch.compile(plain, backend="aot_eager", fullgraph=True) if how == "compiled" else plain)(q, k, v)
    assert isinstance(out, DTensor)
    out.square().sum().backward()
    cp.sum_gradients([learned], over=None if Replicate() in placements else mesh)
    found = [x.full_tensor().detach() for x in (out, q.grad, k.grad, v.grad)]  # type: ignore[union-attr]
    return [*found, *([] if learned.grad is None else [learned.grad])]


@pytest.mark.parametrize("how", ["score_mod", "mask_mod", "compiled"])
@pytest.mark.parametrize("beside", BESIDE)
def test_functions_are_called_with_indices_of_the_whole_tensors(pools: Pools, beside: str, how: str) -> None:
    q, k, v = data()
    learned = bias()
    out = dense_flex(q, k, v, by_member, biased(learned) if how == "score_mod" else None).out
    inputs = (q, k, v, learned) if how == "score_mod" else (q, k, v)
    want = [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]
    for found in pools(4).run(with_functions, [BESIDE[beside], Shard(2)], how):
        for got, true in zip(found, want, strict=True):
            assert torch.allclose(got, true, atol=1e-12)


def uneven(rank: int) -> ShardExtents:
    """Three members of a batch over two ranks, five heads over two."""
    mesh = cpu_mesh((2, 2))
    shape, placements = torch.Size((3, 5, 1, 1)), [Shard(0), Shard(1)]
    q = DTensor.from_local(torch.zeros(0, 0, 1, 1), mesh, placements, run_check=False, shape=shape, stride=(5, 1, 1, 1))
    return extents_of(q)


def test_extents_of_uneven_dims(pools: Pools) -> None:
    batch, heads = [(0, 2, 3), (2, 1, 3)], [(0, 3, 5), (3, 2, 5)]
    assert pools(4).run(uneven) == [(batch[r // 2], heads[r % 2]) for r in range(4)]


def test_a_score_mod_is_checked_against_all_heads() -> None:
    extents = ((0, BATCH, BATCH), (2, 2, HEADS))
    shard_score_mod(extents, rs.alibi(torch.ones(HEADS)))
    with pytest.raises(rs.InputError, match="made for 2 heads, but q has 4"):
        shard_score_mod(extents, rs.alibi(torch.ones(2)))


def shards_of_a_layout(rank: int) -> list[tuple[str, bool]]:
    """Tokens as cp.shard gives them, in another order and not evenly, with lse."""
    mask = rs.documents([3, 8])
    mesh = cpu_mesh((2,), ("cp",))
    cp = rs.ContextParallel(mesh, mask, layout=[[(0, 2), (9, 11)], [(2, 9)]])
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 11, 4, dtype=torch.float64).unbind()
    mine = cp.shard(q, k, v, dim=2)
    shape, stride = torch.Size((1, 2, 11, 4)), (88, 44, 4, 1)
    placed = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride) for x in mine]
    result = rs.attention(*placed, plan=cp.plan, group=mesh, return_lse=True)
    want = dense_attention(q, k, v, torch.from_numpy(mask.dense()))
    return [
        ("shapes", (result.out.shape, result.lse.shape) == (shape, shape[:3])),
        ("out", torch.allclose(cp.unshard(result.out.to_local(), dim=2), want.out, atol=1e-12)),  # type: ignore[attr-defined]
        ("lse", torch.allclose(cp.unshard(result.lse.to_local(), dim=2), want.lse, atol=1e-12)),  # type: ignore[attr-defined]
    ]


def test_shards_of_any_layout(pools: Pools) -> None:
    for claims in pools(2).run(shards_of_a_layout):
        assert [what for what, so in claims if not so] == []


# -- what is refused ---------------------------------------------------------------------------------------------------


def placed_as(cp_axis: Placement, tp_axis: Placement, kv_heads: int = KV_HEADS) -> Callable[[Any], list[Tensor]]:
    def make(mesh: Any) -> list[Tensor]:
        return [
            DTensor.from_local(torch.zeros(1, heads, N, 4), mesh, [cp_axis, tp_axis], run_check=False)
            for heads in (6, kv_heads, kv_heads)
        ]

    return make


def mixed(mesh: Any) -> list[Tensor]:
    q, k, _ = placed_as(Shard(2), Replicate())(mesh)
    return [q, k, torch.zeros(1, KV_HEADS, N, 4)]


def apart(mesh: Any) -> list[Tensor]:
    q, *_ = placed_as(Shard(2), Shard(1))(mesh)
    return [q, *placed_as(Shard(2), Replicate())(mesh)[1:]]


def three_key_heads(mesh: Any) -> list[Tensor]:
    whole = placed_as(Shard(2), Replicate(), kv_heads=3)(mesh)
    return [x.redistribute(mesh, [Shard(2), Shard(1)]) for x in whole if isinstance(x, DTensor)]


REFUSED: dict[str, tuple[Callable[[Any], list[Tensor]], str]] = {
    "replicated sequence": (placed_as(Replicate(), Shard(1)), "on the axis 'cp' of their mesh, whose ranks split the sequence"),
    "partial": (placed_as(Shard(2), Partial()), "on the axis 'tp' of their mesh, whose ranks do not split this sequence"),
    "head dim": (placed_as(Shard(2), Shard(3)), "only Shard(0) (batch), Shard(1) (heads) and Replicate() are exact there"),
    "tokens over another axis": (placed_as(Shard(2), Shard(2)), "on the axis 'tp' of their mesh"),
    "mixed": (mixed, "v is a Tensor: give q, k and v all as DTensors"),
    "apart": (apart, "they must have the same mesh and placements"),
    "key heads": (three_key_heads, "3 key heads over the 2 ranks that split the heads"),
}


def refusals(rank: int) -> dict[str, str]:
    mesh = cpu_mesh((2, 2), ("cp", "tp"))
    cp = rs.ContextParallel(mesh["cp"], rs.causal(2 * N))
    said = dict.fromkeys(REFUSED, "nothing")
    for name, (make, _) in REFUSED.items():
        try:
            with cp:
                F.scaled_dot_product_attention(*make(mesh), enable_gqa=True)
        except rs.InputError as error:
            said[name] = str(error)
    try:
        cp.mean(placed_as(Shard(2), Replicate())(mesh)[0])
    except rs.InputError as error:
        said["mean"] = str(error)
    return said


def test_placements_that_are_not_exact_are_refused(pools: Pools) -> None:
    for said in pools(4).run(refusals):
        assert "x.to_local()" in said.pop("mean")
        for name, (_, message) in REFUSED.items():
            assert message in said[name], name
