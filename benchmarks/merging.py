"""FlashAttention-4's own sinks and merging against ringspan's, on one GPU.

    python benchmarks/merging.py
    python benchmarks/merging.py --only merge --json

**sinks**: causal attention of one part with a learned sink for each head, forward, and forward and backward::

    no sink          for comparison: the cost of a sink is the difference
    with_sinks       FA4, then rs.with_sinks on its out and lse, as ringspan does after the last merge
    compiled         the same, with with_sinks compiled by torch.compile: what a fused kernel would take
    learnable_sink   FA4's argument: only a pass of a single part could use it

**merge**: partial results of all rows, as FA4 returns them, in bfloat16, merged by::

    accumulator   OutputAccumulator: one launch for each part after the first, as the parts are computed
    combine       flash_attn_combine: one launch for all parts, which are all kept in memory until then. It takes
                  float32 (parts of less precision are an illegal memory access, flash-attn-4 4.0.0b36); the conversion
                  is not timed

*error* is the largest difference from a merge in float64; rounding to bfloat16 is part of it. Times are medians. Those
of merging are times of CUDA graphs, so the host does not count. 32 query and 8 key heads of 128.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from ringspan.bench.graphs import captured
from ringspan.bench.timing import step_seconds
from ringspan.kernels import OutputAccumulator, fa4

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROWS = (8192, 65536)
PARTS = (2, 3, 4, 8)
ROUNDS = 5
CHECKED_ROWS = 1024  # the error is that of these rows


def milliseconds(step: Callable[[], object]) -> float:
    return round(step_seconds(step, rounds=ROUNDS, on_gpu=True) * 1e3, 3)


def attend(qkv: Sequence[Tensor], sink_H: Tensor, *, add: Callable[..., Any] | None = None, own: bool = False) -> Tensor:
    """Return the out of one causal FA4 call, with a sink that is added to its result, with FA4's own, or without
    one."""
    options = {"learnable_sink": sink_H} if own else {}
    out_BSHE, lse_BHS = fa4.load().flash_attn_func(*qkv, causal=True, return_lse=True, **options)
    if add is None:
        return out_BSHE
    return add(out_BSHE.transpose(1, 2), lse_BHS, sink_H)[0].transpose(1, 2)


def sink_cases(rows: int) -> Iterator[dict[str, Any]]:
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    qkv = [torch.randn(1, rows, h, HEAD_DIM, **made) for h in (HEADS, KV_HEADS, KV_HEADS)]
    sink_H = torch.zeros(HEADS, device="cuda", requires_grad=True)
    dout = torch.randn(qkv[0].shape, device="cuda", dtype=torch.bfloat16)
    ways: dict[str, dict[str, Any]] = {
        "no sink": {},
        "with_sinks": {"add": rs.with_sinks},
        "compiled": {"add": torch.compile(rs.with_sinks)},
        "learnable_sink": {"own": True},
    }
    expected = attend(qkv, sink_H, add=rs.with_sinks).detach()
    for name, options in ways.items():
        forward = partial(attend, qkv, sink_H, **options)
        inputs = [*qkv, sink_H] if options else qkv

        def both(forward: Callable[[], Tensor] = forward, inputs: Sequence[Tensor] = inputs) -> object:
            return torch.autograd.grad(forward(), inputs, dout)

        row = {"case": "sinks", "rows": rows, "way": name}
        try:
            if options:
                row["difference"] = (forward() - expected).abs().max().item()
            with torch.no_grad():
                row["forward_ms"] = milliseconds(forward)
            row["both_ms"] = milliseconds(both)
        except Exception as error:  # the other ways are still to be measured
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        yield row


def accumulate(out_PBSHE: Tensor, lse_PBHS: Tensor) -> Tensor:
    """Merge the parts as the engine does. The first part is overwritten."""
    _, batch, rows, heads, dim = out_PBSHE.shape
    merged = OutputAccumulator((rows, batch, heads, dim), like=lse_PBHS.new_empty(0), reuse_kernel_output=True)
    for out_BSHE, lse_BHS in zip(out_PBSHE, lse_PBHS, strict=True):
        merged.add(0, rows, out_BSHE.transpose(0, 1), lse_BHS.movedim(2, 0))
    return merged.finish()[0].transpose(0, 1).to(out_PBSHE.dtype)


def combine(out_PBSHE: Tensor, lse_PBHS: Tensor) -> Tensor:
    parts = out_PBSHE, lse_PBHS.transpose(-1, -2)
    out_BSHE: Tensor = fa4.load().flash_attn_combine(*parts, out_dtype=torch.bfloat16)[0]
    return out_BSHE


def merge_in_float64(out_PBSHE: Tensor, lse_PBHS: Tensor) -> Tensor:
    weight_PBSH = lse_PBHS.double().softmax(0).transpose(-1, -2)
    return (out_PBSHE.double() * weight_PBSH.unsqueeze(-1)).sum(0)


def merge_cases(rows: int) -> Iterator[dict[str, Any]]:
    for parts in PARTS:
        out_PBSHE = torch.randn(parts, 1, rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        lse_PBHS = torch.randn(parts, 1, HEADS, rows, device="cuda")
        few = out_PBSHE[:, :, :CHECKED_ROWS].clone(), lse_PBHS[..., :CHECKED_ROWS].clone()
        for name, merge in (("accumulator", accumulate), ("combine", combine)):
            if merge is combine:
                out_PBSHE, few = out_PBSHE.float(), (few[0].float(), few[1])
            row = {"case": "merge", "rows": rows, "parts": parts, "way": name}
            try:
                row["error"] = (merge(*(x.clone() for x in few)).double() - merge_in_float64(*few)).abs().max().item()
                replay = captured(partial(merge, out_PBSHE, lse_PBHS))
                assert replay is not None
                row["ms"] = milliseconds(replay)
            except Exception as error:  # as above
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("sinks", "merge"), help="one half only")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="rows of a rank")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each row as well")
    args = parser.parse_args()
    halves = {"sinks": sink_cases, "merge": merge_cases}
    for name in [args.only] if args.only else halves:
        for rows in args.rows:
            for row in halves[name](rows):
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                if args.json:
                    print(json.dumps({"bench": "merging", "device": torch.cuda.get_device_name(), **row}), flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
