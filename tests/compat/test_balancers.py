"""Load balancers: the indices are those of the installed torch, for all lengths that it accepts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import ringspan as rs
from ringspan import compat
from ringspan.compat import balancers
from ringspan.compat.balancers import layouts_of

CPU = torch.device("cpu")


def documents_mask(lengths: list[list[int]], block: int = 128) -> BlockMask:
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    n = ids.shape[1]

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (ids[b, q] == ids[b, k]) & (q >= k)

    return create_block_mask(mask_mod, len(lengths), None, n, n, device="cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize(("length", "world"), [(8, 1), (8, 2), (32, 4), (48, 3), (1024, 8)])
def test_head_tail_indices_are_torchs(length: int, world: int, restore: bool) -> None:
    ours = compat._HeadTailLoadBalancer(length, world, CPU)._generate_indices(restore=restore)
    torchs = theirs._HeadTailLoadBalancer(length, world, CPU)._generate_indices(restore=restore)
    assert ours.dtype == torchs.dtype
    assert torch.equal(ours, torchs)


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_round_robin_indices_are_torchs(world: int, restore: bool) -> None:
    mask = documents_mask([[300, 84, 640], [900, 120, 4]])
    ours = compat._PTRRLoadBalancer(mask, world)._generate_indices(restore=restore)
    assert torch.equal(ours, theirs._PTRRLoadBalancer(mask, world)._generate_indices(restore=restore))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_ptrr_scheduling_is_torchs(groups: int) -> None:
    times = torch.randint(9, (24,), generator=torch.Generator().manual_seed(groups))
    ours = compat._PTRRLoadBalancer.ptrr_scheduling(times, groups)
    assert torch.equal(ours, theirs._PTRRLoadBalancer.ptrr_scheduling(times, groups))


BALANCERS: dict[str, Callable[[int], Any]] = {
    "head-tail": lambda world: compat._HeadTailLoadBalancer(331, world, CPU),
    "per document": lambda world: compat._PerDocumentHeadTailLoadBalancer([[300, 30, 1], [1, 329, 1]], world, CPU),
    "round robin": lambda world: compat._PTRRLoadBalancer(documents_mask([[200, 131]], block=16), world),
}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("make", BALANCERS.values(), ids=BALANCERS)
def test_restore_inverts_the_order_for_any_length_and_world(make: Callable[[int], Any], world: int) -> None:
    balancer = make(world)
    for there, back in zip(balancer._generate_indices(), balancer._generate_indices(restore=True), strict=True):
        assert torch.equal(there.sort().values.long(), torch.arange(331))
        assert torch.equal(there[back].long(), torch.arange(331))


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_per_document_indices_are_torchs(world: int, restore: bool) -> None:
    """torch 2.14 made them rank-major. Both orders are those of the installed torch."""
    lengths = [[32, 8, 8, 16], [8, 24, 24, 8]]
    ours, torchs = (x._PerDocumentHeadTailLoadBalancer(lengths, world, CPU) for x in (compat, theirs))
    assert torch.equal(ours._generate_indices(restore), torchs._generate_indices(restore))
    for row in lengths:
        assert torch.equal(ours._generate_indices_for_batch(row, restore), torchs._generate_indices_for_batch(row, restore))


def test_both_orders_of_documents() -> None:
    assert balancers._rank_major([4, 8], 2).order().tolist() == [0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9]
    assert balancers._document_major([4, 8], 2).order().tolist() == [0, 3, 1, 2, 4, 5, 10, 11, 6, 7, 8, 9]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(1, 6))
def test_rank_major_balances_work_and_tokens(lengths: list[int], world: int) -> None:
    """Count the visible keys of each rank's tokens.

    A rank's two chunks of a document see as many keys as another rank's, except that chunks can be one token longer:
    this adds at most two lengths of the document.
    """
    sees = np.concatenate([np.arange(1, n + 1) for n in lengths])
    layout = balancers._rank_major(lengths, world)
    work = [int(sees[layout.positions(rank)].sum()) for rank in range(world)]
    assert max(layout.counts) - min(layout.counts) <= 2
    assert max(work) - min(work) <= 2 * sum(lengths)
    whole_chunks = all(n % (2 * world) == 0 for n in lengths)
    assert not whole_chunks or max(work) == min(work)


def test_attributes_are_torchs() -> None:
    mask = documents_mask([[300, 84]])
    for ours, torchs in [
        (compat._HeadTailLoadBalancer(8, 2, CPU), theirs._HeadTailLoadBalancer(8, 2, CPU)),
        (
            compat._PerDocumentHeadTailLoadBalancer([[8, 16]], 2, CPU),
            theirs._PerDocumentHeadTailLoadBalancer([[8, 16]], 2, CPU),
        ),
        (compat._PTRRLoadBalancer(mask, 2), theirs._PTRRLoadBalancer(mask, 2)),
    ]:
        assert {name: getattr(ours, name) for name in vars(torchs)} == vars(torchs)


class Backwards(compat._LoadBalancer):
    """A user-defined balancer."""

    def __init__(self, n: int) -> None:
        self.n = n

    def _generate_indices(self, restore: bool = False) -> torch.Tensor | None:
        return torch.arange(self.n).flip(0)[None] if self.n else None


def test_the_order_of_a_user_defined_balancer_is_split_evenly() -> None:
    (layout,) = layouts_of(Backwards(7), 7, 3)
    assert layout.counts == (2, 2, 3)
    assert layout.order().tolist() == [6, 5, 4, 3, 2, 1, 0]
    (layout,) = layouts_of(Backwards(0), 7, 3)
    assert layout.order().tolist() == list(range(7))


class HeadTailBackwards(compat._HeadTailLoadBalancer):
    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        return super()._generate_indices(restore).flip(1)


def test_the_order_of_a_derived_balancer_counts() -> None:
    (layout,) = layouts_of(HeadTailBackwards(8, 2, CPU), 8, 2)
    assert layout.order().tolist() == [5, 4, 3, 2, 7, 6, 1, 0]


def test_without_a_balancer_shards_are_contiguous() -> None:
    (layout,) = layouts_of(None, 10, 4)
    ends = np.cumsum((0, *layout.counts)).tolist()
    assert [layout.positions(r).tolist() for r in range(4)] == [list(range(a, b)) for a, b in pairwise(ends)]


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "another length": (
        lambda: layouts_of(compat._HeadTailLoadBalancer(8, 2, CPU), 9, 2),
        "for 8 tokens.*has 9 tokens",
    ),
    "another world": (
        lambda: layouts_of(compat._HeadTailLoadBalancer(8, 2, CPU), 8, 4),
        "tokens over 4 ranks: make one for these",
    ),
    "not a permutation": (lambda: layouts_of(Backwards(7), 8, 2), "for 7 tokens"),
    "ragged rows": (
        lambda: layouts_of(compat._PTRRLoadBalancer(documents_mask([[40], [32, 8]], block=16), 2), 40, 2),
        "do not fit in one tensor",
    ),
    "tasks left over": (lambda: compat._PTRRLoadBalancer.ptrr_scheduling(torch.ones(7), 2), "a multiple of the 2 groups"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_balancers_for_another_sequence_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(rs.LayoutError, match=message):
        call()
