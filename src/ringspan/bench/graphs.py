"""What is measured on a GPU, out of a CUDA graph: its host has nothing to do then but to say "again"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringspan.errors import KernelError


def captured(f: Callable[[], Any]) -> Callable[[], Any] | None:
    """What repeats it out of a CUDA graph; None, if it cannot be captured, as where a kernel makes masks anew in every call."""
    with torch.cuda.stream(torch.cuda.Stream()):
        f()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            f()
    except KernelError:
        return None
    return graph.replay
