"""The host's share of one call of attention: time without kernels, and Python function calls.

    python benchmarks/host.py "exchange(stages=1)"
    python benchmarks/host.py --calls

The time is that of rank 3 of 8 on the CPU, with a kernel that only allocates its results, a merge that does nothing and a
transport that moves nothing. What is left is what the host does between launches, on a GPU as well. A signal samples the
running file every millisecond of processor time; the time of a PyTorch operation counts for the file that calls it.

``--calls`` counts, with ``sys.setprofile``, every call of a Python function whose code is in src/ringspan: comprehensions,
generator expressions and each resumption of a generator count as one call, as the interpreter reports them (Python 3.11). Depth
counts frames of ringspan on the stack. The case: gloo ranks on this machine, causal mask of 256 tokens, strategy "ring", 4
heads of 32, float32, ``F.scaled_dot_product_attention`` or an eager ``flex_attention`` with a score_mod inside ``with cp:``;
the third call of three, on the last rank. Two ranks have 2 steps, one rank has 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import ringspan as rs
from ringspan.engine import AttentionConfig, attend_ranks
from ringspan.kernels import accumulators, flash_calls, flash_loop
from ringspan.testing.workers import Pool
from ringspan.transports.null import NullTransport

SECONDS = 10.0
SOURCES = str(Path(rs.__file__).parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy", nargs="?", default="exchange(stages=1)")
    parser.add_argument("--calls", action="store_true", help="count Python calls instead of measuring time")
    args = parser.parse_args()
    print_calls() if args.calls else print_time(args.strategy)


# -- time --------------------------------------------------------------------------------------------------------------


class EmptyKernel:
    """A kernel that computes nothing: as many launches, and as large results, as FlashAttention."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, bands: Any, *, scale: float) -> Any:
        return flash_loop.attend(_allocate, q, k, v, bands, scale=scale)


def _allocate(q: Tensor, k: Tensor, v: Tensor, call: Any, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def print_time(strategy: str) -> None:
    torch.set_num_threads(1)
    accumulators.merge_ = lambda *args, **kwargs: None
    plan = rs.plan(rs.causal(1024), world=8, rank=3, layout="zigzag", strategy=strategy)
    q, k, v = (torch.randn(1, heads, plan.q_rows, 16, dtype=torch.bfloat16) for heads in (4, 1, 1))
    config = AttentionConfig(kernel=EmptyKernel(), scale=0.25, head_dim=16)  # type: ignore[arg-type]
    with torch.no_grad():
        calls, files = _sample(lambda: attend_ranks([plan], [(q, k, v)], config, NullTransport().run))
    each = SECONDS / calls * 1e6
    steps = plan.program.forward
    launches = sum(len(flash_calls.make_flash_calls(task.bands, q.device)) for step in steps for task in step.tasks)
    messages = sum(len(step.sends) + len(step.recvs) for step in steps)
    print(f"{strategy}: {each:.0f} µs for {len(steps)} steps, {launches} launches, {messages} messages\n")
    for file, count in files.most_common(12):
        print(f"{each * count / files.total():6.0f} µs  {file}")


def _sample(f: Callable[[], object]) -> tuple[int, Counter[str]]:
    """The number of calls in ``SECONDS``, and the number of samples in each file."""
    files = Counter[str]()

    def sample(_: int, frame: FrameType | None) -> None:
        if frame is not None:
            files["/".join(Path(frame.f_code.co_filename).parts[-2:])] += 1

    for _ in range(200):
        f()
    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    start, calls = time.process_time(), 0
    while time.process_time() - start < SECONDS:
        f()
        calls += 1
    signal.setitimer(signal.ITIMER_PROF, 0)
    return calls, files


# -- calls -------------------------------------------------------------------------------------------------------------


class CallCounter:
    """A profile function: calls of functions of ringspan, the files they are in, and the deepest stack of them."""

    def __init__(self) -> None:
        self.calls, self.depth, self._now = Counter[str](), 0, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(SOURCES):
            return
        if event == "call":
            self.calls[file] += 1
            self._now += 1
            self.depth = max(self.depth, self._now)
        elif event == "return":
            self._now -= 1

    @property
    def figures(self) -> tuple[int, int, int]:
        return self.calls.total(), len(self.calls), self.depth

    def of(self, f: Callable[[], Any]) -> Any:
        sys.setprofile(self)
        try:
            return f()
        finally:
            sys.setprofile(None)


def _distance(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (q - k)


def count_calls(rank: int, with_flex: bool) -> list[tuple[int, int, int]]:
    """(calls, files, depth) forward and backward."""
    warnings.simplefilter("ignore")  # torch warns of an eager flex_attention, in which it is not called
    cp = rs.ContextParallel(None, rs.causal(256), strategy="ring")
    q, k, v = (x.requires_grad_() for x in cp.shard(*torch.randn(3, 1, 4, 256, 32).unbind(), dim=2))
    counters = [CallCounter(), CallCounter()]
    for _ in range(3):
        counters = [CallCounter(), CallCounter()]
        with cp:
            if with_flex:
                out = counters[0].of(lambda: flex_attention(q, k, v, score_mod=_distance))
            else:
                out = counters[0].of(lambda: F.scaled_dot_product_attention(q, k, v))
        grad = torch.ones_like(out)
        counters[1].of(lambda out=out, grad=grad: out.backward(grad))  # type: ignore[misc]
    return [counter.figures for counter in counters]


def print_calls() -> None:
    print("ranks  call                                        forward              backward")
    print("                                            calls files depth     calls files depth")
    for ranks in (1, 2):
        with Pool(ranks) as pool:
            for with_flex in (False, True):
                name = "flex_attention with a score_mod" if with_flex else "F.scaled_dot_product_attention"
                forward, backward = pool.run(count_calls, with_flex)[-1]
                print(f"{ranks:5}  {name:36} " + "     ".join("{:5} {:5} {:5}".format(*x) for x in (forward, backward)))


if __name__ == "__main__":
    main()
