"""The progress bar, on a terminal and in a log."""

from __future__ import annotations

from io import StringIO

import pytest

from ringspan.cli import progress
from ringspan.cli.progress import Progress


class Terminal(StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class OldTerminal(Terminal):
    encoding = "latin-1"


@pytest.mark.parametrize(("stream", "half"), [(Terminal(), "█" * 14 + "░" * 14), (OldTerminal(), "#" * 14 + "." * 14)])
def test_a_terminal_gets_one_line_drawn_again_and_again(stream: Terminal, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "48")
    with Progress(10, stream=stream) as bar:
        bar.update(5, "halfway")
        bar.update(10, "a text that is far too long for a terminal of this width")
    first, second, last = stream.getvalue().split("\r")[1:]
    assert first == f"{half}  50%  halfway\x1b[K"
    assert second == last.removesuffix("\n")
    assert last.endswith("\n")
    assert "100%  a text" in second
    assert len(second.removesuffix("\x1b[K")) == 47


@pytest.mark.parametrize(
    ("seconds_a_step", "lines"),
    [(0.0, []), (0.9, []), (1.0, ["100%  step 10"]), (4.0, [" 30%  step 3", " 60%  step 6", " 90%  step 9", "100%  step 10"])],
    ids=["at once", "in 9 seconds", "in 10 seconds", "in 40 seconds"],
)
def test_a_log_gets_nothing_unless_it_takes_long(
    seconds_a_step: float, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    stream = StringIO()
    with Progress(10, stream=stream) as bar:
        for n in range(11):
            bar.update(n, f"step {n}")
            now += seconds_a_step
    assert stream.getvalue().splitlines() == lines


def test_nothing_is_said_of_nothing() -> None:
    stream = StringIO()
    with Progress(0, stream=stream):
        pass
    assert stream.getvalue() == ""
