"""``ringspan demo``: a small language model, trained with its sequence split over processes and, beside it, in one process."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import ringspan as rs
from ringspan.cli import demo_report as report
from ringspan.cli import pictures
from ringspan.cli.demo_model import Config, build
from ringspan.cli.demo_text import library_documents, packs
from ringspan.cli.demo_train import SHIFT, Training, train_alone, train_split
from ringspan.cli.numbers import at_least
from ringspan.cli.progress import Progress
from ringspan.errors import InputError
from ringspan.planner import plan
from ringspan.testing.workers import Pool

EPILOG = """\
Nothing is staged: the processes talk over gloo, the text is your Python's own standard library, and every
step packs new documents, so that every step has a new mask and a new plan. Half a minute on two cores.
"""

BROKEN = {
    "positions": f"the last rank took its tokens to stand {SHIFT} places further on",
    "gradient": "the last rank halved its part of the gradient",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=at_least(1), default=36, metavar="N", help="how long to train (default: %(default)s)")
    add(
        "--seq-len",
        type=at_least(8),
        default=1531,  # a prime: no number of ranks divides it, and none has to
        metavar="N",
        help="tokens in the sequence; any number will do, it need not divide by anything (default: %(default)s)",
    )
    add(
        "--world",
        type=at_least(1),
        default=4,
        metavar="N",
        help="how many processes share the sequence (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="another seed, other weights and other text (default: %(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("ringspan-demo"),
        metavar="FOLDER",
        help="where the pictures go; made if it is not there (default: %(default)s)",
    )
    add("--no-pictures", action="store_true", help="just the numbers, please")
    add("--json", action="store_true", help="end with one line of JSON that has all the numbers")
    add(
        "--sabotage",
        nargs="?",
        choices=sorted(BROKEN),
        const="positions",
        help="break one rank on purpose, to see the demo fail: its positions (the default) or its gradient",
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if args.sabotage and args.world == 1:
        raise InputError("--sabotage needs another rank to differ from: give --world 2 or more")
    config = Config()
    training = Training(
        config=config,
        packs=packs(library_documents(), count=args.steps, length=args.seq_len, seed=args.seed),
        seed=args.seed,
        sabotage=args.sabotage,
    )
    _say(_opening(training, args.world))
    no_pictures = "you said --no-pictures" if args.no_pictures else pictures.why_not()
    if no_pictures and not args.no_pictures:
        _say(f"\nNo pictures this time: {no_pictures}.")
    outcome = train_both(training, args.world)
    _say(f"\n{report.loss_table(outcome)}\n\nWhat each rank did in all steps together (pairs: of each head of each layer)\n")
    _say(report.rank_table(outcome))
    drawn = [] if no_pictures else [str(path) for path in draw(args.out, training, outcome)]
    seconds = time.monotonic() - started
    if outcome.parted_at is None:
        _say(f"\n{report.closing(outcome, drawn, seconds)}")
    else:
        _complain(report.parting(outcome, BROKEN.get(args.sabotage)))
    if args.json:
        asked = {"steps": args.steps, "seq_len": args.seq_len, "seed": args.seed, "sabotage": args.sabotage}
        _say(report.as_json(outcome, **asked, seconds=round(seconds, 2), pictures=drawn))
    return 0 if outcome.parted_at is None else 1


def train_both(training: Training, world: int) -> report.Outcome:
    """Both trainings at the same time: the split one in a pool of processes, the other in a thread of this one."""
    stop = threading.Event()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each of the workers; more would take turns on the same cores
    try:
        with Progress(2 * len(training.packs)) as bar, ThreadPoolExecutor(1) as beside:
            show = _watch(bar, len(training.packs), world)

            def on_step(n: int, loss: float) -> bool:
                show("alone", n, loss)
                return not stop.is_set()

            alone = beside.submit(train_alone, training, on_step)
            try:
                with Pool(world) as pool:
                    ranks = pool.run(train_split, training, on_message=lambda _, message: show("split", *message))
                return report.Outcome(alone=alone.result(), ranks=tuple(ranks))
            finally:
                stop.set()
    finally:
        torch.set_num_threads(threads)


def draw(folder: Path, training: Training, outcome: report.Outcome) -> list[Path]:
    """The mask of the last step, and the curves."""
    folder.mkdir(parents=True, exist_ok=True)
    pack = training.packs[-1]
    last = plan(rs.documents(pack.lengths), world=outcome.world)
    mask, losses = folder / "mask.png", folder / "losses.png"
    pictures.draw_mask(mask, last, pack.names, pack.lengths)
    pictures.draw_losses(losses, outcome.split, outcome.alone, world=outcome.world, tolerance=report.TOLERANCE)
    return [mask, losses]


def _watch(bar: Progress, steps: int, world: int) -> Callable[[str, int, float], None]:
    """What to call after each step of either run: it moves the bar and keeps the score."""
    losses: dict[str, dict[int, float]] = {"split": {}, "alone": {}}

    def show(run: str, n: int, loss: float) -> None:
        losses[run][n] = loss
        split, alone = (dict(losses[side]) for side in ("split", "alone"))
        both = split.keys() & alone.keys()
        apart = f", apart by {max(abs(split[n] - alone[n]) for n in both):.0e} at most" if both else ""
        here = " and ".join(
            f"{report.processes(count)} {max(done) + 1}/{steps}: {done[max(done)]:.3f}"
            for count, done in ((world, split), (1, alone))
            if done
        )
        bar.update(len(split) + len(alone), here + apart)

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
        f"A language model of {size:,} parameters learns {tokens:,} bytes of Python a step{uneven}.\n"
        f"Each of {len(counts)} steps packs {many} functions of the standard library end to end, "
        "none of which may see another.\n"
        f"It is trained twice: with the sequence split over {report.processes(world)}, and whole, in one without ringspan.\n"
    )


def _say(text: str) -> None:
    print(text, flush=True)


def _complain(text: str) -> None:
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"\n{red}{text}{plain}", file=sys.stderr, flush=True)
