"""Results by key, bounded in number and in bytes. Both caches keep theirs in it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class BoundedResults(Generic[K, T]):
    """The last results that were used, each with its bytes. The least recently used is evicted first, the last one
    never.

    May be used from several threads. Results are freed when the lock is released: what runs when a tensor is freed may
    use the cache.
    """

    def __init__(self, max_results: int, max_bytes: int) -> None:
        self.max_results, self.max_bytes = max_results, max_bytes
        self._results: OrderedDict[K, tuple[T, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> tuple[T, int] | None:
        """Return a result and its bytes, or None."""
        with self._lock:
            found = self._results.get(key)
            if found is not None:
                self._results.move_to_end(key)
        return found

    def put(self, key: K, result: T, size: int) -> None:
        """Keep a result of this many bytes, in place of an earlier one with this key."""
        evicted = []
        with self._lock:
            if key in self._results:
                evicted.append(self._results.pop(key))
            self._results[key] = result, size
            self._bytes += size - sum([bytes_of for _, bytes_of in evicted])
            while len(self._results) > self.max_results or (self._bytes > self.max_bytes and len(self._results) > 1):
                evicted.append(self._results.popitem(last=False)[1])
                self._bytes -= evicted[-1][1]

    def items(self) -> list[tuple[K, T]]:
        """Return all keys and results, the most recently used last."""
        with self._lock:
            return [(key, result) for key, (result, _) in self._results.items()]

    def clear(self) -> None:
        with self._lock:
            evicted, self._results, self._bytes = self._results, OrderedDict(), 0
        del evicted
