"""Kill or stop one of four ranks, in every place of a training step.

    python -m benchmarks.reliability.kills [--trials N] [--jobs N]         SIGKILL
    python -m benchmarks.reliability.kills --stop [--trials N] [--jobs N]  SIGSTOP: the others wait until the time limit

The places: the handshake, every step of the forward and of the backward pass, before its messages are posted and while
they are in flight, and the collectives mean, sum_gradients and unshard. The survivors stay alive, or exit as soon as
they raise.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs
from benchmarks.reliability.experiments import Experiment, Task, main_of, parser_of
from benchmarks.reliability.harness import Trial, log_bad, run_ranks, summarize_by
from ringspan.transports import ProcessGroupTransport

WORLD, TOKENS = 4, 64
STOP_LIMIT = 6.0  # seconds
PLACES = [
    *("the handshake", "unshard", "cp.mean", "cp.sum_gradients"),
    *(f"{phase} step {step}" for phase in ("forward", "backward") for step in range(WORLD - 1)),
]
MOMENTS = ("before its messages", "messages in flight")


def train(rank: int, guilty: int, tell: Callable[[float], None], place: str, moment: str, name: str, seconds: float) -> None:
    """Train two steps. The guilty rank sends itself a signal at this place of the second one, or in the handshake."""
    if rank == guilty:
        _install(place, moment, getattr(signal, name), tell)
    cp = rs.ContextParallel(dist.group.WORLD, rs.causal(TOKENS), strategy="ring", layout="zigzag", timeout=seconds)
    layer = torch.nn.Linear(8, 8)
    for _ in range(2):
        x = cp.shard(torch.randn(1, 2, TOKENS, 8), dim=2)
        out = cp.attention(layer(x), x, x)
        cp.mean(out.square()).backward()
        cp.sum_gradients(layer.parameters())
        cp.unshard(out.detach(), dim=2)
    cp.mean(torch.ones(2))  # messages that were in flight may have arrived: the next call fails then


def _install(place: str, moment: str, number: signal.Signals, tell: Callable[[float], None]) -> None:
    """Replace the method that posts messages by one that sends a signal to this process."""
    post: Callable[..., Any] = ProcessGroupTransport._post
    calls = []

    def post_or_die(self: Any, request: Any, call: Any) -> Any:
        is_here = request.label.startswith(place)
        if is_here and call.number not in calls:
            calls.append(call.number)
        is_due = is_here and len(calls) == (1 if place == "the handshake" else 2)
        pending = post(self, request, call) if not is_due or moment == MOMENTS[1] else None
        if is_due:
            tell(time.time())
            os.kill(os.getpid(), number)
        return pending

    ProcessGroupTransport._post = post_or_die  # type: ignore[method-assign]


def tasks_of(trials: int, *, stop: bool) -> list[Task]:
    """Return one task for each trial. The cases are taken in turn, each time with another guilty rank."""
    cases = list(product((True, False), MOMENTS, PLACES))
    guilty = ((n + n // len(cases)) % WORLD for n in range(trials))
    return [partial(run_case, rank, *case, stop) for rank, case in zip(guilty, cycle(cases), strict=False)]


def run_case(guilty: int, stay: bool, moment: str, place: str, stop: bool, deadline: float) -> list[tuple[str, Trial]]:
    name, seconds = ("SIGSTOP", STOP_LIMIT) if stop else ("SIGKILL", 30.0)
    trial = run_ranks(train, WORLD, guilty, (place, moment, name, seconds), limit=seconds + 60.0, stay=stay)
    survivors = f"{moment}, survivors {'stay' if stay else 'exit'}"
    log_bad(trial, f"{place}, {survivors}")
    return [(survivors, trial)]


def experiment(trials: int, *, stop: bool = False) -> Experiment:
    return Experiment(
        name="stops" if stop else "kills",
        tasks=tasks_of(trials, stop=stop),
        rows=partial(summarize_by, str),
        goal=trials,
    )


def main() -> None:
    parser = parser_of(__doc__, 200)
    parser.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    args = parser.parse_args()
    main_of([experiment(args.trials, stop=args.stop)], args)


if __name__ == "__main__":
    main()
