"""A bounded cache of tensors on a device, keyed by CUDA stream as well as by arguments.

A copy to a GPU runs asynchronously: later work on the same stream finds it complete, work on another stream may not.
The caching allocator also reuses freed memory in the order of the stream that allocated it. Therefore a tensor cached
on one stream is never handed to another. For the same reason a tensor may be evicted while kernels that read it still
run: they were launched on the stream that made it, so its memory is only reused by later work on that stream.

A CUDA graph is the exception. ``torch.cuda.graph`` synchronizes the device and then captures on a stream of its own. A
tensor that is made during capture is uninitialized until the first replay. Therefore a capture receives what any stream
has cached before. These entries are then kept until ``ringspan.clear_caches()``, because the graph reads their memory
at every replay, and count towards no limit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
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

MAX_BYTES = 2**30  # of the tensors in one cache

# The index of a device and the address of a stream; None for a CPU, which has no streams.
StreamKey = tuple[int, int] | None
CAPTURING: StreamKey = (-1, -1)

NOT_PREPARED = (
    "attention is being captured in a CUDA graph, but index tensors of this call are not cached on the device yet: run the "
    "same call once before capture (warm-up). If it was run, they exceed the limit of their cache, and it cannot be captured"
)
NOT_CAPTURABLE = (
    "attention is being captured in a CUDA graph, but this kernel copies a mask from the host in every call, which cannot be "
    'captured: use backend="fa4", "flash" or "flex"'
)


def cache_by_stream(maxsize: int, *, max_bytes: int = MAX_BYTES) -> Callable[[F], F]:
    """Cache the results of functions whose last argument is the device on which they make tensors.

    Keeps up to ``maxsize`` results, and tensors of up to ``max_bytes`` together, but always the last result.

    ``cache_clear()`` of the decorated function empties the cache; with ``keep_graphs=True`` it keeps what CUDA graphs
    read.
    """

    def decorate(make_tensors: F) -> F:
        by_stream = OrderedDict[tuple[StreamKey, tuple[Any, ...]], tuple[Any, int]]()  # results and their bytes
        in_graphs = dict[tuple[Any, ...], Any]()
        lock = threading.Lock()
        total = 0  # bytes in by_stream

        @wraps(make_tensors)
        def cached(*args: Any) -> Any:
            stream = stream_key(args[-1])
            if stream == CAPTURING:
                return cached_for_graph(args)
            if dispatch_mode_depth() and not _are_real(dispatch_mode_stack()):
                return make_tensors(*args)  # they may be FakeTensors: do not keep them
            key = (stream, args)
            with lock:
                found = by_stream.get(key)
                if found is not None:
                    by_stream.move_to_end(key)
            if found is not None:
                value, size = found
                if dispatch_mode_depth():
                    modes: Sequence[Any] = dispatch_mode_stack()
                    for mode in modes:
                        mode.record_constants(value, partial(keep, key, value, size))
                return value
            value = make_tensors(*args)
            keep(key, value, bytes_of_tensors(value))
            return value

        def keep(key: tuple[StreamKey, tuple[Any, ...]], value: Any, size: int) -> None:
            nonlocal total
            evicted = []  # freed after the lock is released, because weakref callbacks may use the cache
            with lock:
                evicted.append(by_stream.pop(key, (None, 0)))
                by_stream[key] = value, size
                total += size - evicted[0][1]
                while len(by_stream) > maxsize or (total > max_bytes and len(by_stream) > 1):
                    evicted.append(by_stream.popitem(last=False)[1])
                    total -= evicted[-1][1]

        def cached_for_graph(args: tuple[Any, ...]) -> Any:
            with lock:
                if args not in in_graphs:
                    in_graphs.update((others, value) for (_, others), (value, _) in by_stream.items() if others == args)
                if args in in_graphs:
                    return in_graphs[args]
            raise KernelError(NOT_PREPARED)

        def cache_clear(*, keep_graphs: bool = False) -> None:
            nonlocal total
            freed: list[dict[Any, Any]] = []  # after the lock is released, as in `keep`
            with lock:
                freed.append(dict(by_stream))
                by_stream.clear()
                total = 0
                if not keep_graphs:
                    freed.append(dict(in_graphs))
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


def bytes_of_tensors(value: Any) -> int:
    """Return the bytes of the storages of all tensors in nested containers and dataclasses, each storage once.

    >>> x = torch.zeros(10, dtype=torch.int64)
    >>> bytes_of_tensors((x, {"part": x[:5]}, [torch.zeros(3), 7]))
    92
    """
    storages = [x.untyped_storage() for x in _tensors_in(value)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for x in value.values():
            yield from _tensors_in(x)
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _tensors_in(x)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))


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
