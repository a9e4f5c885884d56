"""Read mutated plan files, hardware files and option texts: only errors of ringspan, at most a second and 200 MB each.

    python -m benchmarks.reliability.mutations [--trials N] [--seed N] [--jobs N]

A text is changed in one to four places: a piece is deleted, repeated, moved or replaced, a number becomes an extreme
one, brackets are nested deeply. It is then read as a user's text would be. A text that is still valid is accepted.
Crafted plan files are consistent, with the digest of what they say, but their lengths, numbers of ranks, spans, steps
and strategies are drawn at random, up to extreme ones. Half of them are read as they are. Seconds are of processor time.
"""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import ringspan as rs
from benchmarks.reliability.experiments import Experiment, Rows, Task, in_process, main_of, parser_of
from ringspan.costs import named_hardware
from ringspan.masks.expressions import parse_mask

CHUNK = 2_000  # texts that one process reads
CRAFTED = "crafted plan files"

NUMBERS = (
    "0",
    "-1",
    "1e999",
    "1" * 25,
    "1" * 5000,
    "9007199254740993",
    "4294967296",
    "2147483647",
    "100000000",
    "1000000",
    "4097",
    "0.5",
    "NaN",
    "null",
    '"x"',
    "true",
    "[]",
)
PIECES = ("[", "]", "{", "}", "(", ")", ",", ":", '"', "-", "e", ".", "\x00", "é", "&", "|", "~", "heads=40964", "*" * 3, " ")


def mutate(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        a = rng.randrange(len(text) + 1)
        b = min(len(text), a + rng.choice((1, 1, 2, 5, 20, 200)))
        kind = rng.randrange(7)
        if kind == 0:
            text = text[:a] + text[b:]
        elif kind == 1:
            text = text[:b] + text[a:b] * rng.choice((1, 2, 50)) + text[b:]
        elif kind == 2:
            c = rng.randrange(len(text) + 1)
            text = text[:c] + text[a:b] + text[c:]
        elif kind == 3:
            text = text[:a] + rng.choice(PIECES) + text[b:]
        elif kind == 4 and (found := list(re.finditer(r"-?\d+(\.\d+)?", text))):
            number = rng.choice(found)
            text = text[: number.start()] + rng.choice(NUMBERS) + text[number.end() :]
        elif kind == 5:
            depth = rng.choice((3, 500, 20_000))
            text = text[:a] + "[" * depth + text[a:]
        else:
            text = text[:a]
        if not text:
            return text
    return text


def plan_texts() -> list[str]:
    masks = (rs.causal(24), rs.documents([5, 11, 8]), rs.causal(24) & rs.window(left=6))
    strategies = ("ring", "gather", "exchange", "pass_q", "ulysses(heads=4, kv_heads=2)", "hierarchical(per_node=2)")
    return [rs.plan(m, world=4, rank=1, strategy=s, layout="zigzag").to_json() for m in masks for s in strategies]


def option_texts() -> list[str]:
    masks = (
        "causal(64)",
        "documents([16, 40, 8]) & causal()",
        "full(64) & window(left=8, right=2)",
        "prefix(64, 8) | chunked(64, 16)",
    )
    strategies = ("ring", "gather(stages=2)", "ulysses(heads=8, kv_heads=2)", "hybrid(per_node=2, between='ring')", "auto")
    layouts = ("zigzag", "contiguous", "striped", "auto", "balanced")
    return [json.dumps([m, s, x, 4]) for m in masks for s in strategies for x in layouts]


def crafted_texts() -> list[str]:
    """Plan files whose layouts are costly to compare: spans of several steps, and many ranks."""
    rng, texts = random.Random(0), []
    base = rs.plan(rs.causal(64), world=2, strategy="ring", layout="striped")
    strategies = ("ring", "exchange(stages=1)", "gather(stages=2)", "pass_q(stages=1)", "hierarchical(per_node=2, pieces=3)")
    while len(texts) < 400:
        n = 2 ** rng.choice((6, 12, 16, 18, 19, 20, 24, 30))
        world = rng.choice((2, 2, 3, 8, 64, 500))
        mask = rng.choice(
            (rs.causal(n), rs.full(n), rs.documents([n // 64] * 64), rs.causal(n) & rs.window(left=9), rs.prefix(n, n // 3))
        )
        try:
            layouts = [rs.Layout(crafted_spans(rng, n, world), length=n) for _ in range(2)]
        except rs.LayoutError:
            continue
        kv_layout = layouts[rng.randrange(2)]
        plan = replace(base, mask=mask, q_layout=layouts[0], kv_layout=kv_layout, strategy=rng.choice(strategies))
        texts.append(plan.to_json())
    return texts


def crafted_spans(rng: random.Random, n: int, world: int) -> list[list[tuple[int, int, int]]]:
    """Split ``range(n)`` into a few parts, each in turn, contiguously or strided, over the ranks."""
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(world)]
    cuts = sorted({0, n, *(rng.randrange(n) for _ in range(rng.choice((0, 1, 3))))})
    for start, stop in pairwise(cuts):
        step = rng.choice((1, 2, 3, world, 64))
        parts = [(start + i, stop, step) for i in range(min(step, stop - start))]
        if step == 1:
            bounds = [start + i * (stop - start) // world for i in range(world + 1)]
            parts = [(a, b, 1) for a, b in pairwise(bounds)]
        for i, part in enumerate(parts):
            spans[i % world].append(part)
    return spans


def read_crafted(text: str) -> Any:
    """Read a plan file, with the digest of its mask and layouts if these are valid."""
    try:
        return rs.Plan.from_json(text)
    except rs.PlanError as error:
        digest = re.search(r"but the plan in the file has digest (\w{16})", str(error))
        if digest is None:
            raise
        return rs.Plan.from_json(re.sub(r'("digest": ")\w*', rf"\g<1>{digest[1]}", text, count=1))


def read_options(text: str) -> Any:
    """Read a mask, a strategy, a layout and a number of ranks as the command line does, and plan."""
    try:
        mask, strategy, layout, world = json.loads(text)
    except (ValueError, RecursionError):
        mask, strategy, layout, world = text, text, text, text
    return rs.plan(parse_mask(str(mask)), world=world, strategy=str(strategy), layout=str(layout))


READERS: dict[str, tuple[Callable[[], list[str]], Callable[[str], Any], float]] = {
    "plan files": (plan_texts, rs.Plan.from_json, 0.2),
    CRAFTED: (crafted_texts, read_crafted, 0.1),
    "hardware files": (
        lambda: [named_hardware(name).to_json() for name in ("h100x8", "h200x8", "b200x8")], rs.Hardware.from_json, 0.3,
    ),
    "mask, strategy, layout and ranks": (option_texts, read_options, 0.4),
}  # fmt: skip


class Outcome(NamedTuple):
    """How reading a text ended, the seconds that it took, and by how many MB the peak of the memory grew."""

    name: str
    kind: str
    seconds: float
    grown: float

    @property
    def is_bad(self) -> bool:
        return self.seconds > 1 or self.grown > 200


def too_slow(*args: object) -> None:
    raise TimeoutError("30 s")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def read_many(name: str, count: int, seed: int, deadline: float) -> list[Outcome]:
    """Read mutated texts of one kind, and return how each of them ended. Runs in a process of its own."""
    signal.signal(signal.SIGALRM, too_slow)
    rng, (texts, read, _) = random.Random(seed), READERS[name]
    sources, outcomes = texts(), []
    for _ in range(count):
        if time.monotonic() > deadline:
            break
        text = rng.choice(sources)
        if name != CRAFTED or rng.random() < 0.5:
            text = mutate(text, rng)
        before, start = peak_mb(), time.process_time()
        signal.setitimer(signal.ITIMER_REAL, 30)
        try:
            read(text)
            kind = "accepted"
        except rs.RingspanError:
            kind = "ringspan errors"
        except BaseException as error:
            kind = "other errors"
            print(f"{name}: {type(error).__name__}: {error} of {text[:300]!r}"[:700], file=sys.stderr)
        signal.setitimer(signal.ITIMER_REAL, 0)
        seconds, grown = time.process_time() - start, peak_mb() - before
        outcomes.append(Outcome(name, kind, seconds, grown))
        if outcomes[-1].is_bad:
            print(f"{name}: {seconds:.1f} s, {grown:.0f} MB of {text[:300]!r}", file=sys.stderr)
    return outcomes


def rows_of(outcomes: list[Outcome]) -> Rows:
    rows: Rows = []
    for name in READERS:
        found = [x for x in outcomes if x.name == name]
        counts = Counter(x.kind for x in found)
        row: dict[str, Any] = {"case": name, "trials": len(found)}
        row |= {kind: counts[kind] for kind in ("accepted", "ringspan errors", "other errors")}
        row |= {"over 1 s": sum(x.seconds > 1 for x in found), "over 200 MB": sum(x.grown > 200 for x in found)}
        row["slowest, s"] = round(max((x.seconds for x in found), default=0.0), 2)
        row["largest, MB"] = round(max((x.grown for x in found), default=0.0))
        rows.append(row)
    return rows


def experiment(trials: int, seed: int = 0) -> Experiment:
    tasks: list[Task] = []
    for kind, (name, (_, _, share)) in enumerate(READERS.items()):
        count = round(trials * share)
        for n, first in enumerate(range(0, count, CHUNK)):
            job = partial(in_process, read_many, name, min(CHUNK, count - first), hash((seed, kind, n)))
            tasks.append(job)
    return Experiment(name="mutations", tasks=tasks, rows=rows_of, goal=trials)


def main() -> None:
    parser = parser_of(__doc__, 100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    main_of([experiment(args.trials, args.seed)], args)


if __name__ == "__main__":
    main()
