"""The error of context-parallel attention: by dtype, strategy, number of ranks and dkv_dtype, and for huge scores.

    python -m benchmarks.reliability.numerics [--worlds N ...] [--strategies NAME ...] [--dtypes NAME ...] [--jobs N]

All ranks run in one process (``LocalWorld``). An error is the root mean square of the difference from dense attention
in float64 of the same inputs, divided by the root mean square of the expected values. Out and the gradients of q, k and
v are measured on their own. ``growth`` is the largest quotient of an error and that of one rank. The last table has
queries times 30, in float32, and the errors as multiples of those of ``F.scaled_dot_product_attention`` in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from benchmarks.reliability.experiments import Experiment, Rows, in_process, main_of, parser_of
from ringspan.kernels.reference import dense_attention

NAMES = ("out", "dq", "dk", "dv")
HEADS, TOKENS, HEAD_DIM = 2, 512, 64
WORLDS, DTYPES = (1, 4, 16, 64), ("bfloat16", "float16", "float32")
STRATEGIES = ("ring", "gather", "pass_q", "ulysses", "hybrid(per_node=8)")
HUGE = 30.0
SDPA = "SDPA"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """One line of a table."""

    dtype: str
    strategy: str
    world: int
    dkv_dtype: str = "float32"
    q_scale: float = 1.0


def results(attention: Attention, given: Sequence[Tensor]) -> list[Tensor]:
    """Return out and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def errors(case: Case, deadline: float = 0.0) -> list[tuple[Case, list[float]]]:
    """Return the error of out, dq, dk and dv."""
    source = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, HEADS, TOKENS, HEAD_DIM, generator=source).unbind()
    given = [x.to(getattr(torch, case.dtype)) for x in (q * case.q_scale, k, v, dout)]
    mask = rs.causal(TOKENS)
    attention: Attention = partial(F.scaled_dot_product_attention, is_causal=True)
    if case.strategy != SDPA:
        attention = partial(
            rs.LocalWorld(case.world).attention,
            mask=mask,
            strategy=case.strategy,
            layout="zigzag",
            backend="cpu",
            dkv_dtype=case.dkv_dtype,  # type: ignore[arg-type]
        )
    seen = torch.from_numpy(mask.dense())
    exact = results(lambda q, k, v: dense_attention(q, k, v, seen).out, [x.double() for x in given])
    pairs = zip(results(attention, given), exact, strict=True)
    found = [((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()).item() for a, b in pairs]
    if not all(0 <= x < 1 for x in found):
        raise AssertionError(f"{case}: the errors are {found}")
    return [(case, found)]


def rows_of(found: list[tuple[Case, list[float]]]) -> Rows:
    """Return the errors, with their growth relative to one rank."""
    by_case = dict(found)
    rows: Rows = []
    for case in sorted(by_case, key=lambda x: (x.dkv_dtype != "float32", x.dtype, x.strategy, x.world)):
        one = by_case.get(case._replace(world=1, dkv_dtype="float32"), by_case[case])
        growth = max(a / b for a, b in zip(by_case[case], one, strict=True))
        name = f"{case.dtype} {case.strategy}" + (f", dkv in {case.dkv_dtype}" if case.dkv_dtype != "float32" else "")
        figures = {x: f"{y:.1e}" for x, y in zip(NAMES, by_case[case], strict=True)}
        rows.append({"case": name, "ranks": case.world, **figures, "growth": f"{growth:.2f}"})
    return rows


def rows_of_huge(found: list[tuple[Case, list[float]]]) -> Rows:
    """Return the errors as multiples of those of SDPA."""
    sdpa = next((values for case, values in found if case.strategy == SDPA), [float("nan")] * 4)
    rows: Rows = []
    for case, values in sorted(found):
        figures = {x: f"{a / b:.2f}" for x, a, b in zip(NAMES, values, sdpa, strict=True)}
        rows.append({"case": f"{case.dtype} {case.strategy}", "ranks": case.world, **figures})
    return rows


def experiments(
    worlds: Sequence[int] = WORLDS, strategies: Sequence[str] = STRATEGIES, dtypes: Sequence[str] = DTYPES
) -> list[Experiment]:
    cases = [Case(dtype, strategy, world) for dtype, strategy, world in product(dtypes, strategies, worlds)]
    moving = [x for x in strategies if x != "pass_q"]  # it sends queries, and no gradients of keys
    cases += [Case(dtype, x, world, "bfloat16") for dtype, x, world in product(dtypes, moving, worlds) if dtype != "float16"]
    huge = [Case("float32", strategy, world, q_scale=HUGE) for strategy, world in product(strategies, worlds)]
    huge.append(Case("float32", SDPA, 1, q_scale=HUGE))
    tasks, tasks_of_huge = ([partial(in_process, errors, case) for case in some[::-1]] for some in (cases, huge))
    return [
        Experiment(name="numerics", tasks=tasks, rows=rows_of, goal=len(cases)),
        Experiment(name="numerics of huge scores", tasks=tasks_of_huge, rows=rows_of_huge, goal=len(huge)),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, metavar="N", help="numbers of ranks")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, metavar="NAME", help="of the inputs")
    args = parser.parse_args()
    main_of(experiments(args.worlds, args.strategies, args.dtypes), args)


if __name__ == "__main__":
    main()
