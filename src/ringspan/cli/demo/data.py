"""The demo's data: functions of Python's standard library as bytes, packed end to end.

::

    <s>def dedent(text):...  <s>def nlargest(n, ...  <s>def cap      a pack: documents of uneven length, the last one cut
    def dedent(text):...  x  def nlargest(n, ...  x  def caps        labels: what comes next
    1111111111111111111...0  11111111111111111...0  11111110         weights: the last token of a document predicts nothing
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ringspan.errors import InputError

# 256 byte values, and a token at the start of each document.
BEGIN = 256
VOCABULARY = 257

# Pure Python modules that every supported Python has, with functions of many lengths.
MODULES = (
    *("bisect", "calendar", "colorsys", "contextlib", "copy", "csv", "dataclasses", "difflib", "fnmatch", "fractions"),
    *("functools", "glob", "graphlib", "heapq", "json/decoder", "json/encoder", "linecache", "pprint", "queue", "random"),
    *("reprlib", "sched", "shlex", "statistics", "string", "textwrap", "tokenize"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A function and its name."""

    name: str
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One training step's sequence: whole documents end to end, the last one cut where the sequence is full."""

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, labels and weights, each (1, length). Labels are shifted before the tokens are sharded."""
        tokens = torch.tensor([self.tokens])
        weights = torch.ones(tokens.shape)
        weights[:, torch.tensor(self.lengths).cumsum(0) - 1] = 0.0
        return tokens, tokens.roll(-1, dims=1), weights

    def document_of_token(self) -> Tensor:
        """Return the index of the document that each token belongs to."""
        return torch.repeat_interleave(torch.tensor(self.lengths))


def library_documents() -> tuple[Document, ...]:
    """Return every function and method of the modules above, one document each."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in (root / f"{module}.py" for module in MODULES) if path.is_file()]
    documents = tuple(document for path in paths for document in _functions(path, path.relative_to(root)))
    if not documents:
        raise InputError(f"there are no sources of the standard library in {root}: the demo needs a Python that includes them")
    return documents


def packs(documents: tuple[Document, ...], *, count: int, length: int, seed: int) -> tuple[Pack, ...]:
    """Draw ``count`` packs of ``length`` tokens. A document takes three quarters of a pack at most.

    Packs of the same document lengths would have the same mask, so such a pack is drawn again, up to a hundred times.
    """
    draw = random.Random(seed)
    made: list[Pack] = []
    seen: set[tuple[int, ...]] = set()
    for _ in range(count):
        for _ in range(100):
            pack = _pack(draw, documents, length)
            if pack.lengths not in seen:
                break
        made.append(pack)
        seen.add(pack.lengths)
    return tuple(made)


def _pack(draw: random.Random, documents: tuple[Document, ...], length: int) -> Pack:
    names: list[str] = []
    lengths: list[int] = []
    tokens: list[int] = []
    while len(tokens) < length:
        document = draw.choice(documents)
        limit = min(length - len(tokens), max(2, length * 3 // 4))
        piece = [BEGIN, *document.text][:limit]
        names.append(document.name)
        lengths.append(len(piece))
        tokens += piece
    return Pack(names=tuple(names), lengths=tuple(lengths), tokens=tuple(tokens))


def _functions(path: Path, relative: Path) -> Iterator[Document]:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    module = ".".join(relative.with_suffix("").parts)
    for outer in ast.parse(source).body:
        inside = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        prefix = f"{module}.{outer.name}" if isinstance(outer, ast.ClassDef) else module
        for node in inside:
            if isinstance(node, ast.FunctionDef):
                text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
                yield Document(f"{prefix}.{node.name}", text.encode())
