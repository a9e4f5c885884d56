"""Compare the calls of all ranks on a backend without tags, such as NCCL.

Such a backend matches messages by their order alone. If the ranks make different calls whose messages have equal sizes,
they receive rows of other calls without noticing. Each pass of attention and each collective therefore compares a
checksum of all calls that a rank has made. P ranks sum them on the device, so that the host does not wait::

    rank 0      (P - 1) × checksum ─┐                      0: the results are kept
    the others     -1 × checksum ───┴► all-reduce ─► sum ─┤
                                                           else: NaN, or PeerMismatch for integers

The sum is started before the first messages of a call and waited for at its end, so that it overlaps with kernels. It
is 0 for different checksums only if that of rank 0 happens to be the mean of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.caching.by_stream import CAPTURING, stream_key
from ringspan.errors import PeerMismatch


class PendingComparison(NamedTuple):
    """A comparison that has begun. ``total`` is the sum of all ranks, once ``work`` has ended."""

    total: Tensor
    work: Any


def start_comparison(checksum: int, rank: int, world: int, device: torch.device, group: dist.ProcessGroup) -> PendingComparison:
    """Start the sum of the checksums. Float64 holds it exactly: a checksum has 32 bits."""
    own = 2 * checksum * (world - 1 if rank == 0 else -1)  # twice: the sum of different checksums is never ±1
    total = torch.full((), own, dtype=torch.float64, device=device)  # filled, not copied from the host
    return PendingComparison(total, group.allreduce([total]))


def apply_comparison(comparison: PendingComparison, results: Sequence[Tensor], label: str) -> None:
    """Add NaN to the results of a call if the ranks have made different calls, else 0.

    Integers, and floats of 8 bits, which torch cannot add, raise PeerMismatch, which waits for the device. While a CUDA
    graph is captured nothing can be waited for: then only the results of other calls in the graph become NaN.
    """
    nan_or_zero = comparison.total.asin_()  # in one launch: NaN outside of [-1, 1]
    if all((x.is_floating_point() or x.is_complex()) and x.itemsize > 1 for x in results):
        for x in results:
            x.add_(nan_or_zero)
    elif stream_key(nan_or_zero.device) != CAPTURING and nan_or_zero.isnan().item():
        raise PeerMismatch(
            f"the ranks have made different calls, as {label} found: results since then are wrong. All ranks must make the "
            "same calls in the same order. RINGSPAN_DEBUG=1 names the first call that differs"
        )
