"""What a ``with cp:`` block adds to every torch operation in it: host time of ``torch.add`` on tensors of one number.

    python benchmarks/mode_overhead.py

Prints one JSON line for each case: no mode, a torch function mode that only calls the function, a block,
``local_attention`` in a block. The time is the smallest of several rounds, since the machine may be busy.
"""

from __future__ import annotations

import json
import timeit
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import ringspan as rs

CALLS, ROUNDS = 10_000, 30


class NoOp(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def microseconds_per_add() -> float:
    a, b = torch.ones(()), torch.ones(())
    return min(timeit.repeat(lambda: torch.add(a, b), number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cp = rs.ContextParallel(None, rs.causal(8))
    cases: dict[str, list[AbstractContextManager[Any]]] = {
        "no mode": [nullcontext()],
        "no-op mode": [NoOp()],
        "block": [cp],
        "local_attention": [cp, rs.local_attention()],
    }
    for name, contexts in cases.items():
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            took = microseconds_per_add()
        print(json.dumps({"case": name, "us_per_op": round(took, 2), "torch": torch.__version__}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
