"""Measure the GPU memory that a rank needs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import ringspan as rs
from ringspan.engine import config_for
from ringspan.frontends.validate import check_scale
from ringspan.kernels import Saved


def held_bytes(attention: Callable[..., Tensor], *qkv: Tensor) -> int:
    """Return the peak of allocated memory in forward and backward, beyond inputs and results. Includes the kernels'
    scratch."""
    for x in qkv:
        x.grad = None
    dout = torch.ones_like(qkv[0])
    before = _start_of_peak()
    attention(*qkv).backward(dout)
    return torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())


def scratch_bytes(plan: rs.Plan, backend: str, *qkv: Tensor) -> int:
    """Return the peak of what the kernel allocates for its results and scratch in any task of the backward pass."""
    q, k, v = (x.detach() for x in qkv)
    config, most = config_for(plan, q, v, check_scale(None, q.shape[-1]), backend), 0
    for task in (task for step in plan.program.backward for task in step.tasks):
        rows = plan.program.kv_slots[task.kv_slot].rows
        keys, values = (x.new_zeros((*x.shape[:2], rows, x.shape[3])) for x in (k, v))
        saved = Saved(q, q, q, q.new_zeros(q.shape[:3], dtype=torch.float32))
        before = _start_of_peak()
        for _ in config.kernel.attend_backward(saved, keys, values, task.bands, scale=config.scale):
            pass
        most = max(most, torch.cuda.max_memory_allocated() - before)
    return most


def _start_of_peak() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
