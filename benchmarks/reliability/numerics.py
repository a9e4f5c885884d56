"""Measure the error of context-parallel attention: by dtype, strategy and number of ranks, and for huge logits.

    python benchmarks/reliability/numerics.py
    python benchmarks/reliability/numerics.py --worlds 1 8 64 --strategies ring --dtypes bfloat16 --json

All ranks run in this process (``LocalWorld``). An error is the root mean square of the difference from dense attention
in float64 of the same inputs, divided by the root mean square of the expected values. Out and the gradients of q, k and
v are measured on their own. The last table has queries scaled by 30, in float32, and compares with the error of
``F.scaled_dot_product_attention`` in one process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.kernels.reference import dense_attention

NAMES = ("out", "dq", "dk", "dv")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(args: argparse.Namespace, dtype: torch.dtype, q_scale: float, seed: int) -> list[Tensor]:
    """Return q, k, v and the gradient of out."""
    source = torch.Generator().manual_seed(seed)
    q, k, v, dout = torch.randn(4, 1, args.heads, args.seq_len, args.head_dim, generator=source).unbind()
    return [x.to(dtype) for x in (q * q_scale, k, v, dout)]


def results(attention: Attention, given: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def errors(attention: Attention, args: argparse.Namespace, dtype: torch.dtype, q_scale: float = 1.0) -> list[float]:
    """Return the error of out, dq, dk and dv: the mean over the seeds."""
    seen = torch.from_numpy(rs.causal(args.seq_len).dense())
    found = torch.zeros(4, dtype=torch.float64)
    for seed in range(args.seeds):
        given = inputs(args, dtype, q_scale, seed)
        exact = results(lambda q, k, v: dense_attention(q, k, v, seen).out, [x.double() for x in given])
        for n, (a, b) in enumerate(zip(results(attention, given), exact, strict=True)):
            found[n] += (a.double() - b).square().mean().sqrt() / b.square().mean().sqrt() / args.seeds
    if not found.isfinite().all():
        raise AssertionError(f"an error is not finite: {found.tolist()}")
    return found.tolist()


def split(q: Tensor, k: Tensor, v: Tensor, *, world: int, strategy: str, backend: str) -> Tensor:
    mask = rs.causal(q.shape[2])
    return rs.LocalWorld(world).attention(q, k, v, mask=mask, strategy=strategy, layout="zigzag", backend=backend)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each dtype, strategy and number of ranks; then for huge logits, relative to SDPA."""
    for dtype in args.dtypes:
        for strategy in args.strategies:
            first: list[float] = []
            for world in args.worlds:
                attention = partial(split, world=world, strategy=strategy, backend=args.backend)
                found = errors(attention, args, getattr(torch, dtype))
                first = first or found
                growth = max(a / b for a, b in zip(found, first, strict=True))
                row = dict(zip(NAMES, found, strict=True))
                yield {"what": "error", "dtype": dtype, "strategy": strategy, "world": world, **row, "growth": growth}
    sdpa = errors(partial(F.scaled_dot_product_attention, is_causal=True), args, torch.float32, q_scale=30.0)
    for strategy in args.strategies:
        for world in args.worlds:
            attention = partial(split, world=world, strategy=strategy, backend=args.backend)
            found = errors(attention, args, torch.float32, q_scale=30.0)
            ratios = [a / b for a, b in zip(found, sdpa, strict=True)]
            row = dict(zip(NAMES, ratios, strict=True))
            what = "error, queries times 30, relative to SDPA"
            yield {"what": what, "dtype": "float32", "strategy": strategy, "world": world, **row, "growth": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--worlds", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N", help="numbers of ranks (default: 1 4 16 64)")
    add("--strategies", nargs="+", default=["ring", "gather", "pass_q"], help="default: ring gather pass_q")
    add("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"], help="default: bfloat16 float16 float32")
    add("--backend", default="cpu", help="the kernel (default: %(default)s)")
    add("--seq-len", type=int, default=512, metavar="N", help="tokens (default: %(default)s)")
    add("--heads", type=int, default=2, metavar="N", help="default: %(default)s")
    add("--head-dim", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--seeds", type=int, default=1, metavar="N", help="inputs to average over (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object for each row")
    args = parser.parse_args()
    before = None
    for row in rows(args):
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        what, dtype, strategy, world, *figures = row.values()
        if what != before:
            print(f"\n{what}\n{'dtype':9} {'strategy':9} {'ranks':>5} " + " ".join(f"{x:>8}" for x in (*NAMES, "growth")))
            before = what
        shown = [f"{x:8.1e}" if what == "error" else f"{x:8.2f}" for x in figures[:4]]
        print(f"{dtype:9} {strategy:9} {world:5} {' '.join(shown)} {figures[4]:8.2f}", flush=True)


if __name__ == "__main__":
    main()
