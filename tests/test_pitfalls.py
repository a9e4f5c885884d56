"""The example of docs/pitfalls.md runs unchanged on two processes and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, get_args

from ringspan.frontends.parity import CAUSES, Cause
from tests.conftest import Pools

PAGE = Path(__file__).parent.parent / "docs" / "pitfalls.md"
TEXT = PAGE.read_text(encoding="utf-8")


def run_example(rank: int, block: str) -> tuple[Any, str]:
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, str(PAGE), "exec"), names)
    return names["parity"].cause, printed.getvalue()


def test_the_example_prints_what_the_page_says(pools: Pools) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    for cause, printed in pools(2).run(run_example, block):
        assert cause == "positions"
        # Wrapped in the page; figures depend on the random numbers of the PyTorch version.
        assert _words(printed) == _words(TEXT.split("```\n")[2]), printed


def _words(text: str) -> list[str]:
    return re.sub(r"\d+(\.\d+(e[+-]\d+)?)?|-+", "#", text).split()


def test_every_cause_is_on_the_page() -> None:
    assert set(get_args(Cause)) == set(CAUSES)
    for cause in CAUSES:
        assert f"| `{cause}` |" in TEXT
