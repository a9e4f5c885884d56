"""Replay launches of FlashAttention-4's forward pass without the package's host code.

The compiled program that the package launches, and its arguments, depend only on the shapes of the tensors and on the
options of the call. The package needs several times as long to find them as to launch. So the first call with given
shapes and options is recorded, and later ones replay its launch with other tensors in the same places::

    first call     package(q, k, v, options)   ->  program(q, k, v, out, lse, 0.088, None, …)      recorded
    later calls                                    program(Q, K, V, OUT, LSE, 0.088, None, …)

A call that launches several programs, or passes an object that the package made for it, is never replayed. Nothing is
replayed if a later release keeps its programs elsewhere.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.torch_private.flash_attention_4 import PROGRAMS
from ringspan.torch_private.pytree import tree_leaves

# Calls differ by shapes and windows. Every packed batch of documents has new ones.
MAX_CACHED = 512
# The package copies tensors whose address is no multiple of this many bytes, because its programs require it.
ALIGNMENT = 16

# Types of arguments that are constants of the recorded launch.
CONSTANT_TYPES = (bool, int, float, str, type(None))


class RecordedLaunch(NamedTuple):
    """A program and its arguments. ``positions``: (index of an argument, index of its tensor in q, k, v, out, lse)."""

    program: Callable[..., Any]
    arguments: list[Any]
    positions: list[tuple[int, int]]
    out: tuple[int, ...]
    lse: tuple[int, ...]

    def replay(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(self.out, dtype=q.dtype, device=q.device)
        lse = torch.empty(self.lse, dtype=torch.float32, device=q.device)
        arguments, tensors = self.arguments.copy(), (q, k, v, out, lse)
        for argument, number in self.positions:
            arguments[argument] = tensors[number]
        self.program(*arguments)
        return out, lse


class Relauncher:
    """The forward pass of the package, ``package(q, k, v, **options) -> (out, lse, …)``."""

    def __init__(self, package: Callable[..., Any]) -> None:
        self._package = package
        self._lock = threading.Lock()
        self._launches: OrderedDict[Hashable, RecordedLaunch | None] = OrderedDict()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, shared: Sequence[Tensor] = (), **options: Any
    ) -> tuple[Tensor, Tensor]:
        """``shared``: tensors among the options that are the same objects in every call with these options."""
        q, k, v = (x.detach() if x.requires_grad else x for x in (q, k, v))
        if any(x.data_ptr() % ALIGNMENT for x in (q, k, v)):
            return self._call_package(q, k, v, options)
        # A tensor's id is unique while the tensor lives, and a recorded launch keeps its arguments alive.
        values = tuple(id(x) if isinstance(x, Tensor) else x for x in options.values())
        key = (q.device, q.dtype, *((x.shape, x.stride()) for x in (q, k, v)), *options, *values)
        try:
            launch = self._launches[key]
        except KeyError:
            return self._record(key, q, k, v, shared, options)
        return self._call_package(q, k, v, options) if launch is None else launch.replay(q, k, v)

    def _call_package(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        # The number of values it returns has changed from release to release; the first two have not.
        out, lse, *_ = self._package(q, k, v, **options)
        return out, lse

    def _record(
        self, key: Hashable, q: Tensor, k: Tensor, v: Tensor, shared: Sequence[Tensor], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if not hasattr(self._package, PROGRAMS):
            return self._call_package(q, k, v, options)
        with self._lock:
            with _recording(self._package) as launched:
                out, lse = self._call_package(q, k, v, options)
            self._launches[key] = _replayable(launched, (q, k, v, out, lse), shared)
            if len(self._launches) > MAX_CACHED:
                self._launches.popitem(last=False)
        return out, lse


def _replayable(launched: list[tuple[Any, Any]], tensors: Sequence[Tensor], shared: Sequence[Tensor]) -> RecordedLaunch | None:
    """The launch, if it can be replayed with other tensors."""
    if len(launched) != 1 or not all(x.is_contiguous() for x in tensors[3:]):
        return None
    program, arguments = launched[0][0], list(launched[0][1])
    positions = []
    for n, argument in enumerate(arguments):
        numbers = [i for i, x in enumerate(tensors) if isinstance(argument, Tensor) and _is_same(argument, x)]
        if len(numbers) == 1:
            positions.append((n, numbers[0]))
            arguments[n] = None  # else the record would keep the tensor alive
        elif not all(isinstance(x, CONSTANT_TYPES) or any(x is y for y in shared) for x in tree_leaves(argument)):
            return None  # an unknown tensor, one that matches two of ours, or a stream, which may differ next time
    if len(positions) != len(tensors):
        return None
    return RecordedLaunch(program, arguments, positions, tuple(tensors[3].shape), tuple(tensors[4].shape))


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same memory, dtype, shape and strides."""
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


class _RecordingCache:
    """Replaces the package's cache of programs for the time of one call, and records what this thread launches."""

    def __init__(self, programs: Any) -> None:
        self.programs, self._thread = programs, threading.get_ident()
        self.launched: list[tuple[Any, Any]] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self.programs

    def __setitem__(self, key: Hashable, program: Any) -> None:
        self.programs[key] = program

    def __getitem__(self, key: Hashable) -> Any:
        program = self.programs[key]
        if threading.get_ident() != self._thread:
            return program

        def launch(*arguments: Any) -> Any:
            self.launched.append((program, arguments))
            return program(*arguments)

        return launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.programs, name)


@contextmanager
def _recording(package: Any) -> Iterator[list[tuple[Any, Any]]]:
    cache = _RecordingCache(getattr(package, PROGRAMS))
    setattr(package, PROGRAMS, cache)
    try:
        yield cache.launched
    finally:
        setattr(package, PROGRAMS, cache.programs)
