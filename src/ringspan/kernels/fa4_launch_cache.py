"""A cache of launches of FlashAttention-4's forward pass, which avoids the host code of its forward function.

The compiled kernel that the forward function launches, and its arguments, depend only on the shapes of the tensors and
on the options of the call. The forward function takes several times as long to find them as to launch the kernel.
Therefore the first call with given shapes and options is recorded, and later calls replay its launch with other tensors
in the same places::

    first call     forward(q, k, v, options)   ->  kernel(q, k, v, out, lse, 0.088, None, …)      recorded
    later calls                                    kernel(Q, K, V, OUT, LSE, 0.088, None, …)

A replay runs on the current stream: the compiled kernel takes it from the TVM-FFI environment at every launch. A call
is never replayed if it launches several kernels, passes keyword arguments, or passes an object that the forward
function made for it. Releases that pass the stream as an argument are therefore not replayed, and neither are releases
that keep their compiled kernels elsewhere.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.torch_private.flash_attention_4 import COMPILE_CACHE
from ringspan.torch_private.pytree import tree_leaves

# The most launches to keep. Calls differ by shapes and windows, and every packed batch of documents has new ones. When
# the cache is full, the launch that was recorded first is removed (FIFO), even if it was replayed since.
MAX_CACHED = 512
# The forward function copies tensors whose address is no multiple of this many bytes, because its kernels require it.
ALIGNMENT = 16

# Types of arguments that are constants of the recorded launch.
CONSTANT_TYPES = (bool, int, float, str, type(None))


class Launch(NamedTuple):
    """A compiled kernel and the arguments with which it was launched."""

    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    keyword_arguments: dict[str, Any]


class ReplayableLaunch(NamedTuple):
    """A compiled kernel and its arguments.

    ``tensor_arguments`` has pairs of (index of an argument, index of its tensor in q, k, v, out, lse).
    """

    kernel: Callable[..., Any]
    arguments: list[Any]
    tensor_arguments: list[tuple[int, int]]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]

    def replay(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(self.out_shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=q.device)
        arguments, tensors = self.arguments.copy(), (q, k, v, out, lse)
        for argument_index, tensor_index in self.tensor_arguments:
            arguments[argument_index] = tensors[tensor_index]
        self.kernel(*arguments)
        return out, lse


class LaunchCache:
    """Calls ``forward_function(q, k, v, **options) -> (out, lse, …)``, or replays what it launched before."""

    def __init__(self, forward_function: Callable[..., Any]) -> None:
        self._forward_function = forward_function
        self._lock = threading.Lock()
        self._launches: OrderedDict[Hashable, ReplayableLaunch | None] = OrderedDict()  # None: cannot be replayed

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, shared: Sequence[Tensor] = (), **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse).

        ``shared`` has the tensors among the options that are the same objects in every such call.
        """
        q, k, v = (x.detach() if x.requires_grad else x for x in (q, k, v))
        if any(x.data_ptr() % ALIGNMENT for x in (q, k, v)):
            return self._call_forward_function(q, k, v, options)
        # A tensor's id is unique while the tensor lives, and a recorded launch keeps its arguments alive.
        values = tuple(id(x) if isinstance(x, Tensor) else x for x in options.values())
        key = (q.device, q.dtype, *((x.shape, x.stride()) for x in (q, k, v)), *options, *values)
        try:
            launch = self._launches[key]
        except KeyError:
            return self._record(key, q, k, v, shared, options)
        return self._call_forward_function(q, k, v, options) if launch is None else launch.replay(q, k, v)

    def _call_forward_function(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        # The number of values it returns has changed from release to release; the first two have not.
        out, lse, *_ = self._forward_function(q, k, v, **options)
        return out, lse

    def _record(
        self, key: Hashable, q: Tensor, k: Tensor, v: Tensor, shared: Sequence[Tensor], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if not hasattr(self._forward_function, COMPILE_CACHE):
            return self._call_forward_function(q, k, v, options)
        with self._lock:
            with _record_launches(self._forward_function) as launches:
                out, lse = self._call_forward_function(q, k, v, options)
            self._launches[key] = _make_replayable_launch(launches, (q, k, v, out, lse), shared)
            if len(self._launches) > MAX_CACHED:
                self._launches.popitem(last=False)
        return out, lse


def _make_replayable_launch(
    launches: list[Launch], tensors: Sequence[Tensor], shared: Sequence[Tensor]
) -> ReplayableLaunch | None:
    """Return the launch of a call, or None if it cannot be replayed with other tensors."""
    if len(launches) != 1 or launches[0].keyword_arguments or not all(x.is_contiguous() for x in tensors[3:]):
        return None
    arguments = list(launches[0].arguments)
    tensor_arguments = []
    for argument_index, argument in enumerate(arguments):
        is_tensor = isinstance(argument, Tensor)
        matches = [tensor_index for tensor_index, x in enumerate(tensors) if is_tensor and _is_same(argument, x)]
        if len(matches) == 1:
            tensor_arguments.append((argument_index, matches[0]))
            arguments[argument_index] = None  # else the recorded launch would keep the tensor alive
        elif not all(isinstance(x, CONSTANT_TYPES) or any(x is y for y in shared) for x in tree_leaves(argument)):
            return None  # an unknown tensor, one that matches two of ours, or a stream, which may differ next time
    if len(tensor_arguments) != len(tensors):
        return None
    out, lse = tensors[3:]
    return ReplayableLaunch(launches[0].kernel, arguments, tensor_arguments, tuple(out.shape), tuple(lse.shape))


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Return whether both tensors have the same memory, dtype, shape and strides."""
    return (
        first.data_ptr() == second.data_ptr()
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
    )


class _RecordingCache:
    """Replaces the forward function's cache of compiled kernels during one call. Records what this thread launches."""

    def __init__(self, kernels: Any) -> None:
        self.kernels, self._thread = kernels, threading.get_ident()
        self.launches: list[Launch] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self.kernels

    def __setitem__(self, key: Hashable, kernel: Any) -> None:
        self.kernels[key] = kernel

    def __getitem__(self, key: Hashable) -> Any:
        kernel = self.kernels[key]
        if threading.get_ident() != self._thread:
            return kernel

        def launch(*arguments: Any, **keyword_arguments: Any) -> Any:
            self.launches.append(Launch(kernel, arguments, keyword_arguments))
            return kernel(*arguments, **keyword_arguments)

        return launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)


@contextmanager
def _record_launches(forward_function: Any) -> Iterator[list[Launch]]:
    cache = _RecordingCache(getattr(forward_function, COMPILE_CACHE))
    setattr(forward_function, COMPILE_CACHE, cache)
    try:
        yield cache.launches
    finally:
        setattr(forward_function, COMPILE_CACHE, cache.kernels)
