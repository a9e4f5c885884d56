"""Masks as text: the expression that a user would write in Python, parsed without executing it.

::

    documents(file=lengths.txt) & window(4096)      calls of the constructors with literals, & | - ~ and brackets
    causal()                                        a relation: it has no length of its own
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ringspan.errors import MaskError, unknown_name
from ringspan.masks import table as tables
from ringspan.masks.causal import causal
from ringspan.masks.chunked import chunked
from ringspan.masks.documents import documents, look_cumulative
from ringspan.masks.full import full
from ringspan.masks.mask import Mask
from ringspan.masks.prefix import prefix
from ringspan.masks.table import MAX_LENGTH
from ringspan.masks.tree import tree
from ringspan.masks.window import sliding_window, window


def parse_mask(text: str) -> Mask:
    """Return the mask that an expression describes. Only calls of the constructors with literals and ``& | - ~`` are
    evaluated.

    >>> parse_mask("causal(6) & ~window(left=2)")
    <Mask causal(6) & ~window(left=2): 6 × 6, area 6, 1 band>
    """
    try:
        return _build(ast.parse(_with_quoted_paths(text), mode="eval").body, text)
    except MaskError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python's own message is about Python, not about masks
        counts = [(a, text.count(a), b, text.count(b)) for a, b in (("(", ")"), ("[", "]"))]
        unpaired = [f": it has {n} {a} and {m} {b}" for a, n, b, m in counts if n != m]
        raise MaskError(
            f"cannot read {text!r}{''.join(unpaired[:1])}. A mask looks like `documents([700, 324]) & window(128)`; the "
            "operators are & | - ~"
        ) from None


def _build(node: ast.expr, text: str) -> Mask:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _build(left, text) & _build(right, text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _build(left, text) | _build(right, text)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _build(left, text) - _build(right, text)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_build(operand, text)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            return _call(name, node)
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name) if name not in _CALLS:
            raise MaskError(unknown_name("mask", name, [*_CALLS]))
        case ast.Name(id=name):
            raise MaskError(f"a mask is written with brackets: {name}(), or {name}(…) with what it takes")
    part = ast.unparse(node)
    where = "" if part == text.strip() else f" in {text!r}"
    raise MaskError(f"not a mask: {part!r}{where}. Masks are {', '.join(_CALLS)}, joined by & | - ~ and brackets")


def _call(name: str, call: ast.Call) -> Mask:
    def value(node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise MaskError(f"{name} takes plain values, as 4096 or [700, 324]; not {ast.unparse(node)!r}") from None

    args, options = [value(arg) for arg in call.args], {str(word.arg): value(word.value) for word in call.keywords}
    try:
        _SIGNATURES[name].bind(*args, **options)  # its errors name the argument: "missing a required argument: 'chunk'"
        return _CALLS[name](*args, **options)
    except TypeError as error:
        form = f"documents({args})" if name == "documents" and len(args) > 1 and not options else _FORMS[name]
        raise MaskError(f"{ast.unparse(call)!r} does not fit what {name} takes: {error}. Write {form}") from None


def read_lengths(path: str) -> list[int]:
    """Return the lengths in a file: integers separated by spaces, commas or line ends. The rest of a line after ``#``
    is a comment."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MaskError(f"cannot read the lengths in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MaskError(f"{path} is not a text file: lengths are integers, one or many a line") from None
    found = []
    for number, line in enumerate(lines, start=1):
        for word in line.partition("#")[0].replace(",", " ").split():
            if not word.isdecimal():
                raise MaskError(f"{path}, line {number}: a length is an integer number of tokens, not {word[:40]!r}")
            found.append(int(word))
    if not found:
        raise MaskError(f"{path} holds no length: write integers, one or many a line")
    if look_cumulative(np.array(found)):
        raise MaskError(
            f"the numbers in {path} look like cumulative lengths ({found[0]}, {found[1]}, {found[2]}, …): write the length of "
            "each document. If they are lengths, leave out the empty first document"
        )
    return found


def _documents(lengths: Any = None, *, file: str | None = None, **options: Any) -> Mask:
    if file is None:
        return documents(lengths, **options)
    if lengths is not None:
        raise MaskError("documents() takes lengths or file=, not both")
    return documents(read_lengths(file), **options)


def _full(q_len: int | None = None, k_len: int | None = None) -> Mask:
    if q_len is not None:
        return full(q_len, k_len)
    if k_len is not None:
        raise MaskError("full() without q_len is a relation of any length: it takes no k_len")
    return Mask(tables.table((0, MAX_LENGTH, 0, MAX_LENGTH, -MAX_LENGTH, MAX_LENGTH)), None, None, name="full()")


def _with_quoted_paths(text: str) -> str:
    """Quote the path of ``file=path``, which may be written without quotes as in a shell."""
    return re.sub(r"""\bfile\s*=\s*([^\s"',()]+)""", lambda path: f"file={path[1]!r}", text.strip())


_CALLS: dict[str, Callable[..., Mask]] = {
    "full": _full,
    "causal": causal,
    "window": window,
    "sliding_window": sliding_window,
    "documents": _documents,
    "prefix": prefix,
    "chunked": chunked,
    "tree": tree,
    "from_bands": Mask.from_bands,
}

# What a call looks like, for errors.
_FORMS = {
    "full": "full(1024), or full() with --seq-len",
    "causal": "causal(1024), or causal() with --seq-len",
    "window": "window(left=128), or window(left=128, right=0)",
    "sliding_window": "sliding_window(4096)",
    "documents": "documents([700, 324]), with the length of each document, or documents(file=lengths.txt)",
    "prefix": "prefix(1024, 128), with the tokens of the sequence and of its prefix",
    "chunked": "chunked(1024, 128), with the tokens of the sequence and of a chunk",
    "tree": "tree([700, 200, 124], [-1, 0, 0]), with the length and the parent of each node",
    "from_bands": "from_bands([(0, 8, 0, 8, -8, 0)], 8), with bands (q0, q1, k0, k1, lo, hi) and the length",
}

_SIGNATURES = {name: inspect.signature(function) for name, function in _CALLS.items()}
_OF_FILE = inspect.signature(_documents).parameters["file"]
_SIGNATURES["documents"] = inspect.Signature([*inspect.signature(documents).parameters.values(), _OF_FILE])
