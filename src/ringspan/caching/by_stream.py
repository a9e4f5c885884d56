"""Tensors that are made once and used again, by each stream of a device for itself.

A copy to a GPU is under way while the host goes on, and work that comes later on the same stream finds it done. Work on another
stream may not; and memory that is given back is handed on in the order of the stream on which it was made. So what one stream
has made no other one is given.

A CUDA graph is the exception. It is captured on a stream of its own, after the device has come to rest, and what is made in it
holds nothing until it is replayed. So it is given what any stream has made before, which from then on is kept for good.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ringspan.errors import KernelError

F = TypeVar("F", bound=Callable[..., Any])

# A device's number and a stream's address; of a CPU, which has none, None.
Stream = tuple[int, int] | None
CAPTURING: Stream = (-1, -1)

UNPREPARED = (
    "attention is being captured in a CUDA graph, but something has to be copied to the device for it first: run the same step "
    "once, just before it is captured"
)
NEVER = (
    "attention is being captured in a CUDA graph, but this kernel makes a mask anew in every call, which no graph can repeat: "
    'use backend="fa4", "flash" or "flex"'
)


def per_stream(maxsize: int) -> Callable[[F], F]:
    """``lru_cache`` for functions whose last argument is the device on which they make tensors."""

    def decorate(make: F) -> F:
        made = OrderedDict[tuple[Stream, tuple[Any, ...]], Any]()
        in_graphs = dict[tuple[Any, ...], Any]()
        lock = threading.Lock()

        @wraps(make)
        def find(*args: Any) -> Any:
            stream = _stream(args[-1])
            if stream == CAPTURING:
                return for_graph(args)
            if torch._C._len_torch_dispatch_stack():  # what is made while somebody looks may be no tensor but a likeness of one
                return make(*args)
            key = (stream, args)
            with lock:
                if key in made:
                    made.move_to_end(key)
                    return made[key]
            value = make(*args)
            with lock:
                made[key] = value
                if len(made) > maxsize:
                    made.popitem(last=False)
            return value

        def for_graph(args: tuple[Any, ...]) -> Any:
            with lock:
                if args not in in_graphs:
                    in_graphs.update((others, value) for (_, others), value in made.items() if others == args)
                if args in in_graphs:
                    return in_graphs[args]
            raise KernelError(UNPREPARED)

        find.cache_clear = made.clear  # type: ignore[attr-defined]
        return find  # type: ignore[return-value]

    return decorate


def on_device(numbers: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Numbers of the host on a device, without making the host wait for it."""
    # What is kept is used again in other calls: a tensor made in inference mode could never take part in a backward pass.
    with torch.inference_mode(False):
        x = torch.tensor(numbers, device="cpu")
        if device.type != "cuda":
            return x.to(device)
        if _stream(device) == CAPTURING:  # and what is kept was made before
            raise KernelError(NEVER)
        return x.pin_memory().to(device, non_blocking=True)


def _stream(device: torch.device) -> Stream:
    """The current stream of a device, by its address: an object for it takes as long to make as a launch."""
    if device.type != "cuda":
        return None
    if torch.cuda.is_current_stream_capturing():
        return CAPTURING
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, torch._C._cuda_getCurrentRawStream(index)
