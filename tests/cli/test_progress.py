"""The progress bar on a terminal, and lines in a file."""

from __future__ import annotations

from io import StringIO

import pytest

from ringspan.cli import progress
from ringspan.cli.progress import Progress


class Terminal(StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar() -> None:
    stream = Terminal()
    with Progress(10, stream=stream) as bar:
        bar.update(5, "halfway [through] documents([3, 4])")
        bar.update(10, "done")
    shown = stream.getvalue()
    assert "100%" in shown
    assert "done" in shown
    assert shown.endswith("\x1b[?25h")  # the cursor is visible again


def test_square_brackets_are_not_markup() -> None:
    stream = Terminal()
    with Progress(10, stream=stream) as bar:
        bar.update(5, "documents([3, 4]) [bold]")
    assert "documents([3, 4]) [bold]" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds_a_step", "lines"),
    [(0.0, []), (0.9, []), (1.0, ["100%  step 10"]), (4.0, [" 30%  step 3", " 60%  step 6", " 90%  step 9", "100%  step 10"])],
    ids=["at once", "in 9 seconds", "in 10 seconds", "in 40 seconds"],
)
def test_a_file_shows_lines_only_after_ten_seconds(
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


def test_without_an_update_a_file_stays_empty() -> None:
    stream = StringIO()
    with Progress(0, stream=stream):
        pass
    assert stream.getvalue() == ""


def test_lines_for_stdout_do_not_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Terminal()
    with Progress(2, stream=stream) as bar:
        bar.on_progress(1, 4, "a quarter")
        bar.print("a line")
    assert capsys.readouterr().out == "a line\n"
    assert "a line" not in stream.getvalue()
    assert "25%" in stream.getvalue()
