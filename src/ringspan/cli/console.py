"""Text and tables on stdout, by rich: coloured on a terminal, plain text of any width in a file or pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.box import Box
from rich.console import Console, RenderableType
from rich.table import Table

# A header, a line of dashes, and rows. Columns are separated by spaces.
RULED = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
# Columns of a file or pipe: enough that no line is wrapped.
PLAIN_WIDTH = 100_000


def console_for(stream: TextIO) -> Console:
    is_terminal = stream.isatty()
    width = None if is_terminal else PLAIN_WIDTH
    return Console(file=stream, width=width, force_terminal=is_terminal, highlight=False, markup=False, emoji=False)


def show(*renderables: RenderableType) -> None:
    """Print to stdout, without spaces at the end of lines."""
    for renderable in renderables:
        console = console_for(sys.stdout)
        with console.capture() as captured:
            console.print(renderable, soft_wrap=isinstance(renderable, str))
        print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def show_error(text: str) -> None:
    """Print to stderr, in red on a terminal."""
    console_for(sys.stderr).print(text, style="red", soft_wrap=True)


def table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], *, total: Mapping[str, Any] | None = None) -> Table:
    """Return a table of the columns (key -> title) that any row has a value for. Columns of numbers are aligned to the
    right.

    ``total`` is a last row below a line.
    """
    made = Table(box=RULED, show_edge=False, pad_edge=False, show_footer=total is not None)
    used = {key: title for key, title in columns.items() if any(key in row for row in rows)}
    for key, title in used.items():
        values = [row[key] for row in rows if row.get(key) not in (None, "")]
        made.add_column(
            title,
            footer="" if total is None else str(total.get(key, "")),
            justify="right" if values and all(_is_figure(value) for value in values) else "left",
            overflow="fold",
        )
    for row in rows:
        made.add_row(*("" if row.get(key) is None else str(row[key]) for key in used))
    return made


def _is_figure(value: object) -> bool:
    """Return whether a value is a number, alone or with a unit as in ``1.5 GiB``."""
    text = str(value)
    return text == "–" or text[:1].isdigit() or (text[:1] == "-" and text[1:2].isdigit())
