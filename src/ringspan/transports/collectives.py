"""Collectives that are made of messages, as generators that a transport runs.

gloo's own collectives do not check what they are given: other sizes or dtypes on one rank abort the process, and
another collective gives wrong numbers. Messages have tags, so those of different calls never match.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringspan.transports.requests import PostExchange, RankGenerator, WaitExchange

SMALL = 4096  # elements that every rank sums itself
PIECE = 2**20  # elements that are summed at a time, so that the sum needs little memory


def all_gather_by_messages(x: Tensor, counts: Sequence[int], rank: int, label: str) -> RankGenerator[list[Tensor]]:
    """Gather tensors whose dim 0 has ``counts[rank]`` rows, in rank order."""
    own = x.contiguous()
    rows = [own if peer == rank else x.new_empty((count, *x.shape[1:])) for peer, count in enumerate(counts)]
    peers = [peer for peer in range(len(counts)) if peer != rank]
    yield from _exchange(label, [(peer, own) for peer in peers], [(peer, rows[peer]) for peer in peers])
    return rows


def all_reduce_by_messages(x: Tensor, rank: int, world: int, label: str) -> RankGenerator[None]:
    """Replace a contiguous tensor by its sum over ranks, which has the same bits on all of them.

    Each rank sums one chunk and sends the sum to all others::

        rank 0   a0 b0 c0        a0+a1+a2 ──►          a b c
        rank 1   a1 b1 c1        b0+b1+b2 ──► gather   a b c
        rank 2   a2 b2 c2        c0+c1+c2 ──►          a b c

    A small tensor is gathered and summed by every rank, which takes one exchange instead of two.
    """
    for number, piece in enumerate(x.view(-1).split(PIECE)):
        step = f"{label}, piece {number}"
        if len(piece) <= SMALL:
            parts = yield from all_gather_by_messages(piece, [len(piece)] * world, rank, step)
            piece.copy_(_sum(parts))
        else:
            yield from _all_reduce_piece(piece, rank, world, step)


def _all_reduce_piece(piece: Tensor, rank: int, world: int, label: str) -> RankGenerator[None]:
    chunks = list(piece.tensor_split(world))
    own, peers = chunks[rank], [peer for peer in range(world) if peer != rank]
    parts = [own if peer == rank else torch.empty_like(own) for peer in range(world)]
    scatter, gather = f"{label}, reduce-scatter", f"{label}, all-gather"
    yield from _exchange(scatter, [(peer, chunks[peer]) for peer in peers], [(peer, parts[peer]) for peer in peers])
    own.copy_(_sum(parts))
    yield from _exchange(gather, [(peer, own) for peer in peers], [(peer, chunks[peer]) for peer in peers])


def _exchange(label: str, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> RankGenerator[None]:
    pending = yield PostExchange(label, tuple(sends), tuple(recvs))
    yield WaitExchange(pending)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Add in rank order, so that the sum of a chunk does not depend on the rank that computes it."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
