"""Progress on stderr: a bar on a terminal, a line every ten seconds in a file."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

import rich.progress

from ringspan.cli.console import console_for

# The time before the first line of a file, and between two lines.
LOG_SECONDS = 10.0


class Progress:
    """``with Progress(100) as bar: bar.update(37, "the current step")``. May be used from several threads."""

    def __init__(self, total: int = 1, *, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.total = total
        self._bar = _bar(self.stream) if self.stream.isatty() else None
        self._task = self._bar.add_task("", total=max(1, total)) if self._bar else None
        self._lock = threading.Lock()
        self._last_line = ""
        self._written = time.monotonic()
        self._has_written = False

    def update(self, done: int, text: str = "", *, total: int | None = None) -> None:
        with self._lock:
            self.total = self.total if total is None else total
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, completed=done, total=max(1, self.total), description=text)
                return
            self._last_line = f"{min(1.0, done / max(1, self.total)):4.0%}  {text}".rstrip()
            if time.monotonic() - self._written >= LOG_SECONDS:
                self._write_line()

    def on_progress(self, done: int, total: int, text: str) -> None:
        """Call :meth:`update` in the form in which benchmarks call it."""
        self.update(done, text, total=total)

    def print(self, text: str) -> None:
        """Print a line to stdout that does not mix with the bar."""
        if self._bar is not None:
            self._bar.stop()
        print(text, flush=True)
        if self._bar is not None:
            self._bar.start()

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._has_written and self._last_line:  # a file that shows a start also shows the end
            self._write_line()

    def _write_line(self) -> None:
        self.stream.write(f"{self._last_line}\n")
        self.stream.flush()
        self._last_line = ""
        self._written = time.monotonic()
        self._has_written = True


def _bar(stream: TextIO) -> rich.progress.Progress:
    columns = (
        rich.progress.BarColumn(28),
        rich.progress.TaskProgressColumn(),
        rich.progress.TextColumn("{task.description}", markup=False),
    )
    return rich.progress.Progress(*columns, console=console_for(stream), redirect_stdout=False, redirect_stderr=False)
