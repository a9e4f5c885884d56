"""Workers as processes of accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def launched(*, alone: bool) -> Iterator[None]:
    """Let accelerate take this worker for one of the processes of its group, as under torchrun, or for a single
    process."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    if not alone:
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)
