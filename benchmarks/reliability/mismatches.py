"""One of four ranks makes another call than the others: 29 kinds × the first, a middle and the last rank × 7
strategies.

    python -m benchmarks.reliability.mismatches [--trials N] [--jobs N] [--kind TEXT]

Every kind is tried at the first use of a plan, and after the ranks have agreed on both calls. ``--trials`` takes an evenly
spread sample of all combinations. A trial uses a new process group of a pool of workers, and each job
has a pool. It ends with a collective, so
that a rank that needs nothing of the odd one learns of the error, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from benchmarks.reliability.experiments import Experiment, main_of, parser_of
from benchmarks.reliability.harness import Report, Trial, log_bad, report_of, summarize_by
from ringspan.testing.workers import Pool, WorkerFailed
from ringspan.transports import ProcessGroupTransport

WORLD, TOKENS, LIMIT = 4, 32, 15.0
HYBRID, HIERARCHICAL = "hybrid(per_node=2)", "hierarchical(per_node=2)"
STRATEGIES = ("ring", "gather", "exchange", "pass_q", "ulysses", HYBRID, HIERARCHICAL)
ODD_RANKS = (0, 1, WORLD - 1)


class Rank:
    """The arguments of one rank. ``odd`` says whether it differs."""

    def __init__(self, strategy: str, odd: bool) -> None:
        self.process_group, self.odd = dist.new_group(), odd
        self.group = ProcessGroupTransport(self.process_group, timeout=LIMIT)
        self.strategy, self.mask, self.layout = strategy, rs.causal(TOKENS), "zigzag"
        self.batch, self.heads, self.kv_heads, self.dim, self.v_dim, self.dtype = 1, 4, 4, 8, 8, torch.float32

    def cp(self, mask: rs.Mask | None = None) -> rs.ContextParallel:
        return rs.ContextParallel(self.group, self.mask if mask is None else mask, strategy=self.strategy, layout=self.layout)

    def qkv(self) -> list[Tensor]:
        rows = self.cp().plan.q_rows
        shapes = ((self.heads, self.dim), (self.kv_heads, self.dim), (self.kv_heads, self.v_dim))
        return [torch.randn(self.batch, h, rows, d, dtype=self.dtype, requires_grad=True) for h, d in shapes]

    def attend(self, **options: Any) -> Tensor:
        return rs.attention(*self.qkv(), plan=self.cp().plan, group=self.group, **options)

    def agree(self, kind: str) -> None:
        """Use two plans, forward and backward, and the collectives, and let all ranks make both calls of a kind, before
        the ranks differ."""
        self.attend().sum().backward()
        self.cp(rs.full(TOKENS)).attention(*self.qkv()).sum().backward()
        self.cp().mean(torch.ones(2))
        for odd in (True, False):
            same = copy(self)
            same.odd = odd
            with suppress(rs.InputError, rs.KernelError, rs.UnplannedAttention):  # a call that every rank refuses
                KINDS[kind](same)


def setting(name: str, value: Any) -> Callable[[Rank], None]:
    """Return a kind in which the odd rank has another value of this attribute."""

    def differ(rank: Rank) -> None:
        if rank.odd:
            setattr(rank, name, value)
        rank.attend().sum().backward()

    return differ


def option(name: str, odd: Any, others: Any) -> Callable[[Rank], None]:
    return lambda rank: rank.attend(**{name: odd if rank.odd else others}).sum().backward()


def in_block(name: str, value: Any) -> Callable[[Rank], None]:
    """Return a kind in which the odd rank passes an argument to SDPA that the block refuses."""

    def differ(rank: Rank) -> None:
        with rank.cp():
            F.scaled_dot_product_attention(*rank.qkv(), **({name: value} if rank.odd else {}))

    return differ


def fewer_rows(rank: Rank) -> None:
    q, k, v = rank.qkv()
    rs.attention(q[:, :, 1:] if rank.odd else q, k, v, plan=rank.cp().plan, group=rank.group)


def other_order(rank: Rank) -> None:
    masks = [rs.causal(TOKENS), rs.full(TOKENS)]
    for mask in masks[::-1] if rank.odd else masks:
        rank.cp(mask).attention(*rank.qkv())


def skipped_call(rank: Rank) -> None:
    if not rank.odd:
        rank.attend()
    rank.cp(rs.full(TOKENS)).attention(*rank.qkv())


def extra_call(rank: Rank) -> None:
    for _ in range(2 if rank.odd else 1):
        rank.attend()


def no_backward(rank: Rank) -> None:
    out = rank.attend()
    if not rank.odd:
        out.sum().backward()


def no_mean(rank: Rank) -> None:
    if not rank.odd:
        rank.cp().mean(torch.ones(3))
    rank.attend()


def other_dtype_of_mean(rank: Rank) -> None:
    rank.cp().mean(torch.ones(3, dtype=torch.float64 if rank.odd else torch.float32))


def unshard(rank: Rank) -> None:
    x = rank.qkv()[0].detach()
    rank.cp().unshard(x.double() if rank.odd else x, dim=2)


def unshard_width(rank: Rank) -> None:
    x = rank.qkv()[0].detach()
    rank.cp().unshard(x[..., :4] if rank.odd else x, dim=2)


def fewer_gradients(rank: Rank) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5, 7)]
    rank.cp().sum_gradients(parameters[:2] if rank.odd else parameters)


def gradients_in_another_order(rank: Rank) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    for p in parameters[::-1] if rank.odd else parameters:
        p.grad = torch.ones_like(p)
        rank.cp().sum_gradients([p])


def equal_layers(rank: Rank) -> None:
    first, second = rank.attend(), rank.attend()
    for out in (second, first) if rank.odd else (first, second):
        out.sum().backward()


def other_reduction(rank: Rank) -> None:
    (rank.cp().sum if rank.odd else rank.cp().mean)(torch.ones(2))


def parameters_in_another_order(rank: Rank) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    rank.cp().sum_gradients(parameters[::-1] if rank.odd else parameters)


def unshard_of_another_layout(rank: Rank) -> None:
    x = rank.qkv()[0].detach()
    rank.layout = "contiguous" if rank.odd else "zigzag"
    rank.cp().unshard(x, dim=2)


KINDS: dict[str, Callable[[Rank], None]] = {
    "mask": setting("mask", rs.causal(TOKENS) & rs.window(left=7)),
    "documents": setting("mask", rs.documents([12, TOKENS - 12])),
    "sequence length": setting("mask", rs.causal(2 * TOKENS)),
    "layout": setting("layout", "contiguous"),
    "strategy": lambda rank: setting("strategy", "gather" if rank.strategy == "ring" else "ring")(rank),
    "dtype": setting("dtype", torch.float64),
    "batch": setting("batch", 2),
    "heads": setting("heads", 8),
    "key heads": setting("kv_heads", 2),
    "head dim and value dim": setting("dim", 16),
    "value dim": setting("v_dim", 16),
    "rows": fewer_rows,
    "scale": option("scale", 0.25, 0.5),
    "score_mod": option("score_mod", rs.softcap(2.0), rs.softcap(3.0)),
    "score_mod on one rank": option("score_mod", rs.softcap(2.0), None),
    "kernel refuses": option("backend", "fa4", "auto"),
    "dropout refused": in_block("dropout_p", 0.5),
    "attn_mask refused": in_block("attn_mask", torch.ones(1)),
    "other order": other_order,
    "skipped call": skipped_call,
    "extra call": extra_call,
    "no backward pass": no_backward,
    "no mean, or of another dtype": lambda rank: (no_mean if rank.strategy < "h" else other_dtype_of_mean)(rank),
    "unshard of another dtype or width": lambda rank: (unshard if rank.strategy < "h" else unshard_width)(rank),
    "other gradients": lambda rank: (fewer_gradients if rank.strategy < "h" else gradients_in_another_order)(rank),
    "equal layers in another order": equal_layers,
    "sum instead of mean": other_reduction,
    "parameters in another order": parameters_in_another_order,
    "unshard of another layout": unshard_of_another_layout,
}

Case = tuple[str, int, str, bool]


def differ(rank: int, kind: str, odd: int, strategy: str, is_first: bool) -> tuple[float, Report]:
    """A job for all workers of a pool. Returns when the ranks began to differ, and how this one ended."""
    state = Rank(strategy, rank == odd)
    if not is_first:
        state.agree(kind)
    start = time.time()

    def run() -> None:
        KINDS[kind](state)
        state.odd = False
        Rank.cp(state, rs.causal(TOKENS)).mean(torch.ones(2))

    report = report_of(run)
    dist.destroy_process_group(state.process_group)
    return start, report


def open_block(rank: int) -> None:
    """Open a block. The first one of a process imports PyTorch's compiler, which takes seconds."""
    with rs.ContextParallel(None, rs.causal(TOKENS), expect_attention=False):
        pass


def new_pool() -> Pool:
    pool = Pool(WORLD, timeout=10 * LIMIT)
    pool.run(open_block)
    return pool


def run_cases(cases: Sequence[Case], deadline: float) -> list[tuple[Case, Trial]]:
    """Run cases on a pool of its own."""
    pool, found = new_pool(), []
    for case in cases:
        if time.monotonic() > deadline:
            break
        try:
            starts, reports = zip(*pool.run(differ, *case), strict=True)
            trial = Trial(case[1], dict(enumerate(reports)), {}, (), max(starts))
        except WorkerFailed as error:
            is_hang = "did not finish" in str(error)
            trial = Trial(case[1], {}, {} if is_hang else {0: 1}, (0,) if is_hang else (), 0.0)
            print(f"{case}: {str(error)[-1500:]}", file=sys.stderr, flush=True)
            pool = new_pool()
        log_bad(trial, f"{case}")
        found.append((case, trial))
    pool.close()
    return found


def row_name(case: Case) -> str:
    return f"{case[0]}, {'first use' if case[3] else 'later'}"


def experiment(trials: int | None = None, *, jobs: int, kind: str = "") -> Experiment:
    """An evenly spread sample of all cases, or all of them, divided into one task for each job."""
    everything = [case for case in product(KINDS, ODD_RANKS, STRATEGIES, (True, False)) if kind in case[0]]
    count = len(everything) if trials is None else min(trials, len(everything))
    cases = [everything[n * len(everything) // count] for n in range(count)]
    tasks = [partial(run_cases, cases[n::jobs]) for n in range(min(jobs, count))]
    order = {case: n for n, case in enumerate(everything)}
    return Experiment(
        name="mismatches",
        tasks=tasks,
        rows=lambda found: summarize_by(row_name, sorted(found, key=lambda entry: order[entry[0]])),
        goal=count,
        is_long=True,
    )


def main() -> None:
    parser = parser_of(__doc__, len(KINDS) * len(ODD_RANKS) * len(STRATEGIES) * 2)
    parser.add_argument("--kind", default="", help="only the kinds whose names contain this")
    args = parser.parse_args()
    main_of([experiment(args.trials, jobs=args.jobs, kind=args.kind)], args)


if __name__ == "__main__":
    main()
