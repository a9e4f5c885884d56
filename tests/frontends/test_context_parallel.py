"""ContextParallel over real processes: tokens to ranks and back, losses, gradients."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ringspan as rs
from ringspan.kernels.reference import dense_attention
from tests.conftest import Pools

LENGTHS = [5, 9, 1, 16]
N = sum(LENGTHS)


def made(**options: Any) -> rs.ContextParallel:
    return rs.ContextParallel(None, rs.documents(LENGTHS), **options)


# Each job runs on every rank and returns a list of (what, is it so).
Claims = list[tuple[str, bool]]


def shard_and_back(rank: int, layout: str) -> Claims:
    cp = made(layout=layout)
    x = torch.arange(2 * N * 3.0).reshape(2, N, 3)
    before = x.clone()
    mine = cp.positions()
    tree = {"a": x, "b": [x[0, :, 0], None], "c": 7}
    first = cp.shard({"a": x}, dim=1)
    pair = cp.shard(x, x + 1, dim=-2)
    flat = cp.shard(tree["b"], dim=0)
    return [
        ("positions", mine.tolist() == cp.plan.q_layout.positions(rank).tolist()),
        ("dict", torch.equal(first["a"], x[:, mine])),
        ("several", torch.equal(pair[1], x[:, mine] + 1)),
        ("list with None", torch.equal(flat[0], x[0, mine, 0]) and flat[1] is None),
        ("out of place", torch.equal(x, before)),
        ("back on dim 1", torch.equal(cp.unshard(first["a"], dim=1), x)),
        ("back on dim -2", torch.equal(cp.unshard(first["a"], dim=-2), x)),
        ("back on dim 0", torch.equal(cp.unshard(flat[0], dim=0), x[0, :, 0])),
        ("integers", torch.equal(cp.unshard(cp.shard(torch.arange(N), dim=0), dim=0), torch.arange(N))),
    ]


def rotary_tables(rank: int, layout: str) -> Claims:
    """Positions that start again with each document, and tables of rotary embeddings that are sharded like the
    tokens."""
    cp = made(layout=layout)
    within = torch.tensor([i for length in LENGTHS for i in range(length)])
    angles = torch.outer(torch.arange(N), torch.tensor([1.0, 0.1]))
    cos, sin = cp.shard(angles.cos(), angles.sin(), dim=0)
    return [
        ("by document", torch.equal(cp.positions(documents=LENGTHS), within[cp.positions()])),
        ("cos", torch.equal(cos, angles.cos()[cp.positions()])),
        ("sin", torch.equal(sin, angles.sin()[cp.positions()])),
    ]


def copies(rank: int, layout: str) -> Claims:
    """A model that holds its block can be copied; the block itself is of this process."""
    cp = made(layout=layout)
    model = torch.nn.Linear(2, 2)
    model.block = cp  # type: ignore[assignment]
    copy = deepcopy(model)
    try:
        pickle.dumps(cp)
    except TypeError as error:
        said = str(error)
    return [("copied", copy.block is cp and copy.weight is not model.weight), ("not sent", "cannot be pickled" in said)]


def evaluation(rank: int, layout: str) -> Claims:
    """Under no_grad and inference_mode, with the same numbers and nothing kept."""
    cp = made(layout=layout)
    torch.manual_seed(0)
    q, k, v = cp.shard(torch.randn(3, 2, 2, N, 4, dtype=torch.float64, requires_grad=True), dim=3)
    claims = []
    for without in (torch.no_grad, torch.inference_mode):
        with cp:
            want = F.scaled_dot_product_attention(q, k, v)
            with without():
                got = F.scaled_dot_product_attention(q, k, v)
                loss = cp.mean(got)
        claims += [(f"{without.__name__}: value", torch.equal(got, want)), ("no graph", not loss.requires_grad)]
    return claims


def unshard_has_gradients(rank: int, layout: str) -> Claims:
    cp = made(layout=layout)
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(-1, 1, N)
    mine = cp.positions()
    same = cp.shard(x, dim=0).requires_grad_()
    (cp.unshard(same, dim=0) * weight).sum().backward()
    own = cp.shard(x, dim=0).requires_grad_()
    (cp.unshard(own, dim=0, grad="partial") * weight * (rank + 1)).sum().backward()
    total = sum(range(1, cp.world + 1))
    assert same.grad is not None
    assert own.grad is not None
    return [
        ("replicate", torch.equal(same.grad, weight[mine])),
        ("partial", torch.allclose(own.grad, weight[mine] * total)),
    ]


def mean_is_global(rank: int, layout: str) -> Claims:
    cp = made(layout=layout)
    torch.manual_seed(0)
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, N, dtype=torch.float64)
    weights = (torch.rand(N) < 0.6).double()
    want = ((x * scale).square() * weights).sum() / (2 * weights.sum())
    (want_grad,) = torch.autograd.grad(want, scale)
    mine, w = cp.shard(x, dim=1), cp.shard(weights, dim=0)
    got = cp.mean((mine * scale).square(), w)
    got.backward()
    cp.sum_gradients([scale])
    assert scale.grad is not None
    return [
        ("value", abs(got.item() - want.item()) < 1e-14),
        ("gradient", abs(scale.grad.item() - want_grad.item()) < 1e-14),
        ("unweighted", abs(cp.mean(mine).item() - x.mean().item()) < 1e-14),
        ("half precision", cp.mean(torch.ones(len(w), 9000, dtype=torch.float16)).item() == 1.0),
        ("whole numbers", abs(cp.mean(torch.ones(len(w), dtype=torch.int64), w * 0.5).item() - 1.0) < 1e-6),
        ("weights are not differentiated", not cp.mean(mine, w.clone().requires_grad_()).requires_grad),
    ]


def gradients_are_summed(rank: int, layout: str) -> Claims:
    cp = made(layout=layout)
    everywhere, here, nowhere = (torch.zeros(3, requires_grad=True) for _ in range(3))
    everywhere.grad = torch.full((3,), rank + 1.0)
    kept = everywhere.grad
    here.grad = torch.ones(3) if rank == cp.world - 1 else None
    cp.sum_gradients([everywhere, here, nowhere])
    assert here.grad is not None
    return [
        ("everywhere", everywhere.grad.tolist() == [sum(range(1, cp.world + 1))] * 3),
        ("in place", everywhere.grad is kept),
        ("on one rank", here.grad.tolist() == [1.0] * 3),
        ("on none", nowhere.grad is None),
    ]


def two_masks_on_one_layout(rank: int, layout: str) -> Claims:
    """A layer with the whole document and a layer with a window, as in models that mix them; weights and all."""
    cp = made(layout=layout)
    near = cp.with_mask(cp.mask & rs.window(left=2))
    torch.manual_seed(0)
    x = torch.randn(1, N, 8, dtype=torch.float64)
    w = (torch.randn(8, 8, dtype=torch.float64) / 4).requires_grad_()

    def layer(x: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        h = (x @ w).unflatten(-1, (2, 4)).transpose(1, 2)
        return x + attend(h, h, h).transpose(1, 2).flatten(2)

    def dense(mask: rs.Mask) -> Callable[..., torch.Tensor]:
        return lambda q, k, v: dense_attention(q, k, v, torch.from_numpy(mask.dense())).out

    want = layer(layer(x, dense(cp.mask)), dense(near.mask)).square().mean()
    (want_grad,) = torch.autograd.grad(want, w)
    with cp:
        h = layer(cp.shard(x, dim=1), F.scaled_dot_product_attention)
        with near:
            h = layer(h, F.scaled_dot_product_attention)
    got = cp.mean(h.square())
    got.backward()
    cp.sum_gradients([w])
    assert w.grad is not None
    return [
        ("same layout", near.plan.q_layout == cp.plan.q_layout),
        ("value", abs(got.item() - want.item()) < 1e-12),
        ("gradient", (w.grad - want_grad).abs().max().item() < 1e-12),
    ]


def cross_attention(rank: int, layout: str) -> Claims:
    """Queries and keys of other lengths, each with a layout of its own."""
    mask = rs.documents([3, 8], kv_lengths=[10, 4], causal=False)
    cp = rs.ContextParallel(None, mask, layout="striped", kv_layout="contiguous", strategy="exchange")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, d, dtype=torch.float64, requires_grad=True) for n, d in ((11, 4), (14, 4), (14, 6)))
    want = dense_attention(q, k, v, torch.from_numpy(mask.dense())).out
    want_grads = torch.autograd.grad(want.square().sum(), (q, k, v))
    mine = [x.detach().requires_grad_() for x in (cp.shard(q, dim=2), *cp.shard(k, v, dim=2, of="kv"))]
    with cp:
        out = F.scaled_dot_product_attention(*mine)
    out.square().sum().backward()
    back = [cp.unshard(x.grad, dim=2, of=of) for x, of in zip(mine, ("q", "kv", "kv"), strict=True)]  # type: ignore[arg-type]
    return [
        ("out", torch.allclose(cp.unshard(out, dim=2), want, atol=1e-13)),
        *(("gradient", torch.allclose(a, b, atol=1e-13)) for a, b in zip(back, want_grads, strict=True)),
    ]


def layers_of_other_heads(rank: int, layout: str) -> Claims:
    """A strategy that splits heads is told nothing of them: each call says how many it has."""
    cp = made(layout=layout, strategy="ulysses")
    torch.manual_seed(0)
    claims = []
    for heads, kv_heads in ((4, 2), (3, 1), (5, 5)):
        q, k, v = (torch.randn(1, h, N, 4, dtype=torch.float64, requires_grad=True) for h in (heads, kv_heads, kv_heads))
        want = dense_attention(q, k, v, torch.from_numpy(cp.mask.dense())).out
        want_grads = torch.autograd.grad(want.square().sum(), (q, k, v))
        mine = [x.detach().requires_grad_() for x in cp.shard(q, k, v, dim=2)]
        with cp:
            out = F.scaled_dot_product_attention(*mine, enable_gqa=True)
        out.square().sum().backward()
        grads = zip((cp.unshard(x.grad, dim=2) for x in mine), want_grads, strict=True)  # type: ignore[arg-type]
        claims += [(f"out of {heads}", torch.allclose(cp.unshard(out, dim=2), want, atol=1e-13))]
        claims += [(f"gradient of {heads}", torch.allclose(a, b, atol=1e-13)) for a, b in grads]
    return claims


JOBS = [
    shard_and_back,
    rotary_tables,
    copies,
    evaluation,
    unshard_has_gradients,
    mean_is_global,
    gradients_are_summed,
    two_masks_on_one_layout,
    cross_attention,
    layers_of_other_heads,
]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("layout", ["auto", "striped", "per_document"])
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_over_processes(pools: Pools, job: Callable[..., Claims], layout: str, world: int) -> None:
    for rank, claims in enumerate(pools(world).run(job, layout)):
        assert [what for what, so in claims if not so] == [], f"rank {rank}"


def what_is_refused(rank: int) -> list[str]:
    cp, cross = made(), rs.ContextParallel(None, rs.full(N, N + 2))
    mine = cp.shard(torch.zeros(N), dim=0)
    attempts: list[Callable[[], Any]] = [
        lambda: cp.shard(torch.zeros(N + 1), dim=0),
        lambda: cp.shard(torch.zeros(N), dim=1),
        lambda: cp.unshard(torch.zeros(N), dim=0),
        lambda: cp.unshard([mine], dim=0),  # type: ignore[arg-type]
        lambda: cp.unshard(mine, dim=0, grad="average"),  # type: ignore[arg-type]
        lambda: cp.positions("keys"),  # type: ignore[arg-type]
        lambda: rs.attention(mine, mine, mine, plan=rs.plan(rs.full(N), world=7)),
        lambda: rs.ContextParallel(None, rs.window(left=2)),
        lambda: rs.ContextParallel(None, None),  # type: ignore[arg-type]
        lambda: cp.with_mask(torch.ones(N, N)),  # type: ignore[arg-type]
        lambda: cp.with_mask(rs.causal(N), layout=rs.Layout([[(0, N + 1)], *[[]] * (cp.world - 1)])),
        lambda: cp.with_mask(rs.causal(N), kv_layout=rs.Layout([[(0, N)], *[[]] * (cp.world - 1)])),
        lambda: rs.ContextParallel(None, rs.causal(N), backend="flsh"),
        lambda: cp.attention(mine, mine, mine, scale="x"),  # type: ignore[arg-type]
        lambda: cp.attention(*[torch.zeros(1, 1, len(mine), 0)] * 3),
        lambda: cross.shard(torch.zeros(N + 2), dim=0),
        lambda: cross.shard(torch.zeros(N), dim=0, of="kv"),
        lambda: cp.mean([1.0]),  # type: ignore[arg-type]
        lambda: cp.mean(torch.ones(3, requires_grad=True).mean()),  # the mean of this rank's tokens
        lambda: cp.mean(torch.ones(2, 3), torch.ones(2, 4)),
        lambda: cp.mean(torch.ones(3), [1.0] * 3),  # type: ignore[arg-type]
        lambda: cp.sum_gradients(torch.nn.Linear(2, 2)),  # type: ignore[arg-type]
        lambda: cp.sum_gradients(torch.zeros(2, requires_grad=True)),
        lambda: cp.sum_gradients(torch.nn.Linear(2, 2).named_parameters()),  # type: ignore[arg-type]
        lambda: cp.sum_gradients(3),  # type: ignore[arg-type]
    ]
    said = []
    for attempt in attempts:
        try:
            attempt()
            said.append("nothing")
        except rs.RingspanError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_bad_input_is_named(pools: Pools) -> None:
    expected = [
        f"InputError: dim 0 of a tensor of shape ({N + 1},) has {N + 1} tokens, but the plan's sequence has {N}",
        "InputError: dim=1 is not a dim",
        "InputError: a tensor of shape",
        "InputError: unshard takes one tensor, of this rank's tokens; got list. Call it for each tensor",
        'InputError: grad must be "replicate" or "partial"',
        'InputError: of must be "q" or "kv"',
        "InputError: this is the plan of rank 0 of 7",
        "MaskError: window(left=2) holds at any length",
        "MaskError: the mask must be a Mask: rs.causal(n), or rs.full(n) if every query sees every key; got None",
        "MaskError: the mask must be a Mask: rs.causal(n), or rs.full(n) if every query sees every key; got Tensor",
        f"InputError: the mask of with_mask must have the lengths of the layout: causal({N}) has {N} queries × {N} keys, the "
        f"layout {N + 1} × {N + 1}",
        "InputError: with_mask takes kv_layout= only together with layout=: pass layout=cp.plan.q_layout for its own",
        "UnknownKernel: no kernel is called 'flsh' (did you mean flash?); there are fa4,",
        "InputError: scale must be a number, or None for 1 / √(head dim); got 'x'",
        "InputError: heads must be at least 1 wide: q (1, 1,",
        f"InputError: dim 0 of a tensor of shape ({N + 2},) has {N + 2} tokens, but the plan's sequence has {N} "
        f"({N + 2} is the number of its keys: pass of='kv'): shard whole sequences",
        f"InputError: dim 0 of a tensor of shape ({N},) has {N} tokens, but the plan's sequence has {N + 2} "
        f"({N} is the number of its queries: pass of='q'): shard whole sequences",
        "InputError: the values must be a tensor, of this rank's tokens; got list",
        "InputError: the loss is one number, and the mean of the ranks' numbers is not the mean over all tokens",
        "InputError: weights of shape (2, 4) do not fit values of shape (2, 3): give one for each value",
        "InputError: weights must be a tensor of the shape of the values, (3,); got list",
        "InputError: sum_gradients takes parameters, not a module: pass module.parameters()",
        "InputError: sum_gradients takes a list of parameters, as module.parameters(); got Tensor",
        "InputError: sum_gradients takes parameters, as module.parameters() gives them; among these is tuple",
        "InputError: sum_gradients takes a list of parameters, as module.parameters(); got int",
    ]
    for said in pools(2).run(what_is_refused):
        for came, start in zip(said, expected, strict=True):
            assert came.startswith(start), came


def test_the_error_without_a_process_group_names_the_remedy() -> None:
    with pytest.raises(rs.InputError, match="LocalWorld"):
        rs.ContextParallel(None, rs.causal(4))
