"""Attention over a sequence that is split across processes, through the names of torch's ``context_parallel``.

    torchrun --nproc-per-node 4 examples/ring_sdpa.py

It uses NCCL on GPUs and gloo on CPUs. Every process also computes the attention of the whole sequence by itself,
forward and backward, and the largest differences are printed.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringspan.compat import _cp_options, context_parallel, context_parallel_unshard, set_rotate_method

TOKENS = 1001  # need not be divisible by the number of processes


def start() -> DeviceMesh:
    """Initialise the processes, and make a mesh with one axis of all of them."""
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    return init_device_mesh("cuda" if on_gpus else "cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def on_one_device(whole: list[torch.Tensor], *, is_causal: bool) -> list[torch.Tensor]:
    """Out, and the gradients of q, k and v."""
    q, k, v = (x.clone().requires_grad_() for x in whole)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def on_all(mesh: DeviceMesh, whole: list[torch.Tensor], *, is_causal: bool) -> list[torch.Tensor]:
    """The same over all processes, gathered."""
    q, k, v = (x.clone() for x in whole)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        for share in (q, k, v):
            share.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    return context_parallel_unshard(mesh, [out.detach(), *grads], [2, 2, 2, 2])


def main() -> None:
    mesh = start()
    torch.manual_seed(0)  # the same sequence in every process
    whole = [torch.randn(2, 8, TOKENS, 32, device=mesh.device_type) for _ in range(3)]
    worst = 0.0
    for is_causal in (True, False):
        want = on_one_device(whole, is_causal=is_causal)
        for rotation in ("allgather", "alltoall"):
            for balance in (True, False):
                set_rotate_method(rotation)
                _cp_options.enable_load_balance = balance
                got = on_all(mesh, whole, is_causal=is_causal)
                apart = [float((a - b).abs().max()) for a, b in zip(got, want, strict=True)]
                worst = max(worst, *apart)
                if dist.get_rank() == 0:
                    case = f"{'causal' if is_causal else 'full'}, {rotation}, {'head-tail' if balance else 'contiguous'}"
                    numbers = "  ".join(f"{name} {x:.1e}" for name, x in zip(("out", "dq", "dk", "dv"), apart, strict=True))
                    print(f"{case:32} {numbers}")
    if dist.get_rank() == 0:
        print(f"{mesh.size()} processes, {TOKENS} tokens: at most {worst:.1e} apart")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
