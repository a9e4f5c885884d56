"""A launch of FlashAttention-4's forward pass once more, without the Python around it.

Which compiled program the package launches, and with what, follows from the shapes of the tensors and from the options of the
call; to find it out takes the package several times as long as the launch. So the first call of a kind is watched, and what it
launched is launched again for later ones, with other tensors in the same places::

    first call     package(q, k, v, options)   ->  program(q, k, v, out, lse, 0.088, None, …)      written down
    later calls                                    program(Q, K, V, OUT, LSE, 0.088, None, …)

A call that launches more than one program, or gives it anything of the package's own, is made as the package makes it, every
time. So is every call, should the package no longer keep its programs where it does today.
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

# Kinds of calls: shapes × windows. Packed documents bring new ones all the time.
MAX_CACHED = 512
# The package copies tensors that do not begin at a multiple of so many bytes. Programs count on it.
ALIGNMENT = 16

# Arguments that say the same in every call of a kind.
CONSTANT_TYPES = (bool, int, float, str, type(None))


class RecordedLaunch(NamedTuple):
    """A program, its arguments, and where among them the call's own tensors go: (argument, number in q, k, v, out, lse)."""

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
        """``shared`` are those tensors among the options that are the same ones in other calls of the kind."""
        q, k, v = (x.detach() if x.requires_grad else x for x in (q, k, v))
        if any(x.data_ptr() % ALIGNMENT for x in (q, k, v)):
            return self._call_package(q, k, v, options)
        # A tensor's id is its own as long as it lives, and a launch that is written down keeps its arguments alive.
        said = tuple(id(x) if isinstance(x, Tensor) else x for x in options.values())
        kind = (q.device, q.dtype, *((x.shape, x.stride()) for x in (q, k, v)), *options, *said)
        try:
            launch = self._launches[kind]
        except KeyError:
            return self._record(kind, q, k, v, shared, options)
        return self._call_package(q, k, v, options) if launch is None else launch.replay(q, k, v)

    def _call_package(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        # The number of values it returns has changed from release to release; the first two have not.
        out, lse, *_ = self._package(q, k, v, **options)
        return out, lse

    def _record(
        self, kind: Hashable, q: Tensor, k: Tensor, v: Tensor, shared: Sequence[Tensor], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if not hasattr(self._package, PROGRAMS):
            return self._call_package(q, k, v, options)
        with self._lock:
            with _recording(self._package) as launched:
                out, lse = self._call_package(q, k, v, options)
            self._launches[kind] = _replayable(launched, (q, k, v, out, lse), shared)
            if len(self._launches) > MAX_CACHED:
                self._launches.popitem(last=False)
        return out, lse


def _replayable(launched: list[tuple[Any, Any]], tensors: Sequence[Tensor], shared: Sequence[Tensor]) -> RecordedLaunch | None:
    """What was launched, if it can be launched again with other tensors."""
    if len(launched) != 1 or not all(x.is_contiguous() for x in tensors[3:]):
        return None
    program, arguments = launched[0][0], list(launched[0][1])
    positions = []
    for n, argument in enumerate(arguments):
        numbers = [i for i, x in enumerate(tensors) if isinstance(argument, Tensor) and _is_same(argument, x)]
        if len(numbers) == 1:
            positions.append((n, numbers[0]))
            arguments[n] = None  # else it would live as long as this
        elif not all(isinstance(x, CONSTANT_TYPES) or any(x is y for y in shared) for x in tree_leaves(argument)):
            return None  # a tensor of nobody's, or of two that were given the same memory; a stream, which may be another
    if len(positions) != len(tensors):
        return None
    return RecordedLaunch(program, arguments, positions, tuple(tensors[3].shape), tuple(tensors[4].shape))


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same part of memory, seen alike."""
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


class _RecordingCache:
    """Stands where the package keeps its programs, and writes down what this thread launches."""

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
    watch = _RecordingCache(getattr(package, PROGRAMS))
    setattr(package, PROGRAMS, watch)
    try:
        yield watch.launched
    finally:
        setattr(package, PROGRAMS, watch.programs)
