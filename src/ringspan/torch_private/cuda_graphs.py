"""CUDA graphs: copies of many tensors at once, and how to recover from a capture that CUDA has invalidated."""

from __future__ import annotations

from contextlib import suppress

import torch

# (targets, sources): copy each source to its target, with one launch for tensors of one dtype.
foreach_copy_ = torch._foreach_copy_


def _no_cuda(index: int, pool: tuple[int, int]) -> None:
    raise RuntimeError("this PyTorch was built without CUDA: it has no memory pools")


# (device index, pool): stop allocating from a pool. Only builds with CUDA have it.
_end_allocate_to_pool = getattr(torch._C, "_cuda_endAllocateToPool", _no_cuda)


def forget_invalid_capture(index: int, pool: tuple[int, int]) -> None:
    """Tell PyTorch that a capture on a device has ended, if ``capture_end`` raised because CUDA invalidated it.

    Otherwise the allocator would keep memory that other streams have used, and random numbers on the device would
    raise.
    """
    with suppress(RuntimeError):  # releases in which capture_end does so even if it raises
        _end_allocate_to_pool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
