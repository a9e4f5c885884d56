"""The mask and the timeline of a study as one picture. Imports matplotlib when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ringspan as rs
from ringspan.cli.pictures import DPI, GRID, INK, PAPER, cells, rank_colours, why_not
from ringspan.cli.plan.drawings import done, slowest_of_groups
from ringspan.cli.plan.picture import picture
from ringspan.cli.plan.study import Study
from ringspan.cli.units import seconds, time_unit
from ringspan.errors import InputError

# With more steps than this, the edges of the bars would hide the bars.
MAX_STEPS_WITH_EDGES = 60
# Not colours of ranks, which the mask beside the timeline has.
FORWARD, BACKWARD, EXPOSED, IDLE = "#444444", "#8C8C8C", "#FF9900", "#E3E6EC"
# The legend names as many ranks at most, evenly spaced.
MAX_NAMED_RANKS = 8
# The timeline names as many rows at most, evenly spaced, and the one of the slowest rank.
MAX_NAMED_ROWS = 16
# A mask of which a query sees a smaller share of the keys is drawn as a line.
NARROW = 1 / 50


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
    colours = rank_colours(plan.world)
    image = cells(drawn.seen(), drawn.q_owner, drawn.k_owner, colours)
    axes.imshow(image, extent=(0, k_len, q_len, 0), aspect="auto", interpolation="nearest")
    axes.set_title("Which rank computes which pair (pale: the key comes from another rank)", color=INK, fontsize=10)
    axes.set_xlabel("key", color=INK)
    axes.set_ylabel("query, in the colour of the rank that owns it", color=INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="x", labelrotation=20)
    named = _evenly_spaced(plan.world, MAX_NAMED_RANKS)
    _legend(axes, {f"rank {rank}": colours[rank].tolist() for rank in named} | {"hidden by the mask": PAPER})
    if part := magnified(study.question.mask, drawn.seen()):
        start, stop = part
        drawn = picture(study.question.mask, plan.q_layout, plan.kv_layout, part=part)
        inset = axes.inset_axes((0.56, 0.53, 0.41, 0.41), xticks=[], yticks=[])
        inset.imshow(
            cells(drawn.seen(), drawn.q_owner, drawn.k_owner, colours),
            extent=(start, stop, stop, start),
            aspect="auto",
            interpolation="nearest",
        )
        inset.set_title(f"tokens {start:,} to {stop - 1:,}", color=INK, fontsize=9)


def magnified(mask: rs.Mask, seen: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Return the tokens to draw once more, closer, if the mask is a diagonal so narrow that it is drawn as a line and
    the corner on the upper right is empty."""
    q_len, k_len = mask.lengths
    keys = mask.area // max(1, q_len)  # of a query, on average
    half = len(seen) // 2
    is_line = q_len == k_len and keys <= NARROW * k_len and seen.diagonal().all()
    if not is_line or seen[:half, half:].any():
        return None
    size = min(q_len, max(16, 8 * keys))
    start = (q_len - size) // 2
    return start, start + size


def _timeline(axes: Any, study: Study) -> None:
    rows = slowest_of_groups(study)
    unit, size = time_unit(study.cost.seconds)
    start = 0.0
    edge = PAPER if study.cost.backward.begin.shape[1] <= MAX_STEPS_WITH_EDGES else "none"
    for line, colour in ((study.cost.forward, FORWARD), (study.cost.backward, BACKWARD)):
        # The background of a pass: what stays of it is the time in which a rank waits for the slowest one.
        axes.barh(range(len(rows)), line.seconds / size, left=start / size, height=0.84, color=IDLE, linewidth=0)
        for begin, end, shade in ((line.begin, line.computed, colour), (line.computed, line.end, EXPOSED)):
            for place, row in enumerate(rows):
                bars = np.stack([start + begin[row], (end - begin)[row]], axis=1) / size
                axes.broken_barh(
                    bars[bars[:, 1] > 0],
                    (place - 0.42, 0.84),
                    facecolors=shade,
                    edgecolors=edge,
                    linewidth=0.4,
                )
        start += line.seconds
    slowest = rows.index(int(done(study).argmax()))
    apart = len(rows) / MAX_NAMED_ROWS
    named = {n: "" for n in _evenly_spaced(len(rows), MAX_NAMED_ROWS) if abs(n - slowest) >= apart} | {slowest: "slowest: "}
    axes.set_yticks([*named], [f"{words}rank {study.plans[rows[n]].rank}" for n, words in named.items()])
    axes.set_xlim(0, start / size or None)
    axes.invert_yaxis()
    axes.set_xlabel(unit, color=INK)
    some = f"{len(rows)} of {len(study.plans)} ranks, each the slowest among its neighbours"
    axes.set_title(f"Timeline of {'the ranks' if len(rows) == len(study.plans) else some}", color=INK, fontsize=10)
    words = ("computing, forward", "computing, backward", "exposed: messages and copies", "waits for the slowest rank")
    _legend(axes, dict(zip(words, (FORWARD, BACKWARD, EXPOSED, IDLE), strict=True)))


def _legend(axes: Any, colours: Mapping[str, Any]) -> None:
    """Name colours below the axes."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, edgecolor=GRID, linewidth=0.5, label=words) for words, colour in colours.items()]
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        ncols=min(5, len(handles)),
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.2,
    )


def _evenly_spaced(count: int, limit: int) -> list[int]:
    """Return at most ``limit`` of the numbers below ``count``, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int)).tolist()
