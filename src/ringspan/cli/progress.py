"""Progress on stderr: on a terminal one line that is redrawn; elsewhere, where stderr may be taken for trouble, nothing, unless
it takes so long that whoever reads the log wants to know whether it still goes on."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

WIDTH = 28
# How long to wait between two drawings; before the first line of a log, and between two of them.
REDRAW_SECONDS = 0.05
LOG_SECONDS = 10.0


class Progress:
    """``with Progress(100) as bar: bar.update(37, "what is going on")``. May be called from several threads."""

    def __init__(self, total: int, *, stream: TextIO | None = None) -> None:
        self.total = max(1, total)
        self.stream = sys.stderr if stream is None else stream
        self.is_terminal = self.stream.isatty()
        self._lock = threading.Lock()
        self._shown = 0.0 if self.is_terminal else time.monotonic()
        self._last = ""
        self._has_shown = False

    def update(self, done: int, text: str = "") -> None:
        with self._lock:
            self._last = self._line(done, text)
            wait = REDRAW_SECONDS if self.is_terminal else LOG_SECONDS
            if time.monotonic() - self._shown >= wait:
                self._show()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            if self._last and (self.is_terminal or self._has_shown):  # what was begun is ended
                self._show()
            if self.is_terminal:
                self.stream.write("\n")
                self.stream.flush()

    def _show(self) -> None:
        if self.is_terminal:
            columns = shutil.get_terminal_size().columns
            # Carriage return, the line, and "erase to the end of the line".
            self.stream.write(f"\r{self._last[: columns - 1]}\x1b[K")
        else:
            self.stream.write(f"{self._last}\n")
            self._last = ""  # a log keeps its lines: none is written twice
        self.stream.flush()
        self._has_shown = True
        self._shown = time.monotonic()

    def _line(self, done: int, text: str) -> str:
        share = min(1.0, done / self.total)
        if not self.is_terminal:
            return f"{share:4.0%}  {text}".rstrip()
        full, empty = ("█", "░") if (getattr(self.stream, "encoding", None) or "").lower().startswith("utf") else ("#", ".")
        filled = round(share * WIDTH)
        return f"{full * filled}{empty * (WIDTH - filled)} {share:4.0%}  {text}".rstrip()
