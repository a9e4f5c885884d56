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
    use the cache. Both caches look a result up without a function of this class, since every call of attention does it
    several times::

        with results.lock:
            found = results.by_key.get(key)
            if found is not None:
                results.by_key.move_to_end(key)
    """

    def __init__(self, max_results: int, max_bytes: int) -> None:
        self.max_results, self.max_bytes = max_results, max_bytes
        self.by_key: OrderedDict[K, tuple[T, int]] = OrderedDict()
        self._bytes = 0
        self.lock = threading.Lock()

    def put(self, key: K, result: T, size: int) -> None:
        """Keep a result of this many bytes, in place of an earlier one with this key."""
        evicted = []
        with self.lock:
            if key in self.by_key:
                evicted.append(self.by_key.pop(key))
            self.by_key[key] = result, size
            self._bytes += size - sum([bytes_of for _, bytes_of in evicted])
            while len(self.by_key) > self.max_results or (self._bytes > self.max_bytes and len(self.by_key) > 1):
                evicted.append(self.by_key.popitem(last=False)[1])
                self._bytes -= evicted[-1][1]

    def items(self) -> list[tuple[K, T]]:
        """Return all keys and results, the most recently used last."""
        with self.lock:
            return [(key, result) for key, (result, _) in self.by_key.items()]

    def clear(self) -> None:
        with self.lock:
            evicted, self.by_key, self._bytes = self.by_key, OrderedDict(), 0
        del evicted
