"""Calls with a time limit."""

from __future__ import annotations

import subprocess
import sys
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


def test_the_interpreter_waits_for_a_call_that_is_about_to_return() -> None:
    program = """
import time
from ringspan.transports.bounded import BoundedCalls
try:
    BoundedCalls("the store", 0.1).run(lambda: (time.sleep(1.0), print("returned", flush=True)))
except RuntimeError as error:
    print(error, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["the store has not answered for 0.1 s", "returned"]
