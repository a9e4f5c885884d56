"""``ringspan demo``: train a small language model with its sequence split over processes, and the same model in one
process."""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

import ringspan as rs
from ringspan.cli import pictures, units
from ringspan.cli.argument_types import at_least
from ringspan.cli.console import show, show_error
from ringspan.cli.demo import hf_model, report
from ringspan.cli.demo.config import ModelConfig
from ringspan.cli.demo.data import library_documents, packs
from ringspan.cli.demo.memory import measure_memory
from ringspan.cli.demo.model import build
from ringspan.cli.demo.training import SHIFT, Training, train_alone, train_naively, train_split
from ringspan.cli.plan.facts import facts
from ringspan.cli.plan.page import page
from ringspan.cli.plan.study import Question, study
from ringspan.cli.progress import Progress
from ringspan.costs import named_hardware
from ringspan.errors import InputError
from ringspan.layouts import balance
from ringspan.planner import plan
from ringspan.planner.auto import ASSUMED
from ringspan.testing.workers import Pool

EPILOG = """\
The processes communicate over gloo. The text is the standard library of your Python. Every step packs new
documents, so every step has a new mask and a new plan. It takes less than a minute on two cores.
"""

# The largest share of a rank ÷ the mean, up to which shares are called equal.
EVEN = 1.1
FEW_TOKENS = "for so few tokens messages and launches of kernels cost more than pairs"

BROKEN = {
    "positions": f"the last rank shifted the positions of its tokens by {SHIFT}",
    "gradient": "the last rank halved its part of the gradient",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=at_least(1), default=24, metavar="N", help="training steps (default: %(default)s)")
    add(
        "--seq-len",
        type=at_least(8),
        default=1531,  # a prime: no number of ranks divides it, and none has to
        metavar="N",
        help="tokens in the sequence; it need not be a multiple of anything (default: %(default)s)",
    )
    add(
        "--world",
        type=at_least(1),
        default=4,
        metavar="N",
        help="processes that share the sequence (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights and the text (default: %(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("ringspan-demo"),
        metavar="FOLDER",
        help="where to write the pictures; created if needed (default: %(default)s)",
    )
    add("--no-pictures", action="store_true", help="print the figures only")
    add("--hf", action="store_true", help="train a small Llama of transformers instead of the demo's own model")
    add("--json", action="store_true", help="print all figures as one last line of JSON")
    add(
        "--sabotage",
        nargs="?",
        choices=sorted(BROKEN),
        const="positions",
        help="break one rank on purpose to see the demo fail: its positions (the default) or its gradient",
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if args.sabotage and args.world == 1:
        raise InputError("--sabotage needs a second rank to compare with: give --world 2 or more")
    if not args.no_pictures and pictures.why_not() is None:
        _make_folder(args.out)
    missing = hf_model.why_not() if args.hf else None
    if missing:
        raise InputError(missing)
    config = ModelConfig(hugging_face=args.hf)
    training = Training(
        config=config,
        packs=packs(library_documents(), count=args.steps, length=args.seq_len, seed=args.seed),
        seed=args.seed,
        sabotage=args.sabotage,
    )
    show(_opening(training, args.world))
    no_pictures = "--no-pictures was given" if args.no_pictures else pictures.why_not()
    if no_pictures and not args.no_pictures:
        show(f"\nNo pictures: {no_pictures}.")
    comparison = train_all(training, args.world)
    show("", report.loss_table(comparison), report.largest_difference(comparison))
    show(report.naive_difference(comparison))
    show("\nMemory of the fullest rank for one step (activations, buffers of attention)\n", report.memory_table(comparison))
    show("\nWork of each rank in all steps together (pairs: of each head of each layer)\n", report.rank_table(comparison))
    show(report.traffic(comparison))
    show(why_uneven(training, args.world))
    drawn = [] if no_pictures else [str(path) for path in draw(args.out, training, comparison)]
    seconds = time.monotonic() - started
    if comparison.parted_at is None:
        show(f"\n{report.closing(comparison, drawn, seconds)}")
    else:
        show_error(f"\n{report.failure(comparison, BROKEN.get(args.sabotage))}")
    if args.json:
        options = {"steps": args.steps, "seq_len": args.seq_len, "seed": args.seed, "sabotage": args.sabotage}
        print(report.as_json(comparison, **options, seconds=round(seconds, 2), pictures=drawn))
    return 0 if comparison.parted_at is None else 1


def train_all(training: Training, world: int) -> report.LossComparison:
    """Run the three trainings: the two split ones in a pool of processes and, meanwhile, the other in a thread."""
    stop = threading.Event()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each worker; more threads would compete for the same cores
    try:
        with Progress(3 * len(training.packs)) as bar, ThreadPoolExecutor(1) as beside:
            show = _bar_updater(bar, len(training.packs), world)

            def on_step(n: int, loss: float) -> bool:
                show("alone", n, loss)
                return not stop.is_set()

            alone = beside.submit(train_alone, training, on_step)
            try:
                with Pool(world, preload="ringspan.cli.demo.memory") as pool:
                    ranks = pool.run(train_split, training, on_message=lambda _, message: show("split", *message))
                    naive = pool.run(train_naively, training, on_message=lambda _, message: show("naive", *message))
                    memory = pool.run(measure_memory, training)
                return report.LossComparison(
                    alone=alone.result(),
                    ranks=tuple(ranks),
                    naive=naive[0],
                    memory={n: max(of_rank.get(n, 0) for of_rank in memory) for n in memory[0]},
                )
            finally:
                stop.set()
    finally:
        torch.set_num_threads(threads)


def draw(folder: Path, training: Training, comparison: report.LossComparison) -> list[Path]:
    """Draw the curves, the memory, the mask of the step with the most equal shares, and the report of a plan that most
    steps have used."""
    losses, mask, memory, html = (folder / name for name in ("losses.png", "mask.png", "memory.png", "plan.html"))
    pictures.draw_losses(
        losses,
        comparison.split,
        comparison.alone,
        comparison.naive,
        world=comparison.world,
        tolerance=report.TOLERANCE,
    )
    plans = plans_of(training, comparison.world)
    best = min(plans, key=lambda made: made.balance)
    pack = training.packs[best.step]
    pictures.draw_mask(mask, best.plan, pack.names, pack.lengths, caption(plans))
    pictures.draw_memory(memory, comparison.memory)
    usual = training.packs[most_used(comparison.ranks[0].choices)]
    html.write_text(report_page(training, usual.lengths, comparison.world), encoding="utf-8")
    return [losses, mask, memory, html]


class PlanOfStep(NamedTuple):
    step: int
    plan: rs.Plan
    balance: float
    """the pairs of the fullest rank ÷ the mean"""

    @property
    def largest_share(self) -> float:
        return self.balance / self.plan.world


def plans_of(training: Training, world: int) -> list[PlanOfStep]:
    """Return the plan of each step, as rank 0 has made it."""
    made = []
    for step, pack in enumerate(training.packs):
        used = plan(rs.documents(pack.lengths), world=world)
        made.append(PlanOfStep(step, used, balance(used.mask, used.q_layout)))
    return made


def caption(plans: Sequence[PlanOfStep]) -> str:
    """Return which step is drawn, and how unequal the shares of others are."""
    best, worst = (choose(plans, key=lambda made: made.balance) for choose in (min, max))
    words = f"step {best.step + 1} of {len(plans)}, the one with the most equal shares"
    if worst.balance <= EVEN:
        return words
    if worst.step != best.step:
        words += f"; in step {worst.step + 1} one rank has {worst.largest_share:.0%}"
    return f"{words}:\n{FEW_TOKENS}"


def why_uneven(training: Training, world: int) -> str:
    """Return why the cost model has chosen unequal shares of pairs, with the estimates of the most unequal step; empty
    if all shares are nearly equal."""
    worst = max(plans_of(training, world), key=lambda made: made.balance)
    if worst.balance <= EVEN:
        return ""
    even = plan(worst.plan.mask, world=world, layout="balanced")
    taken, instead = (made.cost(ASSUMED).seconds for made in (worst.plan, even))
    if not taken <= instead:
        return ""
    return (
        f"shares differ: {FEW_TOKENS},\nand a plan is that of the least estimated time "
        f"(on {ASSUMED}, the default). Step {worst.step + 1}, with {worst.largest_share:.0%} of the pairs on\n"
        f"one rank, is estimated to take {units.seconds(taken)} a layer, and {units.seconds(instead)} with equal shares"
    )


def _make_folder(folder: Path) -> None:
    """Make the folder of the pictures. Before the training: an error after it would be too late."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise InputError(f"--out {folder}: cannot make this folder, {reason}. Give another one, or --no-pictures") from None


def most_used(choices: Sequence[str]) -> int:
    """Return the last step that has used the strategy and layout of most steps.

    >>> most_used(["ring on zigzag", "exchange on balanced", "exchange on balanced", "ring on contiguous"])
    2
    """
    ((choice, _),) = Counter(choices).most_common(1)
    return max(n for n, chosen in enumerate(choices) if chosen == choice)


def report_page(training: Training, lengths: Sequence[int], world: int) -> str:
    """Return the page of ``ringspan plan`` for a mask of the run."""
    config = training.config
    shape = rs.Shape(heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype="float32")
    used = plan(rs.documents(lengths), world=world)
    found = study(
        Question(
            mask=used.mask,
            world=world,
            machine=named_hardware("h200x8"),
            shape=shape,
            layout=used.q_layout.name,
            strategy=used.strategy,
            compare_fewer=True,
        )
    )
    return page(found, facts(found))


def _bar_updater(bar: Progress, steps: int, world: int) -> Callable[[str, int, float], None]:
    """Return a function to call after each step of any run: it updates the bar with the losses and their largest
    difference."""
    losses: dict[str, dict[int, float]] = {"split": {}, "alone": {}, "naive": {}}

    def show(run: str, n: int, loss: float) -> None:
        losses[run][n] = loss
        split, alone, naive = (dict(losses[side]) for side in ("split", "alone", "naive"))
        both = split.keys() & alone.keys()
        apart = f", differ by {max(abs(split[n] - alone[n]) for n in both):.0e} at most" if both else ""
        here = " and ".join(
            f"{report.processes(count)} {max(done) + 1}/{steps}: {done[max(done)]:.3f}"
            for count, done in ((world, split), (1, alone))
            if done
        )
        if naive:
            here += f", own keys only {max(naive) + 1}/{steps}"
        bar.update(len(split) + len(alone) + len(naive), here + apart)

    bar.update(0, f"starting {report.processes(world)}")
    return show


def _opening(training: Training, world: int) -> str:
    size = sum(p.numel() for p in build(training.config, training.seed).parameters())
    tokens = sum(training.packs[0].lengths)
    rest = tokens % world
    uneven = f" (not a multiple of {world}: {rest} left over)" if rest else ""
    counts = [len(pack.lengths) for pack in training.packs]
    many = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"
    return (
        f"A language model of {size:,} parameters trains on {tokens:,} bytes of Python a step{uneven}.\n"
        f"Each of {len(counts)} steps packs {many} functions of the standard library end to end. "
        "No function attends to another.\n"
        f"It is trained three times: with the sequence split over {report.processes(world)}, in one process without ringspan,\n"
        "and split without context parallelism, where each rank attends to its own keys only.\n"
    )
