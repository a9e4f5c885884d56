"""``ringspan.pack``: group the documents of a batch into microbatches that all ranks compute together.

A fixed context-parallel size gives each group of ranks its own sequences, and the slowest group decides. Here every
microbatch is one packed sequence over all ranks, so a long document takes as many ranks as its work needs, and short
ones fill up the rest::

    lengths  9 1 6 2 1 5     4 ranks, at most 3 tokens each: 12 tokens in a microbatch

    microbatch 0   9 2 1     rank 0 | rank 1 | rank 2 | rank 3
    microbatch 1   6 5 1     rank 0 | rank 1 | rank 2 | rank 3

Over several nodes, each microbatch takes documents of similar length instead of an equal share of the long ones. Then a
node's share of the work of the first microbatches is large. Long documents fit into fewer nodes, fewer keys cross
between them, and there is more work to hide the messages behind. The other microbatches have only short documents, and
send hardly anything. The predicted time is the sum over all microbatches, so they need not take equally long.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspan.costs.hardware import Hardware
from ringspan.costs.hardware import hardware as named_hardware
from ringspan.costs.layer import LayerCost, layer_cost
from ringspan.errors import InputError
from ringspan.layouts import Layout, check_world, for_nodes, named_layout
from ringspan.masks import Mask, documents
from ringspan.masks.mask import lengths as as_lengths
from ringspan.planner.auto import ASSUMED, describe, plans_at, workload_of
from ringspan.planner.choose import SAMPLE_SIZE, choose
from ringspan.planner.plan_class import Plan, check_dkv_dtype, plan_rank
from ringspan.planner.plan_function import plan
from ringspan.plans.data import AS_ACCUMULATED, DkvDtype
from ringspan.plans.shape import EXAMPLE, Shape, check_shape
from ringspan.strategies import Exchange, Hierarchical, spec
from ringspan.strategies.hierarchical import NODES_FOR_PIECES

Ints = NDArray[np.int64]

# Microbatches of similar lengths may have this fraction more tokens than an equal share, 1/1000.
SPARE = 1000

# The numbers of pieces of the rows that cross between nodes, of which the fastest is taken: over fewer nodes than
# ``NODES_FOR_PIECES``, and over more.
FEW_PIECES, MORE_PIECES = (1, 2, 3), (1, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Some documents of a batch, packed into one sequence over all ranks.

    ``documents`` are their numbers in the batch, in the order of the sequence, and ``lengths`` their lengths. ``plan``
    is that of rank 0; ``plan.at(rank)`` gives another rank's.
    """

    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    plan: Plan

    @property
    def mask(self) -> Mask:
        return self.plan.mask

    @property
    def layout(self) -> Layout:
        return self.plan.q_layout

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def seconds(self, hardware: str | Hardware, shape: Shape, linear_flops: float | None = None) -> float:
        """Return the predicted time of one layer, forward and backward, on the slowest rank: attention with its
        communication, and matrix products by the number of tokens (see :func:`pack`)."""
        layer = layer_cost(named_hardware(hardware), check_shape(shape), linear_flops)
        return self.plan.cost(hardware, shape).seconds + layer.seconds(max(self.layout.counts), 0)


def pack(
    lengths: Any,
    world: int,
    *,
    tokens_per_rank: int,
    hardware: str | Hardware | None = None,
    shape: Shape | None = None,
    linear_flops: float | None = None,
    mask: Callable[[list[int]], Mask] = documents,
    dkv_dtype: DkvDtype = AS_ACCUMULATED,
) -> list[Microbatch]:
    """Group the documents of a batch into microbatches, each planned over all ``world`` ranks.

    ``lengths`` are those of all documents of the batch, on all replicas. A microbatch has at most ``tokens_per_rank``
    tokens on each rank. Documents are assigned from the longest to the shortest, and are in this order in their
    microbatch. If all ranks are on one node of the ``hardware``, or none is given, each document is assigned to the
    microbatch of least predicted time in which it fits, so that all take about equally long. Over several nodes it is
    assigned to the first in which it fits, so that those in a microbatch are of similar length. There are as few
    microbatches as this assignment allows. No document is cut: each attends to all of itself.

    The time of a document is that of one layer: attention on ``hardware`` for tensors of ``shape``, and
    ``linear_flops`` for each token (the FLOPs of the layer's matrix products in the forward pass; by default those of a
    decoder layer whose width is heads × head dim). The layout is ``balanced``: all ranks have equal tokens and equal
    work. The strategy is chosen as by :func:`ringspan.plan`, over several nodes from fewer candidates and with a sample
    of the ranks. ``mask`` makes the mask of a microbatch from the lengths of its documents. ``dkv_dtype`` is that of
    :func:`ringspan.plan`.

    Every rank gets the same result from the same arguments; nothing is sent.

    >>> for part in pack([9, 1, 6, 2, 1, 5], 4, tokens_per_rank=3):
    ...     print(part.documents, part.lengths, part.layout.counts)
    (0, 3, 4) (9, 2, 1) (3, 3, 3, 3)
    (2, 5, 1) (6, 5, 1) (3, 3, 3, 3)
    """
    sizes = as_lengths("lengths", lengths)
    if not callable(mask):
        raise InputError(
            f"mask must be a function that makes a mask from a list of lengths, as rs.documents; got {mask!r:.100}"
        )
    world, capacity = check_world(world), world * _check_tokens(tokens_per_rank)
    if len(sizes) and sizes.max() > capacity:
        raise InputError(
            f"document {int(sizes.argmax())} has {int(sizes.max()):,} tokens, but {world} ranks of {tokens_per_rank:,} tokens "
            f"hold {capacity:,}: raise tokens_per_rank, or take more ranks"
        )
    machine = named_hardware(ASSUMED if hardware is None else hardware)
    layer = layer_cost(machine, EXAMPLE if shape is None else check_shape(shape), linear_flops)
    dkv_dtype = check_dkv_dtype(dkv_dtype)
    over_nodes = hardware is not None and 1 < machine.per_node < world
    groups = _by_length(sizes, capacity) if over_nodes else _by_time(sizes, capacity, layer)
    made = []
    for group in groups:
        of_group = sizes[group].tolist()
        made_mask = _check_mask(mask(of_group), sum(of_group))
        if over_nodes:
            of_ranks = _plan_over_nodes(made_mask, world, machine, shape, dkv_dtype)
        else:
            of_ranks = plan(made_mask, world=world, layout="balanced", hardware=hardware, shape=shape, dkv_dtype=dkv_dtype)
        made.append(Microbatch(documents=tuple(group), lengths=tuple(of_group), plan=of_ranks))
    return made


def _check_mask(made: Any, tokens: int) -> Mask:
    if not isinstance(made, Mask):
        raise InputError(f"mask() must make a mask from the lengths of documents, but gave {type(made).__name__}")
    if made.lengths != (tokens, tokens):
        raise InputError(f"mask() gave {made.name} of lengths {made.lengths} for {tokens} tokens")
    return made


def _plan_over_nodes(mask: Mask, world: int, machine: Hardware, shape: Shape | None, dkv_dtype: DkvDtype) -> Plan:
    """Return the plan of rank 0 by the fastest of a few strategies, judged by a sample of the ranks."""
    layout, note = named_layout(str(for_nodes("balanced", world, machine.per_node)), mask, world)
    workload = workload_of(mask, layout, layout, machine, shape or EXAMPLE, SAMPLE_SIZE, dkv_dtype)
    pieces = FEW_PIECES if world < NODES_FOR_PIECES * machine.per_node else MORE_PIECES
    strategies = [Exchange(stages=1), *(Hierarchical(per_node=machine.per_node, pieces=n) for n in pieces)]
    choice = choose([workload], [spec(strategy) for strategy in strategies], plans_at, most_ranks=SAMPLE_SIZE)
    notes = (note, *describe(choice, machine, shape))
    return plan_rank(mask, layout, layout, choice.best.strategy, 0, notes, dkv_dtype)


def _by_time(sizes: Ints, capacity: int, layer: LayerCost) -> list[list[int]]:
    """Return the numbers of the documents of microbatches that take about equally long. Documents of length 0 are in
    none."""
    count = -(-int(sizes.sum()) // capacity)
    while True:
        groups = share_documents(sizes, count, capacity, layer)
        if groups is not None:
            return groups
        count += 1


def _by_length(sizes: Ints, capacity: int) -> list[list[int]]:
    """Return the numbers of the documents of microbatches of about equal tokens, each of similar lengths. Documents of
    length 0 are in none."""
    tokens = int(sizes.sum())
    count = max(1, -(-tokens // capacity))
    equal = -(-tokens // count)
    groups = _first_fit(sizes, min(capacity, equal + equal // SPARE))
    return groups if len(groups) <= count else _first_fit(sizes, capacity)


def _first_fit(sizes: Ints, capacity: int) -> list[list[int]]:
    """Give each document, the longest first, to the first group in which it fits."""
    groups: list[list[int]] = []
    free: list[int] = []
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        if not size:
            break
        fitting = (i for i, tokens in enumerate(free) if size <= tokens)
        i = next(fitting, len(groups))
        if i == len(groups):
            groups.append([])
            free.append(capacity)
        groups[i].append(document)
        free[i] -= size
    return groups


def share_documents(sizes: Ints, count: int, capacity: int, layer: LayerCost) -> list[list[int]] | None:
    """Give each document, the longest first, to the group of least time in which it fits.

    Returns the numbers of the documents of ``count`` groups, or None if a document fits in none.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    free = [capacity] * count
    times = [(0.0, i) for i in range(count)]  # a heap
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        if not size:
            break
        full = []
        while times and free[times[0][1]] < size:
            full.append(heapq.heappop(times))
        if not times:
            return None
        seconds, i = times[0]
        groups[i].append(document)
        free[i] -= size
        heapq.heapreplace(times, (seconds + layer.seconds(size, size * (size + 1) // 2), i))
        for entry in full:
            heapq.heappush(times, entry)
    return groups


def _check_tokens(given: Any) -> int:
    try:
        tokens = operator.index(given)
    except TypeError:
        tokens = 0
    if tokens < 1:
        raise InputError(f"tokens_per_rank must be an integer of at least 1, not {given!r}")
    return tokens
