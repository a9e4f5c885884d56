"""Where the rows of a task stand in the whole sequence, on the device: what lies between local rows and a user's function."""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.kernels import Mods, PlacedMods
from ringspan.per_stream import per_stream
from ringspan.plans import Plan, Task
from ringspan.plans.contents import Contents, held
from ringspan.plans.data import Phase


def placed(mods: Mods, plan: Plan, phase: Phase, step: int, task: Task, device: torch.device) -> PlacedMods:
    """The functions of a call, for the rows that a task of this step brings together."""
    contents = held(plan, phase)[step]
    queries, keys = contents["q", task.q_slot], contents["kv", task.kv_slot]
    return PlacedMods(
        mods=mods,
        q_tokens_S=_on_device(queries, device),
        k_tokens_T=_on_device(keys, device),
        first_head=queries.first_head,
    )


@per_stream(1024)
def _on_device(contents: Contents, device: torch.device) -> Tensor:
    # Used again in other calls: a tensor made in inference mode could never take part in a backward pass.
    with torch.inference_mode(False):
        return torch.tensor(contents.tokens, device=device)
