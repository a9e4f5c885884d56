"""One rank of PyTorch's own ``context_parallel``, for a comparison in the same run.

Communication is left out here too: the collectives of torch's ``fake`` process group return at once.
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
    """Yield a function that runs forward and backward of causal attention on one rank. q, k and v are those of the
    whole sequence."""
    from torch.distributed.tensor.experimental import context_parallel

    if dist.is_initialized():
        raise RuntimeError("this process already has a process group; measure PyTorch's context_parallel in a separate process")
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
