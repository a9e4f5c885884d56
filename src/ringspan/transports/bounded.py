"""Calls that may never return, as those of a store whose host cannot be reached, with a time limit."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")

EXIT_LIMIT = 4.0  # seconds to wait for running calls when the interpreter ends


class BoundedCalls:
    """Runs functions one at a time, each in a thread, and waits for at most ``seconds``.

    A function that takes longer goes on in its thread. Until it has returned, all calls raise RuntimeError.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], T]) -> T:
        """Return the result of the function, or raise its RuntimeError or OSError."""
        if not self._lock.acquire(timeout=self._seconds):
            raise RuntimeError(f"{self._what} does not answer")
        try:
            if self._thread is not None and self._thread.is_alive():
                raise RuntimeError(f"{self._what} does not answer")
            results: list[T] = []
            errors: list[Exception] = []

            def call() -> None:
                try:
                    results.append(function())
                except Exception as error:
                    errors.append(error)

            self._thread = threading.Thread(target=call, name="ringspan-store", daemon=True)
            _threads.add(self._thread)
            self._thread.start()
            self._thread.join(self._seconds)
            if errors:
                raise errors[0]
            if not results:
                raise RuntimeError(f"{self._what} has not answered for {self._seconds:g} s")
            return results[0]
        finally:
            self._lock.release()


_threads: WeakSet[threading.Thread] = WeakSet()


def _await_threads() -> None:
    """Wait for running calls, before the interpreter ends. One that returned from C++ later would abort the process."""
    end = time.monotonic() + EXIT_LIMIT
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(_await_threads)
