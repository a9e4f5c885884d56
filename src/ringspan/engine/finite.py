"""Checks for non-finite values, under ``RINGSPAN_DEBUG=1``: of the inputs of a pass, and of what each kernel call
returns.

An error names the rank, the step, the slots, the band and the token. The other ranks raise PeerFailed with the same
text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.errors import InputError, KernelError
from ringspan.kernels import Kernel, kernel_name
from ringspan.planner import Plan
from ringspan.plans import Task
from ringspan.plans.data import Phase


def check_inputs_finite(plan: Plan, phase: Phase, tensors: dict[str, Tensor | None]) -> None:
    """Raise InputError if an input of a pass has a NaN or an infinity. Tensors are rows first."""
    for name, x in tensors.items():
        row = None if x is None else _first_bad_row(x)
        if row is None or x is None:
            continue
        layout = plan.kv_layout if name in ("k", "v") else plan.q_layout
        token = int(layout.positions(plan.rank)[row])
        nans, count = int(torch.isnan(x).sum()), int((~torch.isfinite(x)).sum())
        raise InputError(
            f"rank {plan.rank}, {phase}: {name} has {nans} NaN and {count - nans} infinities, the first in row {row}, which is "
            f"token {token} (found by RINGSPAN_DEBUG=1). They come from an operation before this attention: "
            "torch.autograd.set_detect_anomaly(True) finds those of gradients"
        )


def check_results_finite(
    plan: Plan, phase: Phase, step: int, task: Task, kernel: Kernel, results: dict[str, tuple[int, Tensor]]
) -> None:
    """Raise KernelError if what a kernel has returned for a task has a NaN or an infinity.

    ``results`` has name -> (first row, tensor of rows first). The lse of a row that sees nothing is -inf.
    """
    for name, (start, x) in results.items():
        row = _first_bad_row(x.masked_fill(x == -torch.inf, 0.0) if name == "lse" else x)
        if row is None:
            continue
        row += start
        is_key = name in ("dk", "dv")
        bands = [b for b in task.bands if (b.k0 <= row < b.k1 if is_key else b.q0 <= row < b.q1)] or list(task.bands)
        band = bands[0]
        raise KernelError(
            f"rank {plan.rank}, step {step}, {phase}: {name} of kernel {kernel_name(kernel)} is not finite in row {row} of "
            f"{'key' if is_key else 'query'} slot {task.kv_slot if is_key else task.q_slot}. It computed query slot "
            f"{task.q_slot} with key slot {task.kv_slot}; the band of this row is queries {band.q0} to {band.q1}, keys "
            f"{band.k0} to {band.k1}, {band.lo} <= k - q <= {band.hi} (found by RINGSPAN_DEBUG=1)"
        )


def _first_bad_row(x: Tensor) -> int | None:
    if x.numel() == 0:
        return None
    bad = ~torch.isfinite(x).reshape(x.shape[0], -1).all(dim=1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None
