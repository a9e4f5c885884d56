"""The result of a parity check, as a table, as JSON and as an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from ringspan.errors import ParityError
from ringspan.frontends.parity.causes import CAUSES, Cause

COLUMN_LIMIT = 120  # of the explanation

COLUMNS = {
    "stage": "stage",
    "compared": "compared",
    "differ": "differ",
    "name": "first difference",
    "tensor": "tensor",
    "error": "error",
    "ratio": "ratio",
    "ranks": "ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRow:
    """One stage of the comparison and its first difference. All fields after ``differ`` are empty if there is none."""

    stage: str
    """inputs, without cp, modules, loss or gradients"""
    compared: int
    differ: int
    name: str = ""
    """the module or parameter"""
    tensor: str = ""
    error: float | None = None
    """the largest difference, divided by the largest absolute value of the expected tensor"""
    ratio: str = ""
    """what the tensor is multiplied by, if it is a multiple of the expected one: ``×2`` or, by rank, ``×2, ×2.2``"""
    ranks: tuple[int, ...] = ()

    def cells(self) -> dict[str, str | int]:
        """Return the text of each column."""
        error = "" if self.error is None else f"{self.error:.1e}"
        ranks = ", ".join(map(str, self.ranks))
        return {**{key: getattr(self, key) for key in COLUMNS}, "error": error, "ranks": ranks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Whether a step over several ranks equals the step of one process. ``bool(parity)`` is ``parity.ok``.

    ``print(parity)`` shows the table, the probable cause and what to do.
    """

    ok: bool
    rows: tuple[ParityRow, ...]
    cause: Cause | None
    """a key of ``CAUSES``, None if there is no difference"""
    detail: str
    """where the cause was found, in words"""
    notes: tuple[str, ...]
    world: int
    dtype: str
    tolerance: float

    def __bool__(self) -> bool:
        return self.ok

    @property
    def explanation(self) -> str:
        """The probable cause and what to do, in words; empty if there is no difference."""
        if self.cause is None:
            return ""
        what, remedy = CAUSES[self.cause]
        where = f" ({self.detail})" if self.detail else ""
        return f"probable cause: {what}{where}.\nwhat to do: {remedy}."

    @property
    def headline(self) -> str:
        verdict = "equal to one process" if self.ok else "NOT equal to one process"
        return f"{self.world} ranks are {verdict}: compared in {self.dtype}, tolerance {self.tolerance:.0e}"

    def __str__(self) -> str:
        lines = [self.headline, *_table([row.cells() for row in self.rows])]
        for text in (*self.explanation.splitlines(), *(f"note: {note}" for note in self.notes)):
            lines += wrap(text, COLUMN_LIMIT, subsequent_indent="  ", break_long_words=False)
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "explanation": self.explanation})

    def check(self) -> None:
        """Raise :class:`ringspan.ParityError` if there is a difference."""
        if not self.ok:
            raise ParityError(str(self))


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    used = [key for key in COLUMNS if any(row[key] != "" for row in rows)]
    lines = [[COLUMNS[key] for key in used], *([str(row[key]) for key in used] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return [padded[0], "  ".join("-" * width for width in widths), *padded[1:]]
