"""The speed of FlashAttention-4 in the rectangles and triangles that ranks compute, against the whole causal mask.

    python benchmarks/kernel_rates.py

32 query and 8 key heads of 128, bfloat16. The shapes are timed in turn, since a GPU lowers its clocks after some
seconds of work. *Both* is forward and backward. The least *rank cost* is the time of the whole mask at the speed of a
shape, over the time of the whole mask: no rank that computes this shape, for all heads, can cost less, even if nothing
else took time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch

import ringspan as rs
from ringspan.bench.timing import seconds_in_turn
from ringspan.kernels import Saved, fa4
from ringspan.masks import Band

HEADS, KV_HEADS, HEAD_DIM, WHOLE = 32, 8, 128, 65536
RECTANGLES = ((4096, 57344), (4080, 57344), (8192, 24576), (8192, 57344), (16384, 57344), (32768, 32768))
TRIANGLES = (8192, 16384, 32768, WHOLE)


def band(rows: int, keys: int) -> Band:
    """Return a rectangle, or a triangle if there are no keys."""
    return Band(0, rows, 0, rows, 1 - rows, 0) if not keys else Band(0, rows, 0, keys, 1 - rows, keys - 1)


def passes(shape: Band) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the forward and the backward pass of one band by the kernel alone."""
    made = {"device": "cuda", "dtype": torch.bfloat16}
    q, dout = (torch.randn(1, HEADS, shape.rows, HEAD_DIM, **made) for _ in range(2))  # type: ignore[call-overload]
    k, v = (torch.randn(1, KV_HEADS, shape.cols, HEAD_DIM, **made) for _ in range(2))  # type: ignore[call-overload]
    scale = HEAD_DIM**-0.5
    ((_, _, (out, lse)),) = fa4.attend(q, k, v, [shape], scale=scale)

    def forward() -> object:
        return list(fa4.attend(q, k, v, [shape], scale=scale))

    return forward, partial(_backward, Saved(q, dout, out, lse), k, v, shape, scale)


def _backward(saved: Saved, k: torch.Tensor, v: torch.Tensor, shape: Band, scale: float) -> object:
    return list(fa4.attend_backward(saved, k, v, [shape], scale=scale))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each row as well")
    args = parser.parse_args()
    shapes = [*(band(*x) for x in RECTANGLES), *(band(n, 0) for n in TRIANGLES)]
    seconds = seconds_in_turn([f for shape in shapes for f in passes(shape)], rounds=args.rounds, on_gpu=True)
    flops = [4 * shape.area * HEAD_DIM * HEADS for shape in shapes]  # of the forward pass; the backward pass has 2.5 times
    rates = [3.5 * n / (a + b) for n, a, b in zip(flops, seconds[::2], seconds[1::2], strict=True)]
    print(f"{'shape':22}  forward, TFLOP/s  backward, TFLOP/s  both, TFLOP/s  least rank cost")
    for shape, n, a, b, both in zip(shapes, flops, seconds[::2], seconds[1::2], rates, strict=True):
        name = f"{shape.rows} × {shape.cols}" if shape.is_full else f"causal {shape.rows}"
        row = {"bench": "kernel_rates", "shape": name, "forward": n / a / 1e12, "backward": 2.5 * n / b / 1e12}
        row |= {"both": both / 1e12, "least_rank_cost": rates[-1] / both, "ringspan": rs.__version__}
        figures = f"{row['forward']:16.1f}  {row['backward']:17.1f}  {row['both']:13.1f}  {row['least_rank_cost']:15.3f}"
        print(f"{name:22}  {figures}", flush=True)
        if args.json:
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
