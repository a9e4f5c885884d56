"""Tensors that are made once and used again, by each stream of a device for itself.

A copy to a GPU is under way while the host goes on, and work that comes later on the same stream finds it done. Work on another
stream may not; and memory that is given back is handed on in the order of the stream on which it was made. So what one stream
has made no other one is given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def per_stream(maxsize: int) -> Callable[[F], F]:
    """``lru_cache`` for functions whose last argument is the device on which they make tensors."""

    def decorate(make: F) -> F:
        @lru_cache(maxsize=maxsize)
        def made(stream: object, *args: Any) -> Any:
            return make(*args)

        @wraps(make)
        def find(*args: Any) -> Any:
            device = args[-1]
            return made(torch.cuda.current_stream(device) if device.type == "cuda" else None, *args)

        find.cache_clear = made.cache_clear  # type: ignore[attr-defined]
        return find  # type: ignore[return-value]

    return decorate
