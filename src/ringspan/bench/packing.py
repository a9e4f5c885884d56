"""Compare how evenly ways of packing divide a batch of documents among data-parallel and context-parallel ranks.

Each way makes a *schedule*: rounds of groups of ranks, each group with its documents. A round takes as long as its
slowest group, since gradients are summed over all ranks. Times are predicted for one layer, forward and backward:
attention with its communication, by the plan that ringspan makes for the group, and matrix products by tokens. The
ideal is the work of all documents, divided equally among all ranks, without any communication. The bound is the least
time of any way, for the same documents and machine (``bench/bounds.py``).

The ways other than ringspan's are written from their public descriptions. Within a group they get the plan that
ringspan makes on the layout ``per_document``:

``in order``     Fixed groups of 16 ranks. A sequence takes documents in the order of the batch until the next one does
                 not fit.
``equal work``   The same groups. Sequences of equal predicted time, as of WLB-LLM.
``powers of 2``  A document gets the smallest power of two of ranks that holds it. Groups of a size get equal sums of
                 squared length ÷ ranks, as of the balanced scheduler of Megatron.
``ringspan``     :func:`ringspan.pack`: every microbatch over all ranks.
``bf16 dkv``     The same, with gradients of keys and values sent in bfloat16 instead of float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

import ringspan as rs
from ringspan.bench.bounds import least_seconds
from ringspan.bench.rows import OnProgress, Row
from ringspan.costs.hardware import hardware
from ringspan.costs.layer import LayerCost, layer_cost
from ringspan.costs.plan_cost import cost
from ringspan.planner.auto import plans_at, workload_of
from ringspan.planner.microbatches import share_documents
from ringspan.plans.data import AS_ACCUMULATED, DkvDtype

# The ranks of a group for the ways that have fixed groups.
FIXED_SIZE = 16

# The share of the ranks' token capacity that the documents of a batch fill.
FILLED = 0.97

# In larger groups, this many ranks are planned to predict the time.
SAMPLED_RANKS = 64

ROUNDED = "bf16 dkv"

SHAPE = rs.Shape(heads=32, kv_heads=8, head_dim=128)


class Group(NamedTuple):
    """Ranks that compute these documents together. If ``plan`` is None, they are planned on ``per_document``."""

    ranks: int
    lengths: list[int]
    plan: rs.Plan | None = None


Schedule = list[list[Group]]


def packing_rows(
    *,
    lengths: Sequence[str],
    world: Sequence[int],
    tokens_per_rank: int,
    longest: int,
    rounds: int,
    machine: str,
    seed: int,
    on_progress: OnProgress,
) -> Iterator[Row]:
    """Yield a row for each distribution of lengths, number of ranks and way of packing."""
    todo = len(lengths) * len(world) * len(WAYS)
    done = 0
    for name in lengths:
        for ranks in world:
            drawn = draw_batch_lengths(name, ranks, tokens_per_rank, longest=longest, rounds=rounds, seed=seed)
            for way in WAYS:
                on_progress(done, todo, f"{name}, {ranks} ranks, {way}")
                yield _row(name, drawn, ranks, tokens_per_rank, machine, way)
                done += 1


def _row(name: str, lengths: list[int], world: int, tokens_per_rank: int, machine: str, way: str) -> Row:
    layer = layer_cost(hardware(machine), SHAPE)
    rs.clear_caches()
    start = time.process_time()  # other processes may run at the same time
    schedule = WAYS[way](lengths, world, tokens_per_rank, machine, layer)
    seconds = time.process_time() - start
    times = [[_group_times(group, machine, layer) for group in groups] for groups in schedule]
    taken = sum(max(time.whole for time in of_round) for of_round in times)
    computing = sum(max(time.computing for time in of_round) for of_round in times)
    ideal = layer.seconds(sum(lengths), sum(n * (n + 1) // 2 for n in lengths)) / world
    sent: DkvDtype = "bfloat16" if way == ROUNDED else AS_ACCUMULATED
    bound = least_seconds(lengths, world, tokens_per_rank, hardware(machine), SHAPE, token_s=layer.token_s, dkv_dtype=sent)
    return {
        "bench": "pack",
        "lengths": name,
        "documents": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "world": world,
        "way": way,
        "rounds": len(schedule),
        "ideal_ms": round(ideal * 1e3, 2),
        "slowest_ms": round(taken * 1e3, 2),
        "computing_over_ideal": round(computing / ideal, 3),
        "over_ideal": round(taken / ideal, 3),
        "bound_over_ideal": round(bound / ideal, 3),
        "make_s": round(seconds / max(1, len(schedule)), 3),
    }


class GroupTimes(NamedTuple):
    """The predicted seconds of a group's slowest rank, and those of the rank that computes most."""

    whole: float
    computing: float


def _group_times(group: Group, machine: str, layer: LayerCost) -> GroupTimes:
    if not group.lengths:
        return GroupTimes(0.0, 0.0)
    if group.ranks == 1 and group.plan is None:
        alone = layer.seconds(sum(group.lengths), sum(n * (n + 1) // 2 for n in group.lengths))
        return GroupTimes(alone, alone)
    plan = group.plan
    if plan is None:
        mask = rs.documents(group.lengths)
        plan = rs.plan(mask, world=group.ranks, layout="per_document", hardware=machine, shape=SHAPE)
    layouts = plan.q_layout, plan.kv_layout
    workload = workload_of(plan.mask, *layouts, hardware(machine), SHAPE, SAMPLED_RANKS, plan.program.dkv_dtype)
    attention = cost(plans_at(workload, plan.strategy), hardware(machine), SHAPE)
    products = layer.seconds(max(plan.q_layout.counts), 0)
    computing = sum((line.computed - line.begin).sum(axis=1) for line in (attention.forward, attention.backward))
    return GroupTimes(attention.seconds + products, float(np.max(computing)) + products)


# -- batches -----------------------------------------------------------------------------------------------------------

LENGTHS: dict[str, Callable[[np.random.Generator], float]] = {
    "web": lambda rng: rng.lognormal(mean=7.0, sigma=1.4),  # most of about 1,000 tokens, few above 50,000
    "long tail": lambda rng: rng.lognormal(mean=8.5, sigma=1.6),
    "books and code": lambda rng: rng.uniform(65536, 262144) if rng.random() < 0.03 else rng.lognormal(mean=7.5, sigma=1.2),
}


def draw_batch_lengths(name: str, world: int, tokens_per_rank: int, *, longest: int, rounds: int, seed: int) -> list[int]:
    """Draw the documents of a batch. None is longer than a fixed group of ranks holds."""
    most = min(FIXED_SIZE, world) * tokens_per_rank
    return draw_lengths(name, tokens=int(world * tokens_per_rank * rounds * FILLED), longest=min(longest, most), seed=seed)


def draw_lengths(name: str, *, tokens: int, longest: int, seed: int) -> list[int]:
    """Draw documents until they have this many tokens; the last one is cut."""
    rng = np.random.default_rng(seed)
    drawn: list[int] = []
    left = tokens
    while left:
        drawn.append(int(min(max(LENGTHS[name](rng), 32), longest, left)))
        left -= drawn[-1]
    return drawn


# -- ways of packing ---------------------------------------------------------------------------------------------------


def in_order(lengths: list[int], world: int, tokens_per_rank: int, machine: str, layer: LayerCost) -> Schedule:
    size = min(FIXED_SIZE, world)
    sequences: list[list[int]] = [[]]
    for n in lengths:
        if sum(sequences[-1]) + n > size * tokens_per_rank:
            sequences.append([])
        sequences[-1].append(n)
    return _rounds(sequences, size, world)


def equal_work(lengths: list[int], world: int, tokens_per_rank: int, machine: str, layer: LayerCost) -> Schedule:
    size = min(FIXED_SIZE, world)
    capacity, replicas = size * tokens_per_rank, world // size
    count = -(-sum(lengths) // (capacity * replicas)) * replicas
    while True:
        groups = share_documents(np.array(lengths), count, capacity, layer)
        if groups is not None:
            return _rounds([[lengths[i] for i in group] for group in groups], size, world)
        count += replicas


def _rounds(sequences: list[list[int]], size: int, world: int) -> Schedule:
    replicas = world // size
    return [
        [Group(size, sequence) for sequence in sequences[first : first + replicas]]
        for first in range(0, len(sequences), replicas)
    ]


def powers_of_two(lengths: list[int], world: int, tokens_per_rank: int, machine: str, layer: LayerCost) -> Schedule:
    waiting = sorted(lengths, reverse=True)
    schedule: Schedule = []
    while waiting:
        groups, waiting = _one_round(waiting, world, tokens_per_rank)
        schedule.append(groups)
    return schedule


def _one_round(waiting: list[int], world: int, tokens_per_rank: int) -> tuple[list[Group], list[int]]:
    """Fill the ranks with groups, and return these and the documents that are left.

    A document gets a new group while ranks are free. Else it joins the least loaded group of its size in which it fits.
    Ranks that are left over double the heaviest groups.
    """
    groups: list[Group] = []
    loads: list[float] = []
    left, free = [], world
    for n in waiting:
        size = 1 << max(0, (-(-n // tokens_per_rank) - 1).bit_length())
        fits = [i for i, group in enumerate(groups) if group.ranks == size and sum(group.lengths) + n <= size * tokens_per_rank]
        if size <= free:
            groups.append(Group(size, [n]))
            loads.append(n * n / size)
            free -= size
        elif fits:
            i = min(fits, key=loads.__getitem__)
            groups[i].lengths.append(n)
            loads[i] += n * n / size
        else:
            left.append(n)
    for i in sorted(range(len(groups)), key=loads.__getitem__, reverse=True):
        if groups[i].ranks <= free:
            free -= groups[i].ranks
            groups[i] = groups[i]._replace(ranks=2 * groups[i].ranks)
    return groups, left


def by_ringspan(
    lengths: list[int],
    world: int,
    tokens_per_rank: int,
    machine: str,
    layer: LayerCost,
    dkv_dtype: DkvDtype = AS_ACCUMULATED,
) -> Schedule:
    packed = rs.pack(lengths, world, tokens_per_rank=tokens_per_rank, hardware=machine, shape=SHAPE, dkv_dtype=dkv_dtype)
    return [[Group(world, [*part.lengths], part.plan)] for part in packed]


WAYS: dict[str, Callable[[list[int], int, int, str, LayerCost], Schedule]] = {
    "in order": in_order,
    "equal work": equal_work,
    "powers of 2": powers_of_two,
    "ringspan": by_ringspan,
    ROUNDED: partial(by_ringspan, dkv_dtype="bfloat16"),
}
