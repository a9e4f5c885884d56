"""Process groups by name, and the parts of torch.distributed that simulate ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch._C import _distributed_c10d

F = TypeVar("F", bound=Callable[..., object])

resolve_process_group = _distributed_c10d._resolve_process_group


def own_global_rank() -> int:
    """Return the global rank of this process, and 0 where LocalTensors simulate all ranks.

    There ``get_rank`` returns the ranks of all of them as one symbolic number, from torch 2.15 on.
    """
    rank: object = dist.get_rank()
    return rank if isinstance(rank, int) else 0


def on_each_simulated_rank(function: F) -> F:
    """Call the function once for each rank if its tensors are LocalTensors, which hold the values of all ranks.

    A PyTorch without LocalTensor leaves the function as it is.
    """
    try:
        from torch.distributed._local_tensor import maybe_run_for_local_tensor
    except ImportError:
        return function
    return cast(F, maybe_run_for_local_tensor(function))


def fake_store() -> Any:
    """Return a store for ``init_process_group("fake")``, whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
