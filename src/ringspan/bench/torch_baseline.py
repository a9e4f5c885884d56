"""PyTorch's own ``context_parallel``, one rank of it, for a comparison in the same run.

Its wire is left out as ours is: torch's ``fake`` process group answers every collective at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringspan.torch_private.process_groups import fake_store

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@contextmanager
def rank_of(rank: int, world: int, backend: str, *qkv: Tensor) -> Iterator[Callable[[], None]]:
    """Forward and backward of causal attention over the whole sequence's q, k and v, as that rank does it."""
    from torch.distributed.tensor.experimental import context_parallel

    if dist.is_initialized():
        raise RuntimeError("this process has a process group already; measure PyTorch's in a process of its own")
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world)
    buffers = list(qkv)
    try:
        mesh = init_device_mesh(qkv[0].device.type, (world,))
        options: dict[str, Any] = {"buffers": buffers, "buffer_seq_dims": [2] * 3, "no_restore_buffers": set(buffers)}
        with sdpa_kernel(BACKENDS[backend]), context_parallel(mesh, **options):
            leaves = [x.detach().requires_grad_() for x in buffers]
            grad = torch.randn_like(leaves[0])

            def step() -> None:
                for x in leaves:
                    x.grad = None
                q, k, v = leaves
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).backward(grad)

            yield step
    finally:
        dist.destroy_process_group()
