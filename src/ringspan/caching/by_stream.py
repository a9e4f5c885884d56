"""A bounded cache of tensors on a device, keyed by CUDA stream as well as by arguments.

A copy to a GPU runs asynchronously: later work on the same stream finds it complete, work on another stream may not.
The caching allocator also reuses freed memory in the order of the stream that allocated it. Therefore a tensor cached
on one stream is never handed to another.

A CUDA graph is the exception. ``torch.cuda.graph`` synchronizes the device and then captures on a stream of its own. A
tensor that is made during capture is uninitialized until the first replay. Therefore a capture receives what any stream
has cached before. These entries are then kept until ``ringspan.clear_caches()``, because the graph reads their memory
at every replay.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from ringspan.caching.registry import on_clear_caches
from ringspan.errors import KernelError
from ringspan.torch_private.cuda_streams import current_raw_stream
from ringspan.torch_private.dispatch_modes import dispatch_mode_depth, dispatch_mode_stack

F = TypeVar("F", bound=Callable[..., Any])

# The index of a device and the address of a stream; None for a CPU, which has no streams.
StreamKey = tuple[int, int] | None
CAPTURING: StreamKey = (-1, -1)

NOT_PREPARED = (
    "attention is being captured in a CUDA graph, but index tensors of this call are not cached on the device yet: run the "
    "same call once before capture (warm-up)"
)
NOT_CAPTURABLE = (
    "attention is being captured in a CUDA graph, but this kernel copies a mask from the host in every call, which cannot be "
    'captured: use backend="fa4", "flash" or "flex"'
)


def cache_by_stream(maxsize: int) -> Callable[[F], F]:
    """Cache the results of functions whose last argument is the device on which they make tensors.

    ``cache_clear()`` of the decorated function empties the cache; with ``keep_graphs=True`` it keeps what CUDA graphs
    read.
    """

    def decorate(make_tensors: F) -> F:
        by_stream = OrderedDict[tuple[StreamKey, tuple[Any, ...]], Any]()
        in_graphs = dict[tuple[Any, ...], Any]()
        lock = threading.Lock()

        @wraps(make_tensors)
        def cached(*args: Any) -> Any:
            stream = stream_key(args[-1])
            if stream == CAPTURING:
                return cached_for_graph(args)
            if dispatch_mode_depth() and not _are_real(dispatch_mode_stack()):
                return make_tensors(*args)  # they may be FakeTensors: do not keep them
            key = (stream, args)
            with lock:
                value = by_stream.get(key)
                if value is not None:
                    by_stream.move_to_end(key)
            if value is not None:
                if dispatch_mode_depth():
                    modes: Sequence[Any] = dispatch_mode_stack()
                    for mode in modes:
                        mode.record_constants(value, partial(keep, key, value))
                return value
            value = make_tensors(*args)
            keep(key, value)
            return value

        def keep(key: tuple[StreamKey, tuple[Any, ...]], value: Any) -> None:
            with lock:
                by_stream[key] = value
                if len(by_stream) > maxsize:
                    by_stream.popitem(last=False)

        def cached_for_graph(args: tuple[Any, ...]) -> Any:
            with lock:
                if args not in in_graphs:
                    in_graphs.update((others, value) for (_, others), value in by_stream.items() if others == args)
                if args in in_graphs:
                    return in_graphs[args]
            raise KernelError(NOT_PREPARED)

        def cache_clear(*, keep_graphs: bool = False) -> None:
            with lock:
                by_stream.clear()
                if not keep_graphs:
                    in_graphs.clear()

        cached.cache_clear = cache_clear  # type: ignore[attr-defined]
        _caches.add(cached)
        return cached  # type: ignore[return-value]

    return decorate


def clear_stream_caches() -> None:
    for cache in list(_caches):
        cache.cache_clear()


_caches: WeakSet[Any] = WeakSet()
on_clear_caches(clear_stream_caches)


def copy_to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copy an array from the host to a device without blocking the host."""
    # Cached tensors are used again in other calls: one made in inference mode could not take part in a backward pass.
    with torch.inference_mode(False):
        x = torch.tensor(array, device="cpu")
        if device.type != "cuda":
            return x.to(device)
        if stream_key(device) == CAPTURING:  # what is cached was made before the capture
            raise KernelError(NOT_CAPTURABLE)
        return x.pin_memory().to(device, non_blocking=True)


def _are_real(modes: Sequence[Any]) -> bool:
    """Return whether tensors that are made under these dispatch modes are real ones. Only our own recorder says so; it
    is told about the constants that a pass uses, and how to cache them again."""
    return all(hasattr(mode, "record_constants") for mode in modes)


def stream_key(device: torch.device) -> StreamKey:
    """Return the key of the current stream of a device.

    It has the address of the stream, because creating a stream object takes as long as a kernel launch.
    """
    if device.type != "cuda":
        return None
    if torch.cuda.is_current_stream_capturing():
        return CAPTURING
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, current_raw_stream(index)
