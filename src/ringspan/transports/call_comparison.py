"""Compare the calls of all ranks on a backend without tags, such as NCCL.

Such a backend matches messages by their order alone. If the ranks make different calls whose messages have equal sizes,
they receive rows of other calls without noticing. Each pass of attention and each collective therefore sums a checksum
over all ranks, of all calls that a rank has made. It is compared on the device, so that the host does not wait::

    rank 0   checksum a ─┐                    equal to 2 a: the results are kept
    rank 1   checksum b ─┴► all-reduce, a + b ┤
                                              else: NaN, or PeerMismatch for integers

The sum starts with the first messages of a call and is waited for at its end, so that it travels while the rank
computes. If the checksums of P ranks differ, the rank with the largest one finds a sum that is too small. The others do,
too, unless their checksum happens to be the mean of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.errors import PeerMismatch


class Comparison(NamedTuple):
    """A comparison that has begun."""

    total: Tensor
    """The sum of the checksums of all ranks, once ``work`` has ended."""
    expected: int
    """The sum if all checksums are equal to that of this rank."""
    work: Any


def start_comparison(checksum: int, world: int, device: torch.device, group: dist.ProcessGroup) -> Comparison:
    """Start the sum of the checksums of a group of ``world`` ranks."""
    total = torch.full((), checksum, dtype=torch.int64, device=device)  # filled, not copied from the host
    return Comparison(total, checksum * world, dist.all_reduce(total, group=group, async_op=True))


def apply_comparison(comparison: Comparison, results: Sequence[Tensor], label: str) -> None:
    """Replace the results of a call by NaN if the ranks have made different calls. Integers, and floats of 8 bits, which
    torch cannot fill by a mask, raise PeerMismatch, which waits for the device."""
    differ = comparison.total != comparison.expected
    if all((x.is_floating_point() or x.is_complex()) and x.itemsize > 1 for x in results):
        for x in results:
            x.masked_fill_(differ, torch.nan)
    elif differ.item():
        raise PeerMismatch(
            f"the ranks have made different calls, as {label} found: results since then are wrong. All ranks must make the "
            "same calls in the same order. RINGSPAN_DEBUG=1 names the first call that differs"
        )
