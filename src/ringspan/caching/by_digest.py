"""Remember what was planned: a bounded cache whose keys are digests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Remembered(Generic[P, T]):
    """A function that looks its arguments up before it computes.

    Arguments with a digest (masks, layouts) count by digest and name, not by equality: equal masks can be written in different
    bands, and a plan must follow from its arguments alone, not from what this process happened to plan before. May be called
    from several threads.
    """

    def __init__(self, function: Callable[P, T], size: int) -> None:
        self._function, self._size = function, size
        self._known: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()
        wraps(function)(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        key = tuple(_key(x) for x in (*args, *kwargs.items()))
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        # Not under the lock: a thread that plans ahead must not hold up one that looks something up.
        result = self._function(*args, **kwargs)
        with self._lock:
            self._known[key] = result
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return result

    def forget(self) -> None:
        with self._lock:
            self._known.clear()


def remember(size: int) -> Callable[[Callable[P, T]], Remembered[P, T]]:
    """Keep the last ``size`` results."""
    return lambda function: Remembered(function, size)


def _key(x: Any) -> Hashable:
    return (x.digest, x.name) if hasattr(x, "digest") else x
