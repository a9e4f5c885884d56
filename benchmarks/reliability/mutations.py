"""Read mutated plan files, hardware files and option texts: only errors of ringspan, at most a second and 200 MB each.

    python -m benchmarks.reliability.mutations [--trials N] [--seed N] [--json]

A text is changed in one to four places: a piece is deleted, repeated, moved or replaced, a number becomes an extreme
one, brackets are nested deeply. It is then read as a user's text would be. A text that is still valid is accepted.
Seconds are of processor time.
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
from typing import Any

import ringspan as rs
from benchmarks.reliability.harness import parser_of, print_table
from ringspan.costs import named_hardware
from ringspan.masks.expressions import parse_mask

NUMBERS = (
    "0",
    "-1",
    "1e999",
    "1" * 25,
    "1" * 5000,
    "9007199254740993",
    "4294967296",
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
    return [json.dumps([m, s, x]) for m in masks for s in strategies for x in layouts]


def read_options(text: str) -> Any:
    """Read a mask, a strategy and a layout as the command line does, and plan."""
    try:
        mask, strategy, layout = json.loads(text)
    except (ValueError, RecursionError):
        mask, strategy, layout = text, text, text
    return rs.plan(parse_mask(str(mask)), world=4, strategy=str(strategy), layout=str(layout))


READERS: dict[str, tuple[Callable[[], list[str]], Callable[[str], Any], float]] = {
    "plan files": (plan_texts, rs.Plan.from_json, 0.3),
    "hardware files": (
        lambda: [named_hardware(name).to_json() for name in ("h100x8", "h200x8", "b200x8")], rs.Hardware.from_json, 0.3,
    ),
    "mask, strategy and layout": (option_texts, read_options, 0.4),
}  # fmt: skip


def too_slow(*args: object) -> None:
    raise TimeoutError("30 s")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main() -> None:
    parser = parser_of(__doc__, 100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, too_slow)
    rng, lines = random.Random(args.seed), []
    for name, (texts, read, share) in READERS.items():
        sources, count, slowest, largest = texts(), Counter[str](), 0.0, 0.0
        for _ in range(round(args.trials * share)):
            text = mutate(rng.choice(sources), rng)
            before, start = peak_mb(), time.process_time()
            signal.setitimer(signal.ITIMER_REAL, 30)
            try:
                read(text)
                outcome = "accepted"
            except rs.RingspanError:
                outcome = "ringspan errors"
            except BaseException as error:
                outcome = "other errors"
                print(f"{name}: {type(error).__name__}: {error} of {text[:300]!r}"[:700], file=sys.stderr)
            signal.setitimer(signal.ITIMER_REAL, 0)
            seconds, grown = time.process_time() - start, peak_mb() - before
            count.update([outcome, "over 1 s" if seconds > 1 else "", "over 200 MB" if grown > 200 else ""])
            if seconds > 1 or grown > 200:
                print(f"{name}: {seconds:.1f} s, {grown:.0f} MB of {text[:300]!r}", file=sys.stderr)
            slowest, largest = max(slowest, seconds), max(largest, grown)
        counts = [count[x] for x in ("accepted", "ringspan errors", "other errors", "over 1 s", "over 200 MB")]
        lines.append([name, sum(counts[:3]), *counts, round(slowest, 2), round(largest)])
    header = [
        "",
        "trials",
        "accepted",
        "ringspan errors",
        "other errors",
        "over 1 s",
        "over 200 MB",
        "slowest, s",
        "largest, MB",
    ]
    if args.json:
        for line in lines:
            print(json.dumps(dict(zip(header, line, strict=True))))
    else:
        print_table(header, [[f"{x:,}" if isinstance(x, int) else str(x) for x in line] for line in lines])


if __name__ == "__main__":
    main()
