"""Compare the calls of all ranks inside a collective of a backend without tags, such as NCCL.

Such a backend matches messages by their order alone. If the ranks have made different calls, they have received rows of
other calls without noticing. Every collective therefore also reduces a checksum of the calls that each rank has made
before it, on the device, so that the host does not wait::

    rank 0   checksum a ─┐  all-reduce, MAX of (c, -c)          equal: the result is kept
    rank 1   checksum b ─┴► largest, -smallest ─► their sum ─┤
                                                              not 0: NaN, or PeerMismatch for integers

So a loss or a gradient that was computed from rows of other calls is never a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.errors import PeerMismatch


def start_comparison(checksum: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Start the all-reduce. Return its tensor, for :func:`apply_comparison`, and its work handle."""
    extremes = torch.full((2,), checksum, dtype=torch.int64, device=device)  # filled, not copied from the host
    extremes[1:].fill_(-checksum)
    return extremes, dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group, async_op=True)


def apply_comparison(extremes: Tensor, results: Sequence[Tensor], label: str) -> None:
    """Replace the results of a collective by NaN if the ranks have made different calls. Integers, and floats of 8 bits,
    which torch cannot fill by a mask, raise PeerMismatch, which waits for the device."""
    differ = extremes.sum() != 0
    if all((x.is_floating_point() or x.is_complex()) and x.itemsize > 1 for x in results):
        for x in results:
            x.masked_fill_(differ, torch.nan)
    elif differ.item():
        raise PeerMismatch(
            f"the ranks have made different calls before {label}: results since then are wrong. All ranks must make the same "
            "calls in the same order. RINGSPAN_DEBUG=1 names the first call that differs"
        )
