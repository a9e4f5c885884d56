"""Where the host's time goes in one forward call of attention, kernels left out.

    python benchmarks/host.py "exchange(stages=1)"

A rank of 8 is walked on the CPU with a kernel that only makes room for its results, and a merge that does nothing: what is left
is what the host does between launches on a GPU as well. A signal asks every millisecond of processor time which file's code is
being run; the time of PyTorch's operations counts for the file that calls them.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from ringspan.engine import AttentionConfig, attend_ranks
from ringspan.kernels import accumulators, flash_calls, flash_loop
from ringspan.transports.null import NullTransport

SECONDS = 10.0


class Nothing:
    """A kernel that computes nothing: as many launches, and as much room, as FlashAttention's."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, bands: Any, *, scale: float) -> Any:
        return flash_loop.attend(_room, q, k, v, bands, scale=scale)


def _room(q: Tensor, k: Tensor, v: Tensor, batch: Any, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy", nargs="?", default="exchange(stages=1)")
    strategy = parser.parse_args().strategy
    torch.set_num_threads(1)
    accumulators.merge_ = lambda *args, **kwargs: None
    plan = rs.plan(rs.causal(1024), world=8, rank=3, layout="zigzag", strategy=strategy)
    q, k, v = (torch.randn(1, heads, plan.q_rows, 16, dtype=torch.bfloat16) for heads in (4, 1, 1))
    config = AttentionConfig(kernel=Nothing(), scale=0.25, head_dim=16)  # type: ignore[arg-type]
    with torch.no_grad():
        calls, files = _sampled(lambda: attend_ranks([plan], [(q, k, v)], config, NullTransport().run))
    each = SECONDS / calls * 1e6
    launches = sum(
        len(flash_calls.make_flash_calls(task.bands, q.device)) for step in plan.program.forward for task in step.tasks
    )
    messages = sum(len(step.sends) + len(step.recvs) for step in plan.program.forward)
    print(f"{strategy}: {each:.0f} µs for {len(plan.program.forward)} steps, {launches} launches, {messages} messages\n")
    for file, count in files.most_common(12):
        print(f"{each * count / files.total():6.0f} µs  {file}")


def _sampled(f: Callable[[], object]) -> tuple[int, Counter[str]]:
    """How many calls there were, and how often each file was met."""
    files = Counter[str]()

    def meet(_: int, frame: FrameType | None) -> None:
        if frame is not None:
            files["/".join(Path(frame.f_code.co_filename).parts[-2:])] += 1

    for _ in range(200):
        f()
    signal.signal(signal.SIGPROF, meet)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    start, calls = time.process_time(), 0
    while time.process_time() - start < SECONDS:
        f()
        calls += 1
    signal.setitimer(signal.ITIMER_PROF, 0)
    return calls, files


if __name__ == "__main__":
    main()
