"""The behaviour that all commands share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringspan.cli import main

SOURCE = Path(__file__).parents[2] / "src"


def test_a_closed_pipe_is_not_an_error() -> None:
    command = [sys.executable, "-m", "ringspan", "doctor", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")


def test_without_rich_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(main, "find_spec", lambda name: None)
    assert main.main(["doctor"]) == 2
    install = "install it with: pip install 'ringspan[cli]' (in a clone: pip install '.[cli]')"
    assert capsys.readouterr() == ("", f"ringspan: the command line needs rich; {install}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["plan", "--mask", "causal()", "--world", "8", "--rank", "x"],
            "ringspan plan: argument --rank: invalid int value: 'x' (see ringspan plan --help)",
        ),
        (["bench"], "ringspan bench: the following arguments are required: benchmark (see ringspan bench --help)"),
        ([], "ringspan: the following arguments are required: command (see ringspan --help)"),
        (
            ["plan", "--mask", "causal()", "--wrld", "8"],
            "ringspan plan: unrecognized arguments: --wrld 8; did you mean --world? (see ringspan plan --help)",
        ),
        (["doctor", "--foo"], "ringspan doctor: unrecognized arguments: --foo (see ringspan doctor --help)"),
        (["bench", "pack", "more"], "ringspan bench pack: unrecognized arguments: more (see ringspan bench pack --help)"),
    ],
)
def test_errors_of_the_parser_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main.main(arguments)
    assert capsys.readouterr() == ("", f"{said}\n")
