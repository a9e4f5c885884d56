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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial, update_wrapper
from typing import Any, TypeVar, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from ringspan.caching.bounded import BoundedResults
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


class StreamCache:
    """A function with a cache of its results. The last of its arguments is the device on which it makes tensors."""

    def __init__(self, make_tensors: Callable[..., Any], max_results: int, max_bytes: int) -> None:
        self._make_tensors = make_tensors
        self._results = BoundedResults[tuple[StreamKey, tuple[Any, ...]], Any](max_results, max_bytes)
        self._in_graphs: dict[tuple[Any, ...], Any] = {}
        update_wrapper(self, make_tensors)

    def __call__(self, *args: Any) -> Any:
        stream = stream_key(args[-1])
        if stream == CAPTURING:
            return self._for_graph(args)
        if dispatch_mode_depth() and not _are_real(dispatch_mode_stack()):
            return self._make_tensors(*args)  # they may be FakeTensors: do not keep them
        key = (stream, args)
        results = self._results
        with results.lock:
            found = results.by_key.get(key)
            if found is not None:
                results.by_key.move_to_end(key)
        if found is None:
            made = self._make_tensors(*args)
            results.put(key, made, bytes_of_tensors(made))
            return made
        value, size = found
        if dispatch_mode_depth():
            modes: Sequence[Any] = dispatch_mode_stack()
            for mode in modes:
                mode.record_constants(value, partial(results.put, key, value, size))
        return value

    def _for_graph(self, args: tuple[Any, ...]) -> Any:
        kept = self._in_graphs.get(args)
        if kept is None:
            made = [value for (_, others), value in self._results.items() if others == args]
            if not made:
                raise KernelError(NOT_PREPARED)
            kept = self._in_graphs.setdefault(args, made[-1])  # another thread may capture, too
        return kept

    def cache_clear(self, *, keep_graphs: bool = False) -> None:
        """Empty the cache. With ``keep_graphs`` keep what CUDA graphs read."""
        self._results.clear()
        if not keep_graphs:
            self._in_graphs.clear()


def cache_by_stream(maxsize: int, *, max_bytes: int = MAX_BYTES) -> Callable[[F], F]:
    """Cache the results of functions whose last argument is the device on which they make tensors.

    Keeps up to ``maxsize`` results, and tensors of up to ``max_bytes`` together, but always the last result.
    """

    def decorate(make_tensors: F) -> F:
        cached: Any = StreamCache(make_tensors, maxsize, max_bytes)
        _caches.add(cached)
        return cast(F, cached)

    return decorate


def clear_stream_caches() -> None:
    for cache in list(_caches):
        cache.cache_clear()


_caches: WeakSet[StreamCache] = WeakSet()
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
