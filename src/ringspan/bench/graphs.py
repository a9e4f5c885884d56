"""CUDA graphs: measure a GPU without the time that the host takes for each kernel launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringspan.errors import KernelError


def captured(f: Callable[[], Any]) -> Callable[[], Any] | None:
    """Return ``f`` as the replay of a CUDA graph, or None if it cannot be captured: some kernels build masks in every
    call.

    The warm-up runs on a side stream. That stream has to wait for the current one, which may still be filling the
    tensors that ``f`` reads, and the current stream has to wait for the side stream before it reuses their memory.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        f()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            f()
    except KernelError:
        return None
    return graph.replay
