"""The results of the demo: figures, text and tables, and a line of JSON."""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ringspan import __version__
from ringspan.cli.console import table
from ringspan.cli.demo.training import RankReport
from ringspan.cli.units import size

# Float32 over a few dozen steps: rounding gives differences of about 1e-6, a wrong mask, position or gradient 1e-3 and
# more.
TOLERANCE = 1e-4

RANK_COLUMNS = {
    "rank": "rank",
    "tokens": "tokens",
    "area": "pairs",
    "share": "share",
    "sent": "sent",
    "received": "received",
    "gather_received": "with gather",
}
WHAT_IS_DRAWN = {
    "losses.png": "the curves, and their differences",
    "mask.png": "which rank computes which pair, in the step with the most equal shares",
    "memory.png": "the memory of a rank as ranks are added",
    "plan.html": "a plan of the kind that most steps used: candidates, traffic, timeline (open it in a browser)",
}
SUMS = ("tokens", "area", "sent", "received", "gather_received")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """The losses of the runs. Steps are counted from 1. ``naive`` and ``memory`` may be missing.

    ``memory`` has the bytes of the fullest rank by the number of ranks.
    """

    alone: tuple[float, ...]
    ranks: tuple[RankReport, ...]
    naive: tuple[float, ...] = ()
    memory: Mapping[int, int] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def split(self) -> tuple[float, ...]:
        return self.ranks[0].losses

    @property
    def differences(self) -> tuple[float, ...]:
        """The largest difference of any rank's loss from that of one process, for each step."""
        return tuple(
            max((abs(loss - one) for loss in losses), key=_nan_is_worst)
            for one, *losses in zip(self.alone, *(rank.losses for rank in self.ranks), strict=True)
        )

    @property
    def largest(self) -> tuple[float, int]:
        """The largest difference and its step."""
        step, difference = max(enumerate(self.differences, start=1), key=lambda pair: _nan_is_worst(pair[1]))
        return difference, step

    @property
    def parted_at(self) -> int | None:
        """The first step whose difference exceeds the tolerance. A NaN always does."""
        return next((step for step, d in enumerate(self.differences, start=1) if not d <= TOLERANCE), None)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each rank's share of all pairs."""
        total = sum(rank.area for rank in self.ranks)
        return tuple(rank.area / total if total else 0.0 for rank in self.ranks)


def loss_table(comparison: LossComparison) -> Table:
    """Return both losses at some steps."""
    steps = len(comparison.alone)
    shown = sorted({1, *(max(1, steps * part // 4) for part in (1, 2, 3)), steps})
    columns = {"run": "loss at step", **{str(step): str(step) for step in shown}}
    runs = {f"ringspan, {processes(comparison.world)}": comparison.split, "plain PyTorch, 1 process": comparison.alone}
    if comparison.naive:
        runs["each rank sees only its own keys"] = comparison.naive
    return table(columns, [{"run": run, **{str(n): f"{losses[n - 1]:.6f}" for n in shown}} for run, losses in runs.items()])


def largest_difference(comparison: LossComparison) -> str:
    difference, step = comparison.largest
    return f"largest difference of the two curves: {difference:.1e}, at step {step} (allowed: {TOLERANCE:.0e})"


def naive_difference(comparison: LossComparison) -> str:
    """Return how far the losses of naive sharding are from those of one process, if it was run."""
    pairs = zip(comparison.naive, comparison.alone, strict=False)
    off = max((abs(naive - alone) for naive, alone in pairs), default=None)
    return (
        ""
        if off is None
        else f"with attention over each rank's own keys they differ by {off:.1e}: such a model trains, wrongly.\n"
        "It is another function, with fewer visible keys, so a lower loss is not a better one"
    )


def memory_table(comparison: LossComparison) -> Table:
    """Return the memory of the fullest rank by the number of ranks."""
    whole = comparison.memory.get(1, 0)
    rows = [
        {"ranks": str(world), "memory": size(held), "share": f"{held / max(1, whole):.0%}"}
        for world, held in sorted(comparison.memory.items())
    ]
    return table({"ranks": "ranks", "memory": "memory a rank", "share": "of one rank"}, rows)


def rank_table(comparison: LossComparison) -> Table:
    """Return the work and the bytes of each rank, and the bytes it would have received if all keys were sent to all
    ranks."""
    rows = [
        _row(str(n), share, **{name: getattr(rank, name) for name in SUMS})
        for n, (rank, share) in enumerate(zip(comparison.ranks, comparison.shares, strict=True))
    ]
    total = _row("all", 1.0, **{name: sum(getattr(rank, name) for rank in comparison.ranks) for name in SUMS})
    return table(RANK_COLUMNS, rows, total=total)


def traffic(comparison: LossComparison) -> str:
    """Return the bytes of the plans against those of gather, and the plans."""
    moved, gather = (sum(getattr(rank, name) for rank in comparison.ranks) for name in ("received", "gather_received"))
    choices = ", ".join(f"{choice} ({count}×)" for choice, count in Counter(comparison.ranks[0].choices).most_common())
    lines = [f"plans: {choices}"]
    if gather:
        lines = [
            f"gather (all keys to all ranks) would move {size(gather)}; these plans moved {moved / gather:.0%} of that",
            *lines,
        ]
    return "\n".join(lines)


def failure(comparison: LossComparison, broken: str | None) -> str:
    """Return the message for curves that differ."""
    step = comparison.parted_at
    assert step is not None
    split, alone, difference = (losses[step - 1] for losses in (comparison.split, comparison.alone, comparison.differences))
    text = (
        f"FAILED: the two curves differ at step {step}: {split:.6f} on {processes(comparison.world)}, {alone:.6f} on one, "
        f"a difference of {difference:.1e} where {TOLERANCE:.0e} is allowed."
    )
    if broken:
        return f"{text}\nThat is what --sabotage is for: {broken}. Without it the demo passes."
    return f"{text}\nThis is a bug. Please report it with this output and that of `ringspan check`."


def closing(comparison: LossComparison, drawn: Sequence[str], seconds: float) -> str:
    lines = [
        f"Done in {seconds:.0f} s: the sequence split over {processes(comparison.world)} gives the losses of the whole one.",
        "All processes share one CPU here, so this shows exactness, not speed. For speed each rank needs its own device.",
    ]
    if drawn:
        lines += ["", "Look at:", *(f"  {path:32}  {WHAT_IS_DRAWN[Path(path).name]}" for path in drawn)]
    return "\n".join(
        [
            *lines,
            "",
            "What to try next:",
            "  rs.LocalWorld(4).attention(q, k, v, mask=rs.causal(1000))           all ranks in one process",
            "  print(rs.plan(rs.causal(1_000_000), world=64, rank=17).explain())   the steps of rank 17 of 64",
            "  ringspan check                                                      random masks against float64 attention",
        ]
    )


def as_json(comparison: LossComparison, **more: object) -> str:
    difference, at = comparison.largest
    fields = {
        "ok": comparison.parted_at is None,
        "max_difference": difference,
        "max_difference_step": at,
        "parted_at_step": comparison.parted_at,
        "tolerance": TOLERANCE,
        "world": comparison.world,
        "losses": {"split": comparison.split, "alone": comparison.alone, "naive": comparison.naive},
        "memory": {str(world): held for world, held in comparison.memory.items()},
        "ranks": [
            {
                "rank": n,
                "share": share,
                **{k: v for k, v in asdict(rank).items() if k in ("tokens", "area", "sent", "received", "gather_received")},
            }
            for n, (rank, share) in enumerate(zip(comparison.ranks, comparison.shares, strict=True))
        ],
        "plans": comparison.ranks[0].choices,
        "digest": comparison.ranks[0].digest,
        "versions": {"ringspan": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    return json.dumps(_no_nan(fields | more))


def _no_nan(value: Any) -> Any:
    """Replace NaN and infinity by None: JSON has no value for them."""
    if isinstance(value, dict):
        return {key: _no_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_no_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nan_is_worst(x: float) -> tuple[bool, float]:
    return (x != x, x)


def processes(n: int) -> str:
    return f"{n} process{'es' * (n != 1)}"


def _row(rank: str, share: float, *, tokens: int, area: int, sent: int, received: int, gather_received: int) -> dict[str, str]:
    return {
        "rank": rank,
        "tokens": f"{tokens:,}",
        "area": f"{area:,}",
        "share": f"{share:.1%}",
        "sent": size(sent),
        "received": size(received),
        "gather_received": size(gather_received),
    }
