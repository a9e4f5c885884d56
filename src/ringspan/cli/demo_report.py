"""What the demo found, as numbers, as text for people and as a line of JSON for machines."""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ringspan import __version__
from ringspan.cli.demo_train import RankReport

# Float32 over a few dozen steps: rounding puts the curves some 1e-6 apart; a wrong mask, position or gradient 1e-3 and more.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Both runs. Steps are counted from 1."""

    alone: tuple[float, ...]
    ranks: tuple[RankReport, ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def split(self) -> tuple[float, ...]:
        return self.ranks[0].losses

    @property
    def differences(self) -> tuple[float, ...]:
        """How far the loss of any rank is from that of one process, step by step."""
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
        """The first step whose difference is not within the tolerance; a loss that is not a number never is."""
        return next((step for step, d in enumerate(self.differences, start=1) if not d <= TOLERANCE), None)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each rank's part of all pairs."""
        total = sum(rank.area for rank in self.ranks)
        return tuple(rank.area / total if total else 0.0 for rank in self.ranks)


def loss_table(outcome: Outcome) -> str:
    steps = len(outcome.alone)
    shown = sorted({1, *(max(1, steps * part // 4) for part in (1, 2, 3)), steps})
    rows = [
        ("loss at step", [str(step) for step in shown]),
        (f"ringspan, {processes(outcome.world)}", [f"{outcome.split[step - 1]:.6f}" for step in shown]),
        ("plain PyTorch, 1 process", [f"{outcome.alone[step - 1]:.6f}" for step in shown]),
    ]
    difference, at = outcome.largest
    lines = [f"  {name:<26}" + "".join(f"{cell:>11}" for cell in cells) for name, cells in rows]
    lines.append(f"  largest difference of the two curves: {difference:.1e}, at step {at} (allowed: {TOLERANCE:.0e})")
    return "\n".join(lines)


def rank_table(outcome: Outcome) -> str:
    """What each rank computed, sent and received; and what it would have received, had every rank been sent all keys."""
    header = f"  {'rank':>4}{'tokens':>10}{'pairs':>14}{'share':>8}{'sent':>12}{'received':>12}{'with gather':>14}"
    lines = [header, "  " + "-" * (len(header) - 2)]
    for n, (rank, share) in enumerate(zip(outcome.ranks, outcome.shares, strict=True)):
        lines.append(_row(str(n), rank.tokens, rank.area, share, rank.sent, rank.received, rank.gather_received))
    totals = [sum(getattr(rank, field) for rank in outcome.ranks) for field in ("sent", "received", "gather_received")]
    lines.append(_row("all", sum(r.tokens for r in outcome.ranks), sum(r.area for r in outcome.ranks), 1.0, *totals))
    moved, gather = totals[1], totals[2]
    if gather:
        lines.append(
            f"  gather (all keys to all ranks) would have moved {_bytes(gather)}; this moved {moved / gather:.0%} of that"
        )
    choices = ", ".join(f"{choice} ({count}×)" for choice, count in Counter(outcome.ranks[0].choices).most_common())
    lines.append(f"  plans: {choices}")
    return "\n".join(lines)


def parting(outcome: Outcome, broken: str | None) -> str:
    """The bad news."""
    step = outcome.parted_at
    assert step is not None
    split, alone, difference = (losses[step - 1] for losses in (outcome.split, outcome.alone, outcome.differences))
    told = (
        f"FAILED: the two curves part at step {step}: {split:.6f} on {processes(outcome.world)}, {alone:.6f} on one, "
        f"a difference of {difference:.1e} where {TOLERANCE:.0e} is allowed."
    )
    if broken:
        return f"{told}\nThat is what --sabotage is for: {broken}. Without it the demo should pass."
    return f"{told}\nThat must not happen. `ringspan check` may tell where it comes from; please report it with this output."


def closing(outcome: Outcome, drawn: Sequence[str], seconds: float) -> str:
    lines = [
        f"That took {seconds:.0f} s. A sequence split over {processes(outcome.world)} trained to the losses of a whole one.",
        "The processes share one CPU here, so this shows that the split is exact; to see it be fast, give each its own device.",
    ]
    if drawn:
        lines += ["", "The pictures:", *(f"  {path}" for path in drawn)]
    return "\n".join(
        [
            *lines,
            "",
            "What to try next:",
            "  rs.LocalWorld(4).attention(q, k, v, mask=rs.causal(1000))           all ranks inside your own process",
            "  print(rs.plan(rs.causal(1_000_000), world=64, rank=17).explain())   what rank 17 of 64 would do, step by step",
            "  ringspan check                                                      random masks against float64 attention",
        ]
    )


def as_json(outcome: Outcome, **more: object) -> str:
    difference, at = outcome.largest
    fields = {
        "ok": outcome.parted_at is None,
        "max_difference": difference,
        "max_difference_step": at,
        "parted_at_step": outcome.parted_at,
        "tolerance": TOLERANCE,
        "world": outcome.world,
        "losses": {"split": outcome.split, "alone": outcome.alone},
        "ranks": [
            {
                "rank": n,
                "share": share,
                **{k: v for k, v in asdict(rank).items() if k in ("tokens", "area", "sent", "received", "gather_received")},
            }
            for n, (rank, share) in enumerate(zip(outcome.ranks, outcome.shares, strict=True))
        ],
        "plans": outcome.ranks[0].choices,
        "digest": outcome.ranks[0].digest,
        "versions": {"ringspan": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    return json.dumps(_no_nan(fields | more))


def _no_nan(value: Any) -> Any:
    """JSON has no word for NaN and infinity: null."""
    if isinstance(value, dict):
        return {key: _no_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_no_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nan_is_worst(x: float) -> tuple[bool, float]:
    return (x != x, x)


def processes(n: int) -> str:
    return f"{n} process{'es' * (n != 1)}"


def _row(name: str, tokens: int, area: int, share: float, sent: int, received: int, gather: int) -> str:
    cells = f"{tokens:>10,}{area:>14,}{share:>8.1%}{_bytes(sent):>12}{_bytes(received):>12}{_bytes(gather):>14}"
    return f"  {name:>4}{cells}"


def _bytes(n: int) -> str:
    return f"{n / 1e6:,.1f} MB" if n >= 1e6 else f"{n / 1e3:,.1f} kB"
