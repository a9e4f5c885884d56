"""One training step of an 8-billion-parameter model on a million tokens and 8 GPUs, measured on one of them.

    python benchmarks/flagship.py
    python benchmarks/flagship.py --tokens 512 --width 64 --tile 64 --device cpu --dtype float32    a try without a GPU

The model has the shape of Qwen3-8B. One rank of 8 is measured with real tensors: some of its layers, in one selective
checkpoint that keeps the results of attention of one layer in two, and the loss. Messages are left out: the process
group is torch's ``fake`` one, whose messages return at once, so the values have no meaning. The step is what was
measured × the number of layers, plus the time by which the cost model says that messages delay it.

Memory of the step, on each rank::

    parameters, gradients and both moments of Adam in float32, split over the ranks   16 bytes × parameters ÷ ranks
    what the forward pass of all layers keeps                                        measured × layers
    the backward pass of one checkpoint, or the loss, whichever needs more           measured
    parameters of two groups of layers in bfloat16, gathered by FSDP                 2 bytes × parameters of a group × 2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringspan as rs
from ringspan.costs import named_hardware
from ringspan.costs.hardware import Hardware, Link
from ringspan.planner import cost
from ringspan.torch_private.process_groups import fake_store

LAYERS = 36
HEAD_DIM = 128
STATE_BYTES = 16  # of a parameter: its value, its gradient and two moments, in float32


class Sizes(NamedTuple):
    """The sizes of a decoder. Those of Qwen3-8B have a width of 4,096."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int

    @staticmethod
    def of_width(width: int) -> Sizes:
        heads = max(4, width // HEAD_DIM)
        return Sizes(width, heads, max(1, heads // 4), width // heads, 3 * width, 151936 * width // 4096)

    @property
    def shape(self) -> rs.Shape:
        return rs.Shape(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)


class Layer(nn.Module):
    """A layer of Qwen3: norms of queries and keys, shared key heads, a gated MLP."""

    def __init__(self, sizes: Sizes, tile: int) -> None:
        super().__init__()
        self.sizes, self.tile = sizes, tile
        linear = partial(nn.Linear, bias=False)
        self.q, self.o = (linear(sizes.width, sizes.heads * sizes.head_dim) for _ in range(2))
        self.k, self.v = (linear(sizes.width, sizes.kv_heads * sizes.head_dim) for _ in range(2))
        self.gate, self.up = (linear(sizes.width, sizes.hidden) for _ in range(2))
        self.down = linear(sizes.hidden, sizes.width)
        self.before, self.after = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.q_norm, self.k_norm = nn.RMSNorm(sizes.head_dim), nn.RMSNorm(sizes.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = rs.tiled(self._qkv, x, cos, sin, tokens=self.tile)
        h = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)
        y: Tensor = rs.tiled(self._rest, x, h.transpose(1, 2), tokens=self.tile)
        return y

    def _qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        x = self.before(x)
        q, k, v = (layer(x).unflatten(-1, (-1, self.sizes.head_dim)) for layer in (self.q, self.k, self.v))
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v

    def _rest(self, x: Tensor, h: Tensor) -> Tensor:
        x = x + self.o(h.flatten(2))
        y = self.after(x)
        y = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class KeepAttention:
    """The policy of one checkpoint: keep the results of attention of its first layers, compute the rest again."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.seen = {False: 0, True: 0}  # calls of attention in the forward pass, and while it is computed again

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator != torch.ops.ringspan.attend.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.seen[context.is_recompute] += 1
        is_kept = self.seen[context.is_recompute] <= self.layers
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class Measured(NamedTuple):
    """Forward and backward of a part of the step on one rank."""

    seconds: float
    kept: int
    """Bytes that the forward pass keeps for the backward pass."""
    peak: int
    """The largest number of bytes at any time, beyond what was there before."""


def measure(forward: Callable[[], Tensor], device: torch.device, rounds: int) -> Measured:
    """Run forward and backward once to warm up, and then ``rounds`` times."""
    on_gpu = device.type == "cuda"
    times, kept, peak = [], 0, 0
    for _ in range(rounds + 1):
        synchronize(device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before, start = allocated(device), time.perf_counter()
        result = forward()
        kept = allocated(device) - before
        result.backward(torch.ones_like(result))
        synchronize(device)
        times.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        del result
        print(f"  {times[-1]:.2f} s", file=sys.stderr, flush=True)
    return Measured(min(times[1:]), kept, peak)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def measure_layers(cp: rs.ContextParallel, sizes: Sizes, options: argparse.Namespace) -> Measured:
    """Measure ``--together`` layers in one checkpoint."""
    factory_kwargs: dict[str, Any] = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    layers = nn.Sequential(*(Layer(sizes, options.tile) for _ in range(options.together))).to(**factory_kwargs)
    for p in layers.parameters():
        p.grad = torch.zeros_like(p)
    positions = cp.positions().to(options.device)
    angles = positions[:, None] * 1e6 ** (-torch.arange(sizes.head_dim // 2, device=options.device) / (sizes.head_dim // 2))
    cos, sin = (x[None, :, None].to(factory_kwargs["dtype"]) for x in (angles.cos(), angles.sin()))
    x = torch.randn(1, len(positions), sizes.width, **factory_kwargs, requires_grad=True)
    x.grad = torch.zeros_like(x)

    def all_layers(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, cos, sin)
        return x

    def forward() -> Tensor:
        with cp:
            contexts = partial(create_selective_checkpoint_contexts, KeepAttention(options.keep))
            result: Tensor = checkpoint(all_layers, x, use_reentrant=False, context_fn=contexts)
        return result

    return measure(forward, x.device, options.rounds)


def measure_loss(cp: rs.ContextParallel, sizes: Sizes, options: argparse.Namespace) -> Measured:
    """Measure the last norm, the projection to the vocabulary and the cross-entropy."""
    factory_kwargs: dict[str, Any] = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    norm = nn.RMSNorm(sizes.width).to(**factory_kwargs)
    tokens = len(cp.positions())
    hidden = torch.randn(1, tokens, sizes.width, **factory_kwargs, requires_grad=True)
    weight = torch.randn(sizes.vocabulary, sizes.width, **factory_kwargs).mul_(0.02).requires_grad_()
    targets = torch.randint(sizes.vocabulary, (1, tokens), device=options.device)
    for x in (hidden, weight):
        x.grad = torch.zeros_like(x)
    return measure(lambda: cp.cross_entropy(norm(hidden), weight, targets, tokens=options.tile), hidden.device, options.rounds)


def delay_of_messages(cp: rs.ContextParallel, sizes: Sizes, machine: Hardware) -> float:
    """Return the seconds by which messages delay one layer, by the cost model: with the links of the machine, and with
    links that take no time."""
    plans = [cp.plan.at(rank) for rank in range(cp.plan.world)]
    free = Link(latency_s=0.0, bytes_per_s=1e18)
    seconds = []
    for hardware in (machine, replace(machine, within=free, between=free)):
        found = cost(plans, hardware, sizes.shape)
        seconds.append(float(found.forward.end.max() + found.backward.end.max()))
    return seconds[0] - seconds[1]


def run(options: argparse.Namespace) -> dict[str, Any]:
    sizes = Sizes.of_width(options.width)
    layer_parameters = sum(p.numel() for p in Layer(sizes, 1).to("meta").parameters())
    parameters = LAYERS * layer_parameters + 2 * sizes.vocabulary * sizes.width
    dist.init_process_group("fake", store=fake_store(), rank=options.rank, world_size=options.world)
    machine = named_hardware(options.hardware)
    cp = rs.ContextParallel(
        None, rs.causal(options.tokens), layout="zigzag", strategy=options.strategy, hardware=machine, shape=sizes.shape
    )
    print(f"{options.together} layers of {LAYERS}, rank {options.rank} of {options.world}", file=sys.stderr)
    layers = measure_layers(cp, sizes, options)
    print("the loss", file=sys.stderr)
    loss = measure_loss(cp, sizes, options)
    groups = LAYERS / options.together
    delay = delay_of_messages(cp, sizes, machine)
    states = STATE_BYTES * parameters // options.world
    gathered = 2 * 2 * layer_parameters * options.together
    memory = states + gathered + round(groups * layers.kept) + max(layers.peak - layers.kept, loss.peak)
    dist.destroy_process_group()
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else ""
    return {
        "torch": torch.__version__,
        "device": gpu or options.device,
        "plan": cp.plan.digest,
        "tokens": options.tokens,
        "ranks": options.world,
        "parameters": parameters,
        "strategy": cp.plan.strategy,
        "layers in one checkpoint": options.together,
        "attention kept of": options.keep,
        "layer, s": round(layers.seconds / options.together, 3),
        "loss, s": round(loss.seconds, 3),
        "delay of a layer by messages, s (model)": round(delay, 4),
        "step, s": round(groups * layers.seconds + loss.seconds + LAYERS * delay, 1),
        "states, GB": round(states / 1e9, 1),
        "kept by the layers, GB": round(groups * layers.kept / 1e9, 1),
        "backward of a checkpoint, GB": round((layers.peak - layers.kept) / 1e9, 1),
        "loss, GB": round(loss.peak / 1e9, 1),
        "memory of the step, GB": round(memory / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=2**20, help="of the sequence (default %(default)s)")
    parser.add_argument("--world", type=int, default=8, help="ranks (default %(default)s)")
    parser.add_argument("--rank", type=int, default=0, help="the rank to measure (default %(default)s)")
    parser.add_argument("--width", type=int, default=4096, help="of the hidden states (default %(default)s)")
    parser.add_argument("--together", type=int, default=2, help="layers in one checkpoint (default %(default)s)")
    parser.add_argument(
        "--keep", type=int, default=1, help="layers of a checkpoint whose attention is kept (default %(default)s)"
    )
    parser.add_argument("--tile", type=int, default=8192, help="tokens of a tile of MLP and loss (default %(default)s)")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--hardware", default="h200x8", help="for the cost model (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2, help="measured after a warm-up; the fastest counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    row = run(options)
    lines = [f"{name:40} {value if isinstance(value, str) else format(value, ',')}" for name, value in row.items()]
    print(json.dumps(row) if options.json else "\n".join(lines))


if __name__ == "__main__":
    main()
