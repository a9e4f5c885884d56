"""Calls with a time limit."""

from __future__ import annotations

import threading
import time

import pytest

from ringspan.transports.bounded import BoundedCalls


def test_results_and_errors_are_passed_on() -> None:
    store = BoundedCalls("the store", 5.0)
    assert store.run(lambda: 3) == 3
    with pytest.raises(OSError, match="no route"):
        store.run(lambda: raise_error(OSError("no route")))
    assert store.run(lambda: 4) == 4


def raise_error(error: Exception) -> int:
    raise error


def test_a_call_that_does_not_return_raises_at_the_limit_and_until_it_returns() -> None:
    store, returns = BoundedCalls("the store", 0.2), threading.Event()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the store has not answered for 0\.2 s"):
        store.run(returns.wait)
    with pytest.raises(RuntimeError, match="the store does not answer"):
        store.run(lambda: 3)
    assert time.monotonic() - start < 5.0
    returns.set()
    time.sleep(0.3)
    assert store.run(lambda: 3) == 3
