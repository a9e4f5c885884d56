"""A bounded cache of function results, keyed by the digests of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, update_wrapper
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakSet

from ringspan.caching.bounded import BoundedResults
from ringspan.caching.registry import on_clear_caches

MAX_BYTES = 16 * 2**20  # estimated, of the results in one cache

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class CachedFunction(Protocol[P, T_co]):
    """A function with a cache in front of it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...

    def cache_clear(self) -> None: ...


class DigestCache(Generic[P, T]):
    """A function with a cache of its results.

    An argument with a digest (a mask, a layout) is compared by its digest and name, not by ``==``. Equal masks can have
    different bands, and a plan must depend on its arguments only, not on what this process has planned before.
    """

    def __init__(self, function: Callable[P, T], maxsize: int, bytes_of: Callable[[T], int] = lambda result: 0) -> None:
        self._function, self._bytes_of = function, bytes_of
        self._results = BoundedResults[Hashable, T](maxsize, MAX_BYTES)
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        given: tuple[Any, ...] = (*args, *kwargs.values()) if kwargs else args
        # Written without a call for each argument: this runs in every step of an attention with a score_mod.
        key: Hashable = tuple([(x.digest, x.name) if hasattr(x, "digest") else x for x in given])
        if kwargs:
            key = key, tuple(kwargs)
        results = self._results
        with results.lock:
            found = results.by_key.get(key)
            if found is not None:
                results.by_key.move_to_end(key)
        if found is not None:
            return found[0]
        # Computed without a lock: a thread that plans ahead must not delay a lookup in another one.
        result = self._function(*args, **kwargs)
        results.put(key, result, self._bytes_of(result))
        return result

    def cache_clear(self) -> None:
        self._results.clear()


def cache_by_digest(
    maxsize: int, *, plain: bool = False, group: str = "", bytes_of: Callable[[Any], int] = lambda result: 0
) -> Callable[[Callable[P, T]], CachedFunction[P, T]]:
    """Cache the last ``maxsize`` results of a function.

    ``bytes_of`` estimates the memory of a result. With it, only results that fit into ``MAX_BYTES`` together are kept.

    The caches of a ``group`` can be cleared without the others.

    With ``plain`` no argument has a digest: the arguments themselves are the key. Such lookups are as fast as those of
    ``functools.lru_cache``, which does them. Their results are bounded by their number only.
    """

    def decorate(function: Callable[P, T]) -> CachedFunction[P, T]:
        cached: Any = lru_cache(maxsize)(function) if plain else DigestCache(function, maxsize, bytes_of)
        _caches.setdefault(group, WeakSet()).add(cached)
        return cast(CachedFunction[P, T], cached)

    return decorate


def clear_digest_caches(group: str | None = None) -> None:
    """Empty the caches of a group, or all caches by digest. Caches by stream are not emptied."""
    for caches in [*_caches.values()] if group is None else [_caches.get(group, WeakSet())]:
        for cache in list(caches):
            cache.cache_clear()


_caches: dict[str, WeakSet[CachedFunction[..., Any]]] = {}  # by group
on_clear_caches(clear_digest_caches)
