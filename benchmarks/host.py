"""The host time of attention: time without kernels, Python function calls, and the cost of a context per operation.

    python benchmarks/host.py "exchange(stages=1)"
    python benchmarks/host.py --calls
    python benchmarks/host.py --operations

The time is that of rank 3 of 8 on the CPU, with a kernel that only allocates its results, a merge that does nothing and
a transport that moves nothing. The rest is the work of the host between launches, which is the same on a GPU. A signal
samples the running file every millisecond of processor time; the time of a PyTorch operation counts for the file that
calls it.

``--calls`` prints the figures of ``ringspan.bench.calls``: Python calls, files and depth of the stack.

``--operations`` prints the host time of ``torch.add`` on tensors of one number: outside of a context, in a torch
function mode that only calls the function, in ``with cp:``, and in ``local_attention()`` in it. It is the smallest of
many measurements.
"""

from __future__ import annotations

import argparse
import signal
import time
import timeit
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

import ringspan as rs
from ringspan.bench.calls import count_calls
from ringspan.engine import AttentionConfig, attend_ranks
from ringspan.kernels import accumulators, flash_calls, flash_loop
from ringspan.testing.workers import Pool
from ringspan.transports.null import NullTransport

SECONDS = 10.0
# Many short measurements, so that some of them are not interrupted by other processes.
OPERATIONS, REPEATS, ROUNDS = 200, 50, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy", nargs="?", default="exchange(stages=1)")
    parser.add_argument("--calls", action="store_true", help="count Python calls instead of measuring time")
    parser.add_argument("--operations", action="store_true", help="measure what a context adds to every torch operation")
    args = parser.parse_args()
    if args.calls:
        print_calls()
    elif args.operations:
        print_operations()
    else:
        print_time(args.strategy)


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
    """Return the number of calls in ``SECONDS``, and the number of samples in each file."""
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


def print_calls() -> None:
    print("ranks  call                                        forward              backward")
    print("                                            calls files depth     calls files depth")
    for ranks in (1, 2):
        with Pool(ranks) as pool:
            for with_flex in (False, True):
                name = "flex_attention with a score_mod" if with_flex else "F.scaled_dot_product_attention"
                figures = pool.run(count_calls, with_flex)[-1]
                print(f"{ranks:5}  {name:36} " + "     ".join("{:5} {:5} {:5}".format(*x) for x in figures))


# -- operations --------------------------------------------------------------------------------------------------------


class PassingMode(TorchFunctionMode):
    """A torch function mode that only calls the function. It shows the cost of any mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def print_operations() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cp = rs.ContextParallel(None, rs.causal(8))
    cases: dict[str, list[AbstractContextManager[Any]]] = {
        "outside": [],
        "in a mode that only passes on": [PassingMode()],
        "in `with cp:`": [cp],
        "in local_attention() in `with cp:`": [cp, rs.local_attention()],
    }
    # Alternately, so that the load of the machine affects all cases alike.
    times: dict[str, list[float]] = {name: [] for name in cases}
    a, b = torch.ones(()), torch.ones(())
    for _ in range(ROUNDS):
        for name, contexts in cases.items():
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                times[name] += timeit.repeat(lambda: torch.add(a, b), number=OPERATIONS, repeat=REPEATS)
    print("torch.add                           µs")
    for name, took in times.items():
        print(f"{name:34} {min(took) / OPERATIONS * 1e6:4.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
