"""``ringspan.pack``: group the documents of a batch into microbatches that all ranks compute together.

A fixed context-parallel size gives each group of ranks its own sequences, and the slowest group decides. Here every
microbatch is one packed sequence over all ranks, so a long document takes as many ranks as its work needs, and short
ones fill up the rest::

    lengths  9 1 6 2 1 5     4 ranks, at most 3 tokens each: 12 tokens in a microbatch

    microbatch 0   9 2 1     rank 0 | rank 1 | rank 2 | rank 3
    microbatch 1   1 6 5     rank 0 | rank 1 | rank 2 | rank 3
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
from ringspan.layouts import Layout, check_world
from ringspan.masks import Mask, documents
from ringspan.masks.mask import lengths as as_lengths
from ringspan.planner.auto import ASSUMED
from ringspan.planner.plan_class import Plan
from ringspan.planner.plan_function import plan
from ringspan.plans.shape import EXAMPLE, Shape, check_shape

Ints = NDArray[np.int64]


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
) -> list[Microbatch]:
    """Group the documents of a batch into microbatches, each planned over all ``world`` ranks.

    ``lengths`` are those of all documents of the batch, on all replicas. A microbatch has at most ``tokens_per_rank``
    tokens on each rank. Documents are assigned from the longest to the shortest, each to the microbatch of least
    predicted time in which it fits, so that all take about equally long. There are as few microbatches as this
    assignment allows. No document is cut: each attends to all of itself.

    The time of a document is that of one layer: attention on ``hardware`` for tensors of ``shape``, and
    ``linear_flops`` for each token (the FLOPs of the layer's matrix products in the forward pass; by default those of a
    decoder layer whose width is heads × head dim). The layout is ``balanced``: all ranks have equal tokens and equal
    work. The strategy is chosen as by :func:`ringspan.plan`. ``mask`` makes the mask of a microbatch from the lengths
    of its documents.

    Every rank gets the same result from the same arguments; nothing is sent.

    >>> for part in pack([9, 1, 6, 2, 1, 5], 4, tokens_per_rank=3):
    ...     print(part.documents, part.lengths, part.layout.counts)
    (0, 3, 4) (9, 2, 1) (3, 3, 3, 3)
    (1, 2, 5) (1, 6, 5) (3, 3, 3, 3)
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
    made = []
    for group in _groups(sizes, capacity, layer):
        of_group = sizes[group].tolist()
        made_mask = mask(of_group)
        if not isinstance(made_mask, Mask):
            raise InputError(f"mask() must make a mask from the lengths of documents, but gave {type(made_mask).__name__}")
        if made_mask.lengths != (sum(of_group),) * 2:
            raise InputError(f"mask() gave {made_mask.name} of lengths {made_mask.lengths} for {sum(of_group)} tokens")
        of_ranks = plan(made_mask, world=world, layout="balanced", hardware=hardware, shape=shape)
        made.append(Microbatch(documents=tuple(group), lengths=tuple(of_group), plan=of_ranks))
    return made


def _groups(sizes: Ints, capacity: int, layer: LayerCost) -> list[list[int]]:
    """Return the numbers of the documents of each microbatch, in increasing order. Documents of length 0 are in
    none."""
    count = -(-int(sizes.sum()) // capacity)
    while True:
        groups = _spread(sizes, capacity, count, layer)
        if groups is not None:
            return [sorted(group) for group in groups]
        count += 1


def _spread(sizes: Ints, capacity: int, count: int, layer: LayerCost) -> list[list[int]] | None:
    """Give each document, the longest first, to the microbatch of least time in which it fits; None if one fits
    in none."""
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
