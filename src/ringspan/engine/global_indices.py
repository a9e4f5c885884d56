"""Where the rows of a task stand in the whole sequence, on the device: what lies between local rows and a user's function."""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.caching.by_stream import cache_by_stream, on_device
from ringspan.kernels import IndexedMods, Mods
from ringspan.planner import Plan
from ringspan.plans import Task
from ringspan.plans.data import Phase
from ringspan.plans.slot_tokens import SlotTokens


def placed(mods: Mods, plan: Plan, phase: Phase, step: int, task: Task, device: torch.device) -> IndexedMods:
    """The functions of a call, for the rows that a task of this step brings together."""
    queries, keys = plan.task_tokens(task, "q"), plan.task_tokens(task, "kv")
    return IndexedMods(
        mods=mods,
        q_tokens_S=_tokens(queries, plan.program.q_slots[task.q_slot].rows, device),
        k_tokens_T=_tokens(keys, plan.program.kv_slots[task.kv_slot].rows, device),
        first_head=queries.first_head,
    )


@cache_by_stream(1024)
def _tokens(tokens: SlotTokens, rows: int, device: torch.device) -> Tensor:
    return on_device(tokens.expand(rows), device)
