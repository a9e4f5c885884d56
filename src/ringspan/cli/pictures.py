"""The demo's pictures: a mask coloured by the rank that computes it, loss curves, memory. Imports matplotlib when
needed."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspan.layouts import Layout, areas
from ringspan.planner import Plan

# Distinct for colour-blind readers and in print (Paul Tol's bright scheme). More ranks take colours of the colour
# wheel.
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")
INK, PAPER, GRID = "#222222", "#FFFFFF", "#BBBBBB"
# How much lighter the colour of a pair is if its key comes from another rank.
PALE = 0.62
# The maximum number of tokens along a side. Of a longer sequence every n-th token is drawn.
MAX_CELLS_PER_SIDE = 3000
DPI = 150
# The middle of the mask's axes: title and legend are centred on it.
MIDDLE = 0.545


def why_not() -> str | None:
    """Return why there can be no pictures, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "matplotlib is not installed; install it with: pip install 'ringspan[demo]'"
    return None


def draw_mask(path: Path, plan: Plan, names: Sequence[str], lengths: Sequence[int], caption: str = "") -> None:
    """Draw every visible pair in the colour of the rank that owns the query; pale if the key comes from another
    rank. ``caption`` is written below the picture."""
    from matplotlib.figure import Figure

    colours = rank_colours(plan.world)
    n = plan.mask.lengths[0]
    thin = slice(None, None, -(-n // MAX_CELLS_PER_SIDE))
    q_owner, k_owner = owners(plan.q_layout)[thin], owners(plan.kv_layout)[thin]
    figure = Figure(figsize=(9.0, 10.0), facecolor=PAPER)
    main = figure.add_axes((0.13, 0.16, 0.83, 0.83 * 9.0 / 10.0))
    left = figure.add_axes((0.106, 0.16, 0.018, 0.83 * 9.0 / 10.0))
    top = figure.add_axes((0.13, 0.914, 0.83, 0.016))
    picture = cells(plan.mask.dense()[thin, thin], q_owner, k_owner, colours)
    main.imshow(picture, extent=(0, n, n, 0), interpolation="antialiased")
    left.imshow(colours[q_owner][:, None], extent=(0, 1, n, 0), aspect="auto", interpolation="nearest")
    top.imshow(colours[k_owner][None, :], extent=(0, n, 1, 0), aspect="auto", interpolation="nearest")
    _name_documents(main, names, lengths)
    for strip in (left, top):
        strip.set(xticks=[], yticks=[])
    left.set_ylabel("query (the strip: the rank that owns it)", color=INK)
    left.set_yticks(_ticks(n))
    left.tick_params(axis="y", colors=INK, length=3)
    main.set_xlabel("key (the strip at the top: the rank that owns it)", color=INK)
    main.set(xticks=_ticks(n), yticks=[])
    for axes in (main, left, top):
        for spine in axes.spines.values():
            spine.set(color=GRID)
    _mask_legend(figure, plan, colours)
    title = f"Which rank computes which pair: {n:,} tokens over {plan.world} rank{'s' * (plan.world != 1)}"
    figure.text(MIDDLE, 0.965, title, ha="center", color=INK, fontsize=13)
    strategy = plan.strategy.partition("(")[0]
    chosen = f"{len(lengths)} packed documents  ·  {strategy} on {plan.q_layout.name}  ·  plan {plan.digest[:8]}"
    figure.text(MIDDLE, 0.942, chosen, ha="center", color=INK, fontsize=9)
    figure.text(MIDDLE, 0.03, caption, ha="center", va="top", color=INK, fontsize=9)
    figure.savefig(path, dpi=DPI)


def draw_losses(
    path: Path,
    split: Sequence[float],
    alone: Sequence[float],
    naive: Sequence[float] = (),
    *,
    world: int,
    tolerance: float,
) -> None:
    """Draw the curves, and below them their differences from one process on a log scale, with the tolerance."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = np.arange(1, len(split) + 1)
    figure = Figure(figsize=(8.8, 7.6), facecolor=PAPER, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1))
    above.plot(
        steps, alone, color=COLOURS[3], linewidth=6, alpha=0.75, solid_capstyle="round", label="1 process, plain PyTorch"
    )
    ranks = f"{world} process{'es' * (world != 1)}"
    above.plot(steps, split, color=COLOURS[0], linewidth=1.6, marker="o", markersize=3.5, label=f"{ranks}, ringspan")
    differences = np.abs(np.asarray(split) - np.asarray(alone))
    off = np.abs(np.asarray(naive) - np.asarray(alone)) if len(naive) else np.zeros(0)
    if len(naive):
        words = f"{ranks}, each attends to its own keys only"
        above.plot(steps, naive, color=COLOURS[5], linewidth=1.6, linestyle="--", marker="s", markersize=3, label=words)
    above.set_ylabel("loss (nats per byte)", color=INK)
    above.legend(frameon=False)
    above.set_title(f"The same training, with the sequence split {world} ways and whole", color=INK)
    _difference(below, steps, differences, tolerance, off)
    if factor := _least_factor(off, differences):
        words = f"Own keys only: at least {factor:,} times as far from the right loss as ringspan.\n"
        words += "Its loss is that of another function, with fewer visible keys: a lower one is not better."
        below.set_title(words, color=INK, fontsize=10)
    below.set(xlabel="step", xlim=(0.5, len(steps) + 0.5))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(color=GRID, alpha=0.4, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DPI)


def draw_memory(path: Path, memory: Mapping[int, int]) -> None:
    """Draw the memory of the fullest rank by the number of ranks, and the ideal: that of one rank ÷ ranks."""
    from matplotlib.figure import Figure

    worlds = sorted(memory)
    held = [memory[n] / 2**20 for n in worlds]
    figure = Figure(figsize=(7.4, 4.6), facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    bars = axes.bar(range(len(worlds)), held, width=0.6, color=COLOURS[0])
    axes.plot(range(len(worlds)), [held[0] / n * worlds[0] for n in worlds], "o--", color=COLOURS[3], label="one rank ÷ ranks")
    for bar, mebibytes in zip(bars, held, strict=True):
        text = f"{mebibytes:.1f} MiB" if mebibytes < 100 else f"{mebibytes:.0f} MiB"
        axes.text(bar.get_x() + 0.3, 0.02 * max(held), text, ha="center", va="bottom", color="white", fontsize=9)
    axes.set_xticks(range(len(worlds)), [str(n) for n in worlds])
    axes.set(xlabel="ranks that share the sequence", ylabel="MiB on the fullest rank", ylim=(0, max(held) * 1.12))
    axes.set_title("Memory of a rank for one step: activations and buffers of attention", color=INK, fontsize=11)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DPI)


def cells(
    seen: NDArray[np.bool_], q_owner: NDArray[np.int64], k_owner: NDArray[np.int64], colours: NDArray[Any]
) -> NDArray[Any]:
    """Return the mask as (queries, keys, RGB): white where a key is hidden."""
    full = colours[q_owner][:, None]
    own = (q_owner[:, None] == k_owner[None, :])[..., None]
    picture = np.where(own, full, pale(full))
    return np.where(seen[..., None], picture, np.float32(1.0))


def owners(layout: Layout) -> NDArray[np.int64]:
    """Return the rank that owns each token."""
    owner = np.empty(layout.length, dtype=np.int64)
    for rank in range(layout.world):
        owner[layout.positions(rank)] = rank
    return owner


def rank_colours(world: int) -> NDArray[np.float32]:
    """Return the colour of each rank: (world, RGB)."""
    if world <= len(COLOURS):
        rows = [tuple(int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)) for c in COLOURS[:world]]
    else:
        rows = [colorsys.hls_to_rgb(rank / world, 0.42 + 0.16 * (rank % 2), 0.6) for rank in range(world)]
    return np.array(rows, dtype=np.float32)


def pale(colour: NDArray[Any]) -> NDArray[Any]:
    return colour + (1 - colour) * np.float32(PALE)


def _difference(axes: Any, steps: NDArray[Any], difference: NDArray[Any], tolerance: float, naive: NDArray[Any]) -> None:
    """Draw the differences. Steps that agree to the last bit are hollow points at the lower edge: a log scale has no
    zero."""
    floor = 1e-8
    same = difference == 0
    if len(naive):
        axes.fill_between(steps, tolerance, np.maximum(naive, tolerance), color=COLOURS[5], alpha=0.12, linewidth=0)
        axes.plot(steps, naive, "s--", color=COLOURS[5], markersize=3.5, linewidth=1.4, label="own keys only")
    axes.vlines(steps[~same], floor, difference[~same], color=COLOURS[0], linewidth=1, alpha=0.5)
    axes.plot(steps[~same], difference[~same], "o", color=COLOURS[0], markersize=4, label="ringspan: rounding")
    hollow = {"color": COLOURS[0], "fillstyle": "none", "markersize": 4}
    axes.plot(steps[same], np.full(same.sum(), floor), "o", **hollow, label="ringspan: equal to the last bit")
    axes.axhline(tolerance, color=INK, linewidth=1, linestyle="--")
    axes.text(steps[-1] + 0.4, tolerance, f"allowed: {tolerance:.0e}", ha="right", va="bottom", color=INK, fontsize=9)
    axes.set_yscale("log")
    largest = max(float(np.nanmax(values, initial=0.0)) for values in (difference, naive))
    axes.set_ylim(floor / 2, max(tolerance * 30, largest * 100))
    axes.set_ylabel("loss, difference from 1 process", color=INK)
    axes.legend(frameon=False, loc="upper left", ncols=3, fontsize=9)


def _least_factor(off: NDArray[Any], differences: NDArray[Any]) -> int:
    """Return how many times farther the nearest step of ``off`` is than the farthest of ``differences``, rounded down to
    one digit; 0 if it is less than ten times, or a value is not finite.

    >>> _least_factor(np.array([0.07, 0.0066]), np.array([0.0, 4.8e-7]))
    10000
    """
    if not len(off) or not np.isfinite([*off, *differences]).all():
        return 0
    rounding = max(float(differences.max(initial=0.0)), float(np.finfo(np.float32).eps))
    factor = int(off.min() / rounding)
    digit = 10 ** (len(str(factor)) - 1)
    return factor // digit * digit if factor >= 10 else 0


def _name_documents(axes: Any, names: Sequence[str], lengths: Sequence[int]) -> None:
    """Write each document's name beside its triangle: on the right, the left, or above the diagonal of a long one."""
    n, stop = sum(lengths), 0
    for name, length in zip(names, lengths, strict=True):
        start, stop = stop, stop + length
        axes.plot([start, start, stop, stop, start], [start, stop, stop, start, start], color=GRID, linewidth=0.8)
        if length < 0.022 * n:
            continue
        gap, middle = 0.012 * n, (start + stop) / 2
        if stop < 0.6 * n:
            x, y, side = stop + gap, middle, "left"
        elif start > 0.4 * n:
            x, y, side = start - gap, middle, "right"
        else:
            x, y, side = stop - gap, start + 0.03 * n, "right"
        words = f"{name}, {length:,} tokens"
        axes.text(x, y, words, ha=side, va="center", fontsize=8, color=INK, family="monospace")


def _mask_legend(figure: Any, plan: Plan, colours: NDArray[Any]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    area = areas(plan.mask, plan.q_layout)
    share = area / max(1, int(area.sum()))
    handles: list[Any] = []
    labels: list[str] = []
    for rank in range(min(plan.world, 12)):
        handles.append(tuple(Patch(facecolor=c.tolist()) for c in (colours[rank], pale(colours[rank]))))
        labels.append(f"rank {rank}: {share[rank]:.1%}")
    figure.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        loc="lower center",
        bbox_to_anchor=(MIDDLE, 0.05),
        ncols=min(6, plan.world),
        frameon=False,
        fontsize=9,
        handlelength=2.0,
        columnspacing=0.9,
    )
    note = "share of all pairs  ·  full colour: the rank owns the key  ·  pale: another rank sends it"
    figure.text(MIDDLE, 0.038, note, ha="center", fontsize=9, color=INK)


def _ticks(n: int) -> list[int]:
    """Return a few round numbers, and the end."""
    step = max(1, n // 6)
    step = int(round(step, -len(str(step)) + 1)) or 1
    return [*(t for t in range(0, n, step) if n - t > step // 2), n]
