"""Tables and text: nothing is cut off in a file, and nothing is read as markup."""

from __future__ import annotations

import pytest

from ringspan.cli.console import show, table

COLUMNS = {"name": "name", "size": "size", "unused": "unused"}
ROWS = [{"name": "x" * 300, "size": "1.5 GiB"}, {"name": "[red]y[/red] :cat:", "size": None}]


def test_a_table_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    show(table(COLUMNS, ROWS))
    assert capsys.readouterr().out.splitlines() == [
        f"{'name':300}      size",
        "-" * 310,
        f"{'x' * 300}   1.5 GiB",
        "[red]y[/red] :cat:",
    ]


def test_a_table_with_a_total(capsys: pytest.CaptureFixture[str]) -> None:
    show(table(COLUMNS, [{"name": "a", "size": 3}, {"name": "b", "size": 14}], total={"name": "all", "size": 17}))
    assert capsys.readouterr().out.splitlines() == [
        "name   size",
        "-----------",
        "a         3",
        "b        14",
        "-----------",
        "all      17",
    ]


def test_text_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    text = "documents([1, 2]) " * 40
    show(text)
    assert capsys.readouterr().out == f"{text.rstrip()}\n"
