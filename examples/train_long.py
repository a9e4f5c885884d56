"""Train a decoder on long sequences of packed documents: FSDP2 × context parallelism.

    torchrun --nproc-per-node 2 examples/train_long.py                                     # one sequence over 2 processes
    torchrun --nproc-per-node 8 examples/train_long.py --cp 4 --tokens 65536 --dim 1024 --layers 16 --save checkpoints

Each step has other documents, hence another mask: the next one is planned in the background while this step runs.
Layers are recomputed in the backward pass, except attention, which is kept. The logits of all tokens never exist at
once. Started again with the same ``--save``, the program goes on after the last checkpoint. With ``--check``, the first
process also trains alone, with dense attention, and the largest difference between the losses is printed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringspan as rs

VOCABULARY, HEAD_DIM = 256, 16

# -- the model: it knows nothing of context parallelism ----------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(dim), nn.RMSNorm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, mask)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def keep_attention(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = operator == torch.ops.ringspan.attend.default
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


class Decoder(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, dim), nn.RMSNorm(dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(layers)])
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, loss: Callable[[Tensor, Tensor], Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """Return ``loss(hidden states, weights of the last layer)``: FSDP has the whole weights only in here."""
        frequencies = 1e4 ** (-torch.arange(HEAD_DIM // 2, device=tokens.device) / (HEAD_DIM // 2))
        angles = positions[:, None] * frequencies
        x = self.embedding(tokens)
        contexts = partial(create_selective_checkpoint_contexts, keep_attention)
        for layer in self.layers:
            x = checkpoint(layer, x, angles, mask, use_reentrant=False, context_fn=contexts)
        return loss(self.norm(x), self.head.weight)


# -- the data: documents that count, each in steps of its own ----------------------------------------------------------


def batch(step: int, replica: int, total: int) -> tuple[Tensor, list[int]]:
    """Return a sequence (1, total) and the lengths of its documents; the same on all ranks of the sequence."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    cuts = torch.randint(1, total, (3,), generator=generator).unique().tolist()
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    strides = torch.randint(1, 5, (len(lengths),), generator=generator).tolist()
    parts = [torch.arange(n) * stride % VOCABULARY for n, stride in zip(lengths, strides, strict=True)]
    return torch.cat(parts)[None], lengths


# -- training ----------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace, mesh: DeviceMesh, device: str) -> dict[int, float]:
    """Train on all processes, and return the loss of each step."""
    torch.manual_seed(0)  # the same weights in every process
    model = Decoder(options.dim, options.layers).to(device)
    ranks = mesh["dp", "cp"]._flatten()  # the ranks of a sequence share all parameters, as replicas do
    for layer in model.layers:
        fully_shard(layer, mesh=ranks)
    fully_shard(model, mesh=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = load(options.save, model, optimizer)
    writer = tensorboard(options.tensorboard)
    replica = mesh.get_local_rank("dp")
    losses: dict[int, float] = {}
    tokens, lengths = batch(first, replica, options.tokens)
    cp = rs.ContextParallel(mesh["cp"], rs.documents(lengths))
    for step in range(first, options.steps):
        following, next_lengths = batch(step + 1, replica, options.tokens)
        upcoming = cp.prefetch(rs.documents(next_lengths))
        labels = rs.shift_labels(tokens, documents=lengths)  # before sharding: the next token may be on another rank
        mine, labels = (x.to(device) for x in cp.shard(tokens, labels, dim=1))
        loss_of = partial(cp.cross_entropy, targets=labels, over=mesh["dp", "cp"], grads="averaged")  # as FSDP averages
        with profiled(options.trace if step == first + 1 else None):
            with cp:
                loss = model(mine, cp.positions(documents=lengths, device=device), loss_of)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[step] = loss.item()
        if writer is not None:
            writer.add_scalar("loss", losses[step], step)
        if options.save is not None and ((step + 1) % options.save_every == 0 or step + 1 == options.steps):
            save(options.save, model, optimizer, step + 1)
        cp, tokens, lengths = upcoming.result(), following, next_lengths
    return losses


def train_alone(options: argparse.Namespace, replicas: int) -> dict[int, float]:
    """Train in this process alone, on the sequences of all replicas, with dense attention."""
    torch.manual_seed(0)
    model = Decoder(options.dim, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: dict[int, float] = {}
    for step in range(options.steps):
        sequences = [batch(step, replica, options.tokens) for replica in range(replicas)]
        count = sum(int((rs.shift_labels(x, documents=n) >= 0).sum()) for x, n in sequences)
        losses[step] = 0.0
        for tokens, lengths in sequences:
            labels = rs.shift_labels(tokens, documents=lengths)
            documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            mask = (documents[:, None] == documents[None]).tril()
            positions = torch.cat([torch.arange(n) for n in lengths])

            loss = model(tokens, positions, partial(summed_loss, labels=labels), mask) / count
            loss.backward()
            losses[step] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def summed_loss(hidden: Tensor, weight: Tensor, *, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")


# -- checkpoints, curves and traces ------------------------------------------------------------------------------------


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder / f"{step:08d}")


def load(folder: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, if there is one, and return the next step."""
    complete = [] if folder is None or not folder.exists() else sorted(x.parent for x in folder.glob("*/.metadata"))
    if not complete:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=complete[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def tensorboard(folder: Path | None) -> Any:
    if folder is None or dist.get_rank():
        return None
    from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

    return SummaryWriter(folder)


class profiled:  # noqa: N801
    """Write a trace of one step, which ui.perfetto.dev shows. One file for each process."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.profile: Any = nullcontext() if path is None else torch.profiler.profile()

    def __enter__(self) -> None:
        self.profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.profile.__exit__(*error)
        if self.path is not None and error[0] is None:
            self.profile.export_chrome_trace(f"{self.path}.{dist.get_rank()}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=509, help="of each sequence; the ranks need not divide them")
    parser.add_argument("--cp", type=int, help="ranks of one sequence (default: all)")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--save", type=Path, help="a folder for checkpoints")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--tensorboard", type=Path, help="a folder for the loss curve")
    parser.add_argument("--trace", type=Path, help="the start of a file name, for a trace of the second step")
    parser.add_argument("--check", action="store_true", help="compare the losses with those of one process")
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    cp_size = options.cp or dist.get_world_size()
    replicas = dist.get_world_size() // cp_size
    mesh = init_device_mesh("cuda" if on_gpus else "cpu", (replicas, cp_size), mesh_dim_names=("dp", "cp"))
    losses = train(options, mesh, device)
    if dist.get_rank() == 0:
        for step, loss in losses.items():
            print(f"step {step}: loss {loss:.6f}")
        if options.check:
            alone = train_alone(options, replicas)
            print(f"largest difference from one process: {max(abs(losses[step] - alone[step]) for step in losses):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
