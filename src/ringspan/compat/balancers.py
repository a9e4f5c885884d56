"""Load balancers: torch's interface for layouts, as a permutation of the tokens that is then split into shards."""

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

# One layout for all rows of the batch, or one for each row.
Layouts = tuple[Layout, ...]


class _LoadBalancer(ABC):
    """Base class. A subclass returns the order of the tokens, which is then split into equal shards."""

    @abstractmethod
    def _generate_indices(self, restore: bool = False) -> Tensor | None:
        """Return indices such that ``x[:, indices]`` reorders the tokens or, with ``restore``, restores their order.

        The shape is (1, tokens), or (batch, tokens) if each row of the batch has its own order. None keeps the order.
        """


class _LayoutBalancer(_LoadBalancer):
    """A balancer that has ringspan layouts, whose shards need not be equal in size."""

    dtype = torch.int64

    def __init__(self, layouts: Layouts, device: str | torch.device) -> None:
        self.layouts = layouts
        self.world_size = layouts[0].world
        self.device = device

    def _generate_indices(self, restore: bool = False) -> Tensor:
        order = torch.from_numpy(np.stack([layout.order() for layout in self.layouts])).to(self.device)
        return order.argsort(dim=1) if restore else order.to(self.dtype)


class _HeadTailLoadBalancer(_LayoutBalancer):
    """Each rank gets one early and one late chunk, which balances causal masks. See :func:`ringspan.layouts.zigzag`.

    >>> _HeadTailLoadBalancer(8, 2, "cpu")._generate_indices().tolist()
    [[0, 1, 6, 7, 2, 3, 4, 5]]
    """

    dtype = torch.int32  # torch's dtype for these indices

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device) -> None:
        self.seq_length = seq_length
        super().__init__((zigzag(full(seq_length), world_size),), device)


class _PerDocumentHeadTailLoadBalancer(_LayoutBalancer):
    """Head-tail order within every document, for each row of the batch or one row for all.

    From torch 2.14 on, each rank gets one early and one late chunk of every document. Before, the tokens are ordered
    document by document, so that the first rank gets the first documents. The layout is that of the installed torch::

        documents [0,4) [4,12), 2 ranks      rank 0                        rank 1
        2.14                                 [0,1) [3,4) [4,6) [10,12)     [1,3) [6,10)
        before                               [0,1) [3,4) [1,3) [4,6)       [10,12) [6,10)
    """

    def __init__(self, seq_length_per_doc: list[list[int]], world_size: int, device: str | torch.device) -> None:
        self.seq_length_per_doc = seq_length_per_doc
        make = _rank_major if torch.__version__ >= "2.14" else _document_major
        super().__init__(tuple(make(lengths, world_size) for lengths in seq_length_per_doc), device)

    def _generate_indices_for_batch(self, seq_length_per_doc: list[int], restore: bool) -> Tensor:
        """Return the indices of one row, with shape (tokens,)."""
        (row,) = type(self)([seq_length_per_doc], self.world_size, self.device)._generate_indices(restore)
        return row


def _rank_major(lengths: Sequence[int], world: int) -> Layout:
    return per_document(documents(lengths), world)


def _document_major(lengths: Sequence[int], world: int) -> Layout:
    """Return the head-tail order of each document in turn, split into equal shards."""
    orders, start = [np.zeros(0, dtype=np.int64)], 0
    for length in lengths:
        orders.append(start + zigzag(full(length), world).order())
        start += length
    return _split_order(np.concatenate(orders), world)


class _PTRRLoadBalancer(_LayoutBalancer):
    """Processing-time round robin: blocks of queries, sorted by work, go to ranks 0 1 2 … 2 1 0 0 1 2 …"""

    def __init__(self, block_mask: BlockMask, world_size: int) -> None:
        self.block_mask = block_mask
        work_BHQ = block_mask.kv_num_blocks
        if block_mask.full_kv_num_blocks is not None:
            work_BHQ = work_BHQ + block_mask.full_kv_num_blocks
        length, size = int(block_mask.seq_lengths[0]), int(block_mask.BLOCK_SIZE[0])
        layouts = tuple(_round_robin_layout(work_Q, size, length, world_size) for work_Q in work_BHQ.sum(dim=1).cpu().numpy())
        super().__init__(layouts, block_mask.kv_num_blocks.device)

    @staticmethod
    def ptrr_scheduling(process_time: Tensor, group_size: int) -> Tensor:
        """Return the tasks of each group, with shape (groups, tasks per group).

        >>> _PTRRLoadBalancer.ptrr_scheduling(torch.tensor([9, 14, 2, 20]), 2).tolist()
        [[2, 3], [0, 1]]
        """
        if process_time.ndim != 1 or len(process_time) % group_size:
            raise LayoutError(
                f"process_time must have one dim, whose size is a multiple of the {group_size} groups; got a tensor of shape "
                f"{tuple(process_time.shape)}"
            )
        tasks = _assign_round_robin(process_time.cpu().numpy(), group_size)
        return torch.from_numpy(np.stack(tasks)).to(process_time.device)


def _round_robin_layout(work_Q: Ints, size: int, length: int, world: int) -> Layout:
    """Return a layout of blocks of ``size`` queries, assigned by their work."""
    blocks_of_ranks = _assign_round_robin(work_Q, world)
    spans = [[(b * size, min((b + 1) * size, length)) for b in blocks.tolist()] for blocks in blocks_of_ranks]
    return Layout(spans, name="round_robin")


def _assign_round_robin(work: Ints, world: int) -> list[Ints]:
    """Return the tasks of each rank, sorted. The heaviest are assigned first, to ranks 0 1 2 … 2 1 0 0 1 2 …"""
    heaviest_first = np.argsort(-work, kind="stable")
    turn = np.arange(len(work)) % (2 * world)
    rank_of_task = np.where(turn < world, turn, 2 * world - 1 - turn)
    return [np.sort(heaviest_first[rank_of_task == rank]) for rank in range(world)]


def layouts_of(balancer: _LoadBalancer | None, length: int, world: int) -> Layouts:
    """Return the layouts that a ``load_balancer=`` argument gives a sequence of this length."""
    if isinstance(balancer, _LayoutBalancer) and type(balancer)._generate_indices is _LayoutBalancer._generate_indices:
        layouts = balancer.layouts
    else:
        order = None if balancer is None else balancer._generate_indices()
        if order is None:
            return (contiguous(full(length), world),)
        if order.ndim != 2:
            raise LayoutError(
                f"_generate_indices of {type(balancer).__name__} must return indices of shape (1, tokens) or (batch, tokens), "
                f"not {tuple(order.shape)}"
            )
        layouts = tuple(_split_order(row, world) for row in order.cpu().numpy())
    for row, layout in enumerate(layouts):
        if (layout.length, layout.world) != (length, world):
            raise LayoutError(
                f"{type(balancer).__name__} was made for {layout.length} tokens over {layout.world} ranks, but the sequence "
                f"has {length} tokens over {world} ranks: make one for these"
            )
        if layout.counts != layouts[0].counts:
            raise LayoutError(
                f"{type(balancer).__name__} gives the ranks {layout.counts} tokens of row {row} of the batch and "
                f"{layouts[0].counts} of row 0, which do not fit in one tensor: use lengths that are "
                "multiples of the block size"
            )
    return layouts


def same_order(a: Layouts, b: Layouts) -> bool:
    """Return whether two layouts give every rank the same tokens in the same order, however their spans are cut."""
    if a == b:
        return True
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(x.counts == y.counts and np.array_equal(x.order(), y.order()) for x, y in pairs)


def _split_order(order: Ints, world: int) -> Layout:
    cuts = even_cuts(len(order), world)
    return Layout([_spans_of(order[a:b]) for a, b in pairwise(cuts)], length=len(order), name="indices")


def _spans_of(tokens: Ints) -> Sequence[tuple[int, int]]:
    """Return the tokens as spans of consecutive tokens.

    >>> _spans_of(np.array([4, 5, 0, 2, 3]))
    [(4, 6), (0, 1), (2, 4)]
    """
    cuts = np.flatnonzero(np.diff(tokens) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(tokens, cuts) if len(run)]
