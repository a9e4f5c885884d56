"""Random numbers for the rows that a rank would receive, where a benchmark sends no messages.

A GPU computes faster with zeros or NaN than with random numbers, because it needs less power and its clocks are higher.
Memory that nothing was written to has either, or what an earlier tensor has left there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class RandomRows:
    """Fills receive buffers, as ``NullTransport(fill=…)``.

    ``alone`` makes a function that takes as long as the copies of a step, so that their time can be subtracted.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._noted: list[Tensor] | None = None  # what the buffers of a step were filled with

    def __call__(self, buffer: Tensor) -> None:
        key, count = (buffer.device, buffer.dtype), buffer.numel()
        pool = self._pools.get(key)
        if pool is None or len(pool) < count:
            pool = self._pools[key] = torch.randn(count, dtype=buffer.dtype, device=buffer.device)
        if self._noted is not None:
            self._noted.append(pool[:count])
        buffer.view(-1).copy_(pool[:count])

    def alone(self, step: Callable[[], object]) -> Callable[[], object]:
        """Run the step, and return a function that makes its copies to another tensor."""
        step()  # the pools have their sizes then
        sources: list[Tensor] = []
        self._noted = sources
        step()
        self._noted = None
        spare = {x.dtype: torch.empty_like(max((y for y in sources if y.dtype == x.dtype), key=len)) for x in sources}

        def copy() -> None:
            for x in sources:
                spare[x.dtype][: len(x)].copy_(x)

        return copy
