"""Kill or stop one of four ranks, in every place of a training step.

    python -m benchmarks.reliability.kills [--trials N] [--json]         SIGKILL
    python -m benchmarks.reliability.kills --stop [--trials N] [--json]  SIGSTOP: the others wait until the time limit

The places: the handshake, every step of the forward and of the backward pass, before its messages are posted and while
they are in flight, and the collectives mean, sum_gradients and unshard. The survivors stay alive, or exit as soon as
they raise.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import cycle, islice, product
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs
from benchmarks.reliability.harness import log_bad, parser_of, print_rows, run_ranks, summarize
from ringspan.transports import ProcessGroupTransport

WORLD, TOKENS = 4, 64
PLACES = [
    *("the handshake", "unshard", "cp.mean or cp.sum", "cp.sum_gradients"),
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


def main() -> None:
    parser = parser_of(__doc__, 2 * 2 * len(PLACES))
    parser.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    args = parser.parse_args()
    name, seconds = ("SIGSTOP", 6.0) if args.stop else ("SIGKILL", 30.0)
    cases = list(islice(cycle(product((True, False), MOMENTS, PLACES)), args.trials))
    found: dict[tuple[bool, str], list[Any]] = {}
    for n, (stay, moment, place) in enumerate(cases):
        guilty = n % WORLD
        trial = run_ranks(train, WORLD, guilty, (place, moment, name, seconds), limit=seconds + 30.0, stay=stay)
        log_bad(trial, f"{place}, {moment}, survivors {'stay' if stay else 'exit'}")
        found.setdefault((stay, moment), []).append(trial)
    rows = [summarize(f"{moment}, survivors {'stay' if s else 'exit'}", trials) for (s, moment), trials in found.items()]
    print_rows(rows, as_json=args.json)


if __name__ == "__main__":
    main()
