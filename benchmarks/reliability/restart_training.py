"""A training that saves a checkpoint in every step, for :mod:`benchmarks.reliability.restart`. Started by torchrun.

torchrun --nproc-per-node 2 restart_training.py FOLDER [the step in which rank 1 is killed once]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringspan as rs

STEPS, TOKENS, DIM = 8, 64, 16


def init_process_group() -> None:
    """Initialise the default group under torchrun, with keys of its own for each restart.

    torchrun keeps its store when it restarts the processes. With the same keys, gloo may read the address of a process
    of the attempt before, and connect to it.
    """
    host, port, rank, world = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    is_master = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(host, int(port), int(world), is_master)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt {attempt}", store), rank=int(rank), world_size=int(world))


def main() -> None:
    folder, kill_at = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1
    init_process_group()
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, 1)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    saved, first, loss = folder / "checkpoint.pt", 0, torch.tensor(0.0)
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(1, TOKENS, DIM, generator=generator), torch.randn(1, TOKENS, 1, generator=generator)
        cp = rs.ContextParallel(None, rs.causal(TOKENS), strategy="ring")
        x, y = cp.shard(x, y, dim=1)
        with cp:
            q, k, v = model[0](x).view(1, -1, 2, 3 * DIM // 2).transpose(1, 2).chunk(3, dim=-1)
            if step == kill_at and dist.get_rank() == 1 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        loss = cp.mean((model[1](out) - y).square())
        optimizer.zero_grad()
        loss.backward()
        cp.sum_gradients(model.parameters())
        optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder / "new.pt")
            (folder / "new.pt").replace(saved)
    if dist.get_rank() == 0:
        (folder / "loss").write_text(loss.detach().numpy().tobytes().hex())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
