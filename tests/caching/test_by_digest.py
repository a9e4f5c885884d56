"""The cache by digest: bounded, keyed by digests, safe when threads plan ahead."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import ringspan as rs
from ringspan.caching import by_digest
from ringspan.caching.by_digest import cache_by_digest, clear_digest_caches
from ringspan.masks import table as tables
from ringspan.plans import needed_rows


@pytest.mark.parametrize("plain", [False, True])
def test_the_least_recently_used_entry_is_evicted_first(plain: bool) -> None:
    asked = []

    @cache_by_digest(2, plain=plain)
    def double(x: int) -> int:
        asked.append(x)
        return 2 * x

    assert [double(x) for x in (1, 2, 1, 3, 1, 2)] == [2, 4, 2, 6, 2, 4]
    assert asked == [1, 2, 3, 2]


def test_a_lookup_does_not_wait_for_a_computation() -> None:
    begun, go_on = threading.Event(), threading.Event()

    @cache_by_digest(4)
    def slow(x: int) -> int:
        if x:
            begun.set()
            assert go_on.wait(60)
        return x

    slow(0)
    with ThreadPoolExecutor(1) as other:
        later = other.submit(slow, 1)
        assert begun.wait(60)
        assert slow(0) == 0
        go_on.set()
        assert later.result() == 1


def test_many_threads_share_a_cache_that_is_too_small() -> None:
    @cache_by_digest(3)
    def square(x: int) -> int:
        return x * x

    with ThreadPoolExecutor(8) as threads:
        asked = [n % 7 for n in range(20_000)]
        assert list(threads.map(square, asked, chunksize=100)) == [x * x for x in asked]


def in_two_bands(mask: rs.Mask) -> rs.Mask:
    """The same pairs, written in two bands."""
    n, _ = mask.lengths
    halves = np.concatenate([tables.intersect(mask.table, tables.table((a, b, 0, n, -n, n))) for a, b in ((0, 2), (2, n))])
    return rs.Mask(halves, n, n, name=mask.name)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_masks_are_compared_by_digest_and_name(by_keyword: bool) -> None:
    """Not by ==: else a result would depend on which of two equal masks came first."""

    @cache_by_digest(8)
    def bands(mask: rs.Mask) -> int:
        return len(mask)

    one = rs.causal(4)
    two = in_two_bands(one)
    assert one == two
    assert [bands(mask=x) if by_keyword else bands(x) for x in (one, two, one)] == [1, 2, 1]


@pytest.mark.parametrize("plain", [False, True])
def test_clear_caches_empties_it(plain: bool) -> None:
    @cache_by_digest(2, plain=plain)
    def fresh(x: int) -> object:
        return object()

    first = fresh(1)
    assert fresh(1) is first
    rs.clear_caches()
    assert fresh(1) is not first


@pytest.mark.parametrize("plain", [False, True])
def test_a_group_is_cleared_without_the_others(plain: bool) -> None:
    @cache_by_digest(2, plain=plain)
    def other(x: int) -> object:
        return object()

    @cache_by_digest(2, plain=plain, group="of this test")
    def grouped(x: int) -> object:
        return object()

    kept, cleared = other(1), grouped(1)
    clear_digest_caches("of this test")
    assert other(1) is kept
    assert grouped(1) is not cleared


def test_a_lookup_of_plain_arguments_costs_what_lru_cache_costs() -> None:
    """It is lru_cache itself, so there is nothing to time."""

    @cache_by_digest(2, plain=True)
    def double(x: int) -> int:
        return 2 * x

    assert type(double) is type(lru_cache(double))


def test_a_cache_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_digest, "MAX_BYTES", 10_000)
    made: list[int] = []

    @cache_by_digest(100, bytes_of=lambda x: x.nbytes)
    def zeros(n: int) -> np.ndarray[Any, Any]:
        made.append(n)
        return np.zeros(500 + n)

    for n in (0, 1, 0, 1):
        zeros(n)
    assert made == [0, 1]
    zeros(2)  # drops the first
    zeros(1)
    zeros(0)
    assert made == [0, 1, 2, 0]
    zeros(10_000)  # larger than the cache: kept alone
    zeros(10_000)
    assert made == [0, 1, 2, 0, 10_000]


def test_the_cache_of_needed_rows_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = 16
    monkeypatch.setattr(needed_rows._results, "max_bytes", 3 * 8 * world**2)  # type: ignore[attr-defined]
    masks = [rs.causal(64) & rs.window(left=n) for n in range(5)]
    layout = rs.plan(masks[0], world=world, rank=0, layout="contiguous").q_layout
    needed_rows.cache_clear()
    made = [needed_rows(mask, layout, layout) for mask in masks]
    kept = [needed_rows(mask, layout, layout) is rows for mask, rows in reversed([*zip(masks, made, strict=True)])]
    assert kept[:3] == [True] * 3
    assert kept[3] is False


def test_the_estimated_size_of_a_program_grows_with_its_bands() -> None:
    few, many = (rs.plan(rs.documents([1000 // n] * n), world=2, rank=0, layout="contiguous").program for n in (10, 500))
    assert 10 * few.approximate_bytes < many.approximate_bytes
