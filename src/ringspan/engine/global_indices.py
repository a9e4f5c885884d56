"""The global token indices of the rows of a task, on the device: the user's functions are called with these."""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.caching.by_stream import cache_by_stream, copy_to_device
from ringspan.kernels import IndexedMods, Mods
from ringspan.planner import Plan
from ringspan.plans import Task
from ringspan.plans.slot_tokens import SlotTokens


def indexed_mods(mods: Mods, plan: Plan, task: Task, device: torch.device) -> IndexedMods:
    """Return the functions of a call with the global indices of the task's queries and keys."""
    queries, keys = plan.task_tokens(task, "q"), plan.task_tokens(task, "kv")
    return IndexedMods(
        mods=mods,
        q_tokens_S=_tokens(queries, plan.program.q_slots[task.q_slot].rows, device),
        k_tokens_T=_tokens(keys, plan.program.kv_slots[task.kv_slot].rows, device),
        first_head=queries.first_head,
    )


@cache_by_stream(1024)
def _tokens(tokens: SlotTokens, rows: int, device: torch.device) -> Tensor:
    return copy_to_device(tokens.expand(rows), device)
