"""The mask and the timeline of a study as one picture. Imports matplotlib when it is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ringspan.cli.pictures import COLOURS, DPI, GRID, INK, PAPER, cells, rank_colours, why_not
from ringspan.cli.plan.drawings import slowest_of_groups
from ringspan.cli.plan.picture import picture
from ringspan.cli.plan.study import Study
from ringspan.cli.units import seconds
from ringspan.errors import InputError

# With more steps than this, the edges of the bars would hide the bars.
MAX_STEPS_WITH_EDGES = 60
FORWARD, BACKWARD, EXPOSED = COLOURS[0], COLOURS[2], COLOURS[1]


def check_drawable(path: Path) -> None:
    """Raise before the study begins if there can be no picture."""
    if reason := why_not():
        raise InputError(f"cannot draw {path}: {reason}. --html draws without it")


def draw(path: Path, study: Study) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7.2), facecolor=PAPER, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _mask(left, study)
    _timeline(right, study)
    for axes in (left, right):
        axes.tick_params(colors=INK)
        for spine in axes.spines.values():
            spine.set(color=GRID)
    best, sampled = study.best, "" if study.cost.is_exact else f" (sampled: {len(study.plans)} ranks)"
    figure.suptitle(
        f"{best.strategy} on {best.layout.name}, {study.question.world:,} ranks of {study.question.machine.name}: "
        f"{seconds(study.cost.seconds)}{sampled}",
        color=INK,
    )
    figure.savefig(path, dpi=DPI, format="png")


def _mask(axes: Any, study: Study) -> None:
    plan = study.plans[0]
    drawn = picture(study.question.mask, plan.q_layout, plan.kv_layout)
    q_len, k_len = study.question.mask.lengths
    image = cells(drawn.seen(), drawn.q_owner, drawn.k_owner, rank_colours(plan.world))
    axes.imshow(image, extent=(0, k_len, q_len, 0), aspect="auto", interpolation="nearest")
    axes.set_title("Which rank computes which pair (pale: the key comes from another rank)", color=INK, fontsize=10)
    axes.set_xlabel("key", color=INK)
    axes.set_ylabel("query, in the colour of the rank that owns it", color=INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="x", labelrotation=20)


def _timeline(axes: Any, study: Study) -> None:
    rows = slowest_of_groups(study)
    start = 0.0
    edge = PAPER if study.cost.backward.begin.shape[1] <= MAX_STEPS_WITH_EDGES else "none"
    for name, line, colour in (("forward", study.cost.forward, FORWARD), ("backward", study.cost.backward, BACKWARD)):
        for begin, end, shade, words in (
            (line.begin, line.computed, colour, f"computing, {name}"),
            (line.computed, line.end, EXPOSED, "exposed"),
        ):
            for place, row in enumerate(rows):
                bars = np.stack([start + begin[row], (end - begin)[row]], axis=1)
                axes.broken_barh(
                    bars[bars[:, 1] > 0],
                    (place - 0.42, 0.84),
                    facecolors=shade,
                    edgecolors=edge,
                    linewidth=0.4,
                    label=words if place == 0 and not (name == "backward" and shade == EXPOSED) else None,
                )
        start += line.seconds
    few = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), 16)).round().astype(int)).tolist()
    axes.set_yticks(few, [f"rank {study.plans[rows[n]].rank}" for n in few])
    axes.invert_yaxis()
    axes.set_xlabel("seconds", color=INK)
    axes.set_title("Timeline of the ranks", color=INK, fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False, fontsize=9)
