"""The data of the page's drawings: the mask, the bytes between ranks, and the timeline of each rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspan.cli.plan.mask_data import mask_data
from ringspan.cli.plan.study import Study
from ringspan.costs.timeline import Timeline
from ringspan.plans.data import PHASES

# The maximum number of ranks along a side of a drawing, and of steps of a rank and phase. More are merged with their
# neighbours.
MAX_RANKS = 64
MAX_STEPS = 200


def drawings(study: Study) -> dict[str, Any]:
    plan = study.plans[0]
    rows = slowest_of_groups(study)
    return {
        "mask": mask_data(study.question.mask, plan.q_layout, plan.kv_layout),
        "traffic": traffic(study),
        "timeline": {
            "rows": rows,
            "of_ranks": len(study.plans),
            "forward": _segments(study.cost.forward, rows),
            "backward": _segments(study.cost.backward, rows),
        },
    }


def slowest_of_groups(study: Study) -> list[int]:
    """Return the simulated ranks to draw: all, or from each group of neighbours the one that finishes last."""
    seconds = done(study)
    groups = np.array_split(np.arange(len(seconds)), min(MAX_RANKS, len(seconds)))
    return [int(group[np.argmax(seconds[group])]) for group in groups]


def done(study: Study) -> NDArray[np.float64]:
    """Return the time at which each simulated rank finishes forward and backward."""
    seconds: NDArray[np.float64] = study.cost.forward.end[:, -1] + study.cost.backward.end[:, -1]
    return seconds


def traffic(study: Study) -> dict[str, Any]:
    """Return the bytes of both phases. Senders are all ranks, in groups if there are many, or the simulated sample."""
    world = study.question.world
    to = _groups(world)
    senders = _groups(world) if study.cost.is_exact else [(plan.rank, plan.rank + 1) for plan in study.plans]
    group_of = np.repeat(np.arange(len(to)), [stop - start for start, stop in to]).tolist()
    row_of = {plan.rank: group_of[plan.rank] if study.cost.is_exact else n for n, plan in enumerate(study.plans)}
    total = np.zeros((len(senders), len(to)), dtype=np.int64)
    for plan in study.plans:
        for phase in PHASES:
            parts: dict[int, list[Any]] = {}
            for t in plan.transfers(phase, "sends"):
                if t.peer != plan.rank:
                    parts.setdefault(group_of[t.peer], []).append(t)
            for group, transfers in parts.items():
                total[row_of[plan.rank], group] += study.question.shape.total_bytes(transfers, phase, plan.program)
    return {"from": senders, "to": to, "bytes": total.tolist()}


def _groups(world: int) -> list[tuple[int, int]]:
    """Return groups of neighbouring ranks, at most MAX_RANKS of them."""
    cuts = np.linspace(0, world, min(MAX_RANKS, world) + 1).round().astype(int).tolist()
    return list(pairwise(cuts))


def _segments(line: Timeline, rows: list[int]) -> list[list[list[float]]]:
    """Return the steps of each row as (begin, computed, end). Many steps are merged to fewer that compute and then
    wait."""
    steps = line.begin.shape[1]
    cuts = np.linspace(0, steps, min(MAX_STEPS, steps) + 1).round().astype(int)
    begin = line.begin[rows][:, cuts[:-1]]
    computing: NDArray[np.float64] = np.add.reduceat((line.computed - line.begin)[rows], cuts[:-1], axis=1)
    end = line.end[rows][:, cuts[1:] - 1]
    found: list[list[list[float]]] = np.stack([begin, begin + computing, end], axis=2).tolist()
    return found
