"""The memory of captured passes (:mod:`ringspan.engine.graph_replay`), and their capture.

All passes of a rank on one stream share a memory pool, in which each starts from the beginning::

    forward   | q | kv | keys of other ranks | out | …           of one plan
    backward  | q | out | lse | dout | kv | … | dq | dkv |       of the same plan, at the same addresses
    forward   | q | kv | …                                       of another plan

So the pool is as large as the largest pass, whatever the number of plans, and only one pass at a time may be in
progress: whoever holds ``busy``. PyTorch keeps the memory of a pool as long as a graph uses it, and nothing else
allocates from it. Therefore the tensors of a captured pass can be released after capture, and :meth:`GraphPool.alias`
makes tensors at their addresses that own no memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from ringspan.caching.registry import on_clear_caches
from ringspan.torch_private.cuda_graphs import forget_invalid_capture


class Graph(Protocol):
    """Captured launches."""

    def replay(self) -> None:
        """Launch them on the current stream."""


class GraphPool:
    """A memory pool of a device, and the stream on which graphs are captured."""

    def __init__(self, device: torch.device) -> None:
        self.busy = Lock()
        self.device = device
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None  # that is being captured
        self._first_graph: torch.cuda.CUDAGraph | None = None  # a pool that no graph uses could not be used again
        self._addresses: list[int] = []

    @property
    def is_capturing(self) -> bool:
        return self._graph is not None

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """Make the stream for captures the current one. Nothing is computed on it, but a capture sets seeds there."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def begin(self) -> None:
        """Begin to capture the launches of this thread on the current stream."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may allocate and synchronize meanwhile, as one that pins memory for a data loader.
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> Graph:
        """End the capture, and return the graph."""
        graph, self._graph = self._graph, None
        assert graph is not None, "no graph is being captured"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a rank may have no rows
            try:
                graph.capture_end()
            except BaseException:
                forget_invalid_capture(self.device.index, self._handle)
                raise
        self._first_graph = self._first_graph or graph
        return graph

    def abandon(self) -> None:
        """End a capture in which an error was raised, if there is one."""
        if self.is_capturing:
            with suppress(RuntimeError):  # the error that was raised before says more
                self.end()

    def allocate(self, size: int) -> Tensor:
        """Return this many bytes of the pool, which :meth:`free` releases. For use during capture.

        ``torch.empty`` would fill them in the graph if deterministic algorithms are enabled.
        """
        address = torch.cuda.caching_allocator_alloc(size, self.device, self._stream)
        self._addresses.append(address)
        return _bytes_at(address, size, self.device)

    def free(self) -> None:
        """Release what :meth:`allocate` returned. Aliases remain valid."""
        while self._addresses:
            torch.cuda.caching_allocator_delete(self._addresses.pop())

    def alias(self, x: Tensor) -> Tensor:
        """Return a tensor at the same address that does not own its memory."""
        storage = x.untyped_storage()
        if not storage.nbytes():
            return x
        memory = _bytes_at(storage.data_ptr(), storage.nbytes(), self.device)
        return memory.new_empty(0, dtype=x.dtype).set_(memory.untyped_storage(), x.storage_offset(), x.shape, x.stride())


class _DeviceMemory:
    """An array of bytes at an address of a device, for ``torch.as_tensor``."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (size,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


def _bytes_at(address: int, size: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_DeviceMemory(address, size), device=device)


# By stream and rank. Ranks in one process have passes in progress at the same time.
_pools: dict[Hashable, GraphPool] = {}
on_clear_caches(_pools.clear)


def pool_of(key: Hashable, device: torch.device) -> GraphPool:
    """Return the pool of a stream and a rank."""
    pool = _pools.get(key)
    if pool is None:
        pool = _pools.setdefault(key, GraphPool(device))
    return pool


def discard_pool(key: Hashable, pool: GraphPool) -> None:
    """Never use this pool again. Passes that were captured in it keep it."""
    if _pools.get(key) is pool:
        del _pools[key]
