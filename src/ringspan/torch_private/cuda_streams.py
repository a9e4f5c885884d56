"""The current CUDA stream as an address: making a ``torch.cuda.Stream`` object takes as long as a kernel launch."""

from __future__ import annotations

import torch


def _no_cuda(index: int) -> int:
    raise RuntimeError("this PyTorch was built without CUDA: it has no streams")


# (device index) -> the address of the current stream; only builds with CUDA have it.
current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
