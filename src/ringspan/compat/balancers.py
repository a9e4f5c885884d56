"""Load balancers: torch's word for a layout, said by the order in which tokens lie before they are cut into shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ringspan.errors import LayoutError
from ringspan.layouts import Layout, contiguous, per_document, zigzag
from ringspan.layouts.layout import even_cuts
from ringspan.masks import documents, full

Ints = NDArray[np.int64]

# One layout for all rows of the batch, or one for each.
Layouts = tuple[Layout, ...]


class _LoadBalancer(ABC):
    """A balancer of your own says in which order tokens lie; the order is then cut into equal shares."""

    @abstractmethod
    def _generate_indices(self, restore: bool = False) -> Tensor | None:
        """``x[:, indices]`` rearranges, and with ``restore=True`` brings back. Shape (1, tokens), or (batch, tokens) where
        each row of the batch has an order of its own. None leaves the tokens as they are."""


class _LaidOut(_LoadBalancer):
    """A balancer that is a layout for each row, whatever the lengths: shares need not be equal."""

    dtype = torch.int64

    def __init__(self, layouts: Layouts, device: str | torch.device) -> None:
        self.layouts = layouts
        self.world_size = layouts[0].world
        self.device = device

    def _generate_indices(self, restore: bool = False) -> Tensor:
        order = torch.from_numpy(np.stack([layout.order() for layout in self.layouts])).to(self.device)
        return order.argsort(dim=1) if restore else order.to(self.dtype)


class _HeadTailLoadBalancer(_LaidOut):
    """Each rank gets one early and one late chunk, which balances causal masks: :func:`ringspan.layouts.zigzag`.

    >>> _HeadTailLoadBalancer(8, 2, "cpu")._generate_indices().tolist()
    [[0, 1, 6, 7, 2, 3, 4, 5]]
    """

    dtype = torch.int32  # as torch's are

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device) -> None:
        super().__init__((zigzag(full(seq_length), world_size),), device)


class _PerDocumentHeadTailLoadBalancer(_LaidOut):
    """Head to tail within every document, for each row of the batch (or one row for all): every rank gets its chunks of
    all documents. (In the order that torch's generates, document by document, the first rank gets the first documents.)

    >>> _PerDocumentHeadTailLoadBalancer([[4, 8]], 2, "cpu")._generate_indices().tolist()
    [[0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9]]
    """

    def __init__(self, seq_length_per_doc: list[list[int]], world_size: int, device: str | torch.device) -> None:
        super().__init__(tuple(per_document(documents(lengths), world_size) for lengths in seq_length_per_doc), device)


class _PTRRLoadBalancer(_LaidOut):
    """Processing-time round robin: blocks of queries, those with the most blocks of keys first, dealt to and fro."""

    def __init__(self, block_mask: BlockMask, world_size: int) -> None:
        work_BHQ = block_mask.kv_num_blocks
        if block_mask.full_kv_num_blocks is not None:
            work_BHQ = work_BHQ + block_mask.full_kv_num_blocks
        length, size = int(block_mask.seq_lengths[0]), int(block_mask.BLOCK_SIZE[0])
        layouts = tuple(_dealt(work_Q, size, length, world_size) for work_Q in work_BHQ.sum(dim=1).cpu().numpy())
        super().__init__(layouts, block_mask.kv_num_blocks.device)

    @staticmethod
    def ptrr_scheduling(process_time: Tensor, group_size: int) -> Tensor:
        """Which tasks each group gets, (groups, tasks of each): the dealing alone, for tasks of one's own.

        >>> _PTRRLoadBalancer.ptrr_scheduling(torch.tensor([9, 14, 2, 20]), 2).tolist()
        [[2, 3], [0, 1]]
        """
        if process_time.ndim != 1 or len(process_time) % group_size:
            raise LayoutError(
                f"process_time must be the times of some tasks, as many for each of {group_size} groups; got a tensor of shape "
                f"{tuple(process_time.shape)}"
            )
        hands = _hands(process_time.cpu().numpy(), group_size)
        return torch.from_numpy(np.stack(hands)).to(process_time.device)


def _dealt(work_Q: Ints, size: int, length: int, world: int) -> Layout:
    """Blocks of queries to ranks."""
    spans = [[(b * size, min((b + 1) * size, length)) for b in hand.tolist()] for hand in _hands(work_Q, world)]
    return Layout(spans, name="round_robin")


def _hands(work: Ints, world: int) -> list[Ints]:
    """Tasks to ranks, like cards: 0 1 2 … 2 1 0 0 1 2 …; a rank then keeps its own in order."""
    heaviest_first = np.argsort(-work, kind="stable")
    turn = np.arange(len(work)) % (2 * world)
    dealt_to = np.where(turn < world, turn, 2 * world - 1 - turn)
    return [np.sort(heaviest_first[dealt_to == rank]) for rank in range(world)]


def layouts_of(balancer: _LoadBalancer | None, length: int, world: int) -> Layouts:
    """What a ``load_balancer=`` argument means for a sequence over the ranks of a mesh."""
    order = None if balancer is None or isinstance(balancer, _LaidOut) else balancer._generate_indices()
    if isinstance(balancer, _LaidOut):
        layouts = balancer.layouts
    elif order is None:
        return (contiguous(full(length), world),)
    else:
        layouts = tuple(_in_shares(row, world) for row in order.cpu().numpy())
    for row, layout in enumerate(layouts):
        if (layout.length, layout.world) != (length, world):
            raise LayoutError(
                f"{type(balancer).__name__} is for {layout.length} tokens over {layout.world} ranks, but these are {length} "
                f"tokens over {world}: make it for those"
            )
        if layout.counts != layouts[0].counts:
            raise LayoutError(
                f"{type(balancer).__name__} gives the ranks {layout.counts} tokens of row {row} of the batch and "
                f"{layouts[0].counts} of row 0, which is no tensor: use lengths that are multiples of the block size"
            )
    return layouts


def _in_shares(order: Ints, world: int) -> Layout:
    cuts = even_cuts(len(order), world)
    return Layout([_runs(order[a:b]) for a, b in pairwise(cuts)], length=len(order), name="indices")


def _runs(tokens: Ints) -> Sequence[tuple[int, int]]:
    """Tokens as spans of neighbours.

    >>> _runs(np.array([4, 5, 0, 2, 3]))
    [(4, 6), (0, 1), (2, 4)]
    """
    cuts = np.flatnonzero(np.diff(tokens) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(tokens, cuts) if len(run)]
