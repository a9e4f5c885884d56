"""Causal attention over gloo processes: ringspan against other libraries, forward and backward.

    pip install --no-deps para-attn deepspeed einops hjson msgpack ninja py-cpuinfo pydantic pydantic-core annotated-types \\
        typing-inspection                                   # the peers; DS_BUILD_OPS=0 if deepspeed is built from source
    python benchmarks/peers.py                              # a table
    python benchmarks/peers.py --json                       # and one line of JSON for each row
    python benchmarks/peers.py --only ringspan "torch ring" --world 2 --seq-len 2048

Peers that are not installed are left out, with a line that says so. Each process has one thread. In each round every
library runs once, in turn, so that the load of the machine affects all alike; a round of a library takes as long as its
slowest process. The seconds are medians of the rounds. The ratio is the median of the peer's time over ringspan's in
the same round. *cpu s* is the processor time of the process with the most, all its threads together: it depends less on
the load of the machine, and has no waiting in it. The error is the largest difference of out, dq, dk and dv from dense
attention in float64, relative to the largest value of each.

What runs: ringspan as ``rs.ContextParallel`` chooses it for this shape and ``hardware="cpu"``; ``ulysses_attn_func`` of
para-attn; ``DistributedAttention`` of deepspeed around SDPA; the ring template of torch on the flash operator for CPUs,
with its load balancing and each of its two ways of rotating keys.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.kernels.reference import dense_attention
from ringspan.layouts import contiguous, zigzag
from ringspan.testing.workers import Pool

# Legend: B batch, H heads, S queries of this rank, D head dim.
HEADS, HEAD_DIM = 8, 64
NAMES = ("out", "dq", "dk", "dv")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# -- the libraries: the tokens of each rank, and attention on them -----------------------------------------------------


def with_ringspan(n: int) -> tuple[rs.Layout, Attention, str]:
    shape = rs.Shape(heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
    cp = rs.ContextParallel(None, rs.causal(n), hardware="cpu", shape=shape)
    return cp.plan.q_layout, cp.attention, cp.plan.strategy


def with_para_attn(n: int) -> tuple[rs.Layout, Attention, str]:
    from para_attn.para_attn_interface import ulysses_attn_func

    layout = contiguous(rs.causal(n), dist.get_world_size())
    return layout, lambda q, k, v: ulysses_attn_func(q, k, v, is_causal=True, mesh=dist.group.WORLD), "ulysses"


def with_deepspeed(n: int) -> tuple[rs.Layout, Attention, str]:
    from deepspeed import comm, ops
    from deepspeed.sequence.layer import DistributedAttention

    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an all-reduce that deepspeed would compile now, and not use here

    def local(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> Tensor:
        out_BHSD = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q_BSHD, k_BSHD, v_BSHD)), is_causal=True)
        return out_BHSD.transpose(1, 2).contiguous()

    if not comm.is_initialized():
        comm.init_distributed("gloo", verbose=False, auto_mpi_discovery=False)
    module = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(*qkv: Tensor) -> Tensor:
        return module(*(x.transpose(1, 2) for x in qkv), 0).transpose(1, 2)

    return contiguous(rs.causal(n), dist.get_world_size()), attend, "ulysses"


def with_torch(n: int, *, rotate: str) -> tuple[rs.Layout, Attention, str]:
    from torch.distributed.tensor.experimental._context_parallel import _attention as template

    # PyTorch calls the template with the operators of GPUs only
    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            template.set_rotate_method(rotate)
            operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, lse, *_ = template._templated_ring_attention(dist.group.WORLD, 2, operator, q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            given = {"grad_out": grad, "grad_out_name": "grad_out", "out": out, "logsumexp": lse, "dropout_p": 0.0}
            found = template._templated_ring_attention_backward(
                dist.group.WORLD, 2, operator, query=q, key=k, value=v, is_causal=True, **given
            )
            return found[:3]

    return zigzag(rs.causal(n), dist.get_world_size()), Ring.apply, f"ring, {rotate}"


LIBRARIES: dict[str, tuple[str | None, Callable[[int], tuple[rs.Layout, Attention, str]]]] = {
    "ringspan": (None, with_ringspan),
    "para-attn": ("para_attn", with_para_attn),
    "deepspeed": ("deepspeed", with_deepspeed),
    "torch ring, allgather": (None, lambda n: with_torch(n, rotate="allgather")),
    "torch ring, alltoall": (None, lambda n: with_torch(n, rotate="alltoall")),
}


# -- in a worker -------------------------------------------------------------------------------------------------------


def measure(rank: int, names: list[str], tokens: int, rounds: int, reference: str) -> dict[str, Any]:
    """Return the seconds of each round, the errors and what ran, for each library."""
    wanted = torch.load(reference, mmap=True)
    found: dict[str, Any] = {}
    steps: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for name in names:
        layout, attention, what = LIBRARIES[name][1](tokens)
        mine = torch.as_tensor(layout.positions(rank))
        *qkv, grad = (x[:, :, mine].contiguous() for x in inputs(tokens))
        steps[name] = step_of(attention, qkv, grad)
        found[name] = {"what": what, "seconds": [], "cpu": [], "errors": {}}
        for result, x, whole in zip(NAMES, steps[name](), wanted, strict=True):  # this is the warm-up, too
            apart = (x.double() - whole[:, :, mine]).abs().max() / whole.abs().max()
            found[name]["errors"][result] = apart.item() if torch.isfinite(apart) else float("inf")
    for n in range(rounds):
        for name in names[n % len(names) :] + names[: n % len(names)]:  # another library is the first in each round
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            found[name]["seconds"].append(time.perf_counter() - start)
            found[name]["cpu"].append(time.process_time() - cpu)
    return found


def step_of(attention: Attention, qkv: list[Tensor], grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    def step() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = attention(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    return step


def inputs(n: int) -> tuple[Tensor, ...]:
    return torch.randn(4, 1, HEADS, n, HEAD_DIM, generator=torch.Generator().manual_seed(0)).unbind()


# -- in the parent -----------------------------------------------------------------------------------------------------


def dense(n: int, block: int = 1024) -> tuple[Tensor, ...]:
    """Return out, dq, dk and dv of the whole sequence, in float64, head by head and some rows at a time."""
    given = [x.double() for x in inputs(n)]
    out, dq, dk, dv = (torch.zeros_like(given[0]) for _ in range(4))
    for head in range(HEADS):
        q, k, v, grad = (x[:, head : head + 1] for x in given)
        for start in range(0, n, block):
            stop = min(start + block, n)
            seen = torch.arange(start, stop)[:, None] >= torch.arange(stop)
            leaves = [x.clone().requires_grad_() for x in (q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop])]
            part = dense_attention(*leaves, seen).out
            grads = torch.autograd.grad(part, leaves, grad[:, :, start:stop])
            out[:, head, start:stop], dq[:, head, start:stop] = part.detach()[:, 0], grads[0][:, 0]
            dk[:, head, :stop] += grads[1][:, 0]
            dv[:, head, :stop] += grads[2][:, 0]
    return out, dq, dk, dv


@contextmanager
def reference_file(n: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dense.pt"
        torch.save(dense(n), file)
        yield str(file)


def rows(names: list[str], world: int, n: int, rounds: int, reference: str) -> Iterator[dict[str, Any]]:
    with Pool(world, threads=1, timeout=1800) as pool:
        of_ranks = pool.run(measure, names, n, rounds, reference)

    def most(name: str, what: str) -> list[float]:
        """The most of any rank, in each round."""
        return [max(x) for x in zip(*(found[name][what] for found in of_ranks), strict=True)]

    slowest = {name: most(name, "seconds") for name in names}
    for name in names:
        ratios = [peer / ours for peer, ours in zip(slowest[name], slowest["ringspan"], strict=True)]
        yield {
            "bench": "peers",
            "library": name,
            "version": version(name),
            "what": of_ranks[0][name]["what"],
            "mask": f"causal({n})",
            "world": world,
            "threads": 1,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "dtype": "float32",
            "torch": torch.__version__,
            "machine": platform.machine(),
            "rounds": rounds,
            "seconds": round(statistics.median(slowest[name]), 4),
            "cpu_seconds": round(statistics.median(most(name, "cpu")), 4),
            "ratio": round(statistics.median(ratios), 3),
            "spread": [round(min(ratios), 3), round(max(ratios), 3)],
            "errors": {x: max(found[name]["errors"][x] for found in of_ranks) for x in NAMES},
        }


def version(name: str) -> str:
    package = LIBRARIES[name][0]
    own = rs.__version__ if name == "ringspan" else torch.__version__
    return own if package is None else importlib.metadata.version(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="numbers of processes (default 2 4)")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=list(LIBRARIES), help="ringspan and these only")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each row as well")
    args = parser.parse_args()
    names = [name for name in LIBRARIES if name in args.only or name == "ringspan"]
    for name in list(names):
        package = LIBRARIES[name][0]
        if package is not None and find_spec(package) is None:
            print(f"{name} is not installed, and left out: pip install --no-deps {name}", file=sys.stderr)
            names.remove(name)
    head = f"{'processes':9}  {'library':21}  {'version':10}  {'what':20}  seconds  ratio  {'spread':10}  cpu s  error"
    print(f"{head}\n{'-' * len(head)}")
    with reference_file(args.seq_len) as reference:
        for world in args.world:
            for row in rows(names, world, args.seq_len, args.rounds, reference):
                spread = "–".join(f"{x:.2f}" for x in row["spread"])
                texts = [f"{world:9}", f"{row['library']:21}", f"{row['version'].partition('+')[0]:10}", f"{row['what']:20}"]
                figures = [f"{row['seconds']:7.3f}", f"{row['ratio']:5.2f}", f"{spread:10}", f"{row['cpu_seconds']:5.2f}"]
                print("  ".join([*texts, *figures, f"{max(row['errors'].values()):.1e}"]), flush=True)
                if args.json:
                    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
