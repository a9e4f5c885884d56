"""Masks as text: the expression a user would write in Python, read without running any of it.

::

    documents(file=lengths.txt) & window(4096)      calls of the constructors with plain values, & | - ~ and brackets
    causal()                                        no length of its own: it is told one
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ringspan as rs
from ringspan.errors import MaskError, unknown_name
from ringspan.masks import MAX_LENGTH
from ringspan.masks import table as tables


class Meant(NamedTuple):
    """A mask with lengths, and what should be said about how it came to them."""

    mask: rs.Mask
    notes: tuple[str, ...]


def mask_at(text: str, seq_len: int | None) -> Meant:
    """The mask that an expression means for a sequence of this length, which it must have or take.

    >>> mask_at("causal() & window(2)", 6)
    Meant(mask=<Mask causal() & window(left=2) & full(6): 6 × 6, area 15, 1 band>, notes=())
    """
    mask = mask_of(text)
    if not mask.is_relation:
        if seq_len is not None and seq_len != mask.lengths[0]:
            raise MaskError(
                f"{text!r} is a mask of {mask.lengths[0]:,} tokens, and --seq-len says {seq_len:,}: "
                "leave --seq-len out, or write the mask for that length"
            )
        return Meant(mask, ())
    if seq_len is None:
        raise MaskError(f"{text!r} holds at any length: say at which with --seq-len, as in --seq-len 1048576")
    hides_no_later_key = bool((mask.table[:, tables.HI] >= seq_len - 1).any())
    remark = f"{mask.name} hides no later key; a causal window is `causal() & {text}`"
    return Meant(mask & rs.full(seq_len), (remark,) if mask.name.startswith("window(") and hides_no_later_key else ())


def mask_of(text: str) -> rs.Mask:
    """The mask that an expression means. Nothing else is evaluated: calls of the constructors with plain values, ``& | - ~``.

    >>> mask_of("causal(6) & ~window(left=2)")
    <Mask causal(6) & ~window(left=2): 6 × 6, area 6, 1 band>
    """
    try:
        return _built(ast.parse(_with_quoted_paths(text), mode="eval").body, text)
    except MaskError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what Python's parser says is of Python, and not of masks
        counts = [(a, text.count(a), b, text.count(b)) for a, b in (("(", ")"), ("[", "]"))]
        unpaired = [f": it has {n} {a} and {m} {b}" for a, n, b, m in counts if n != m]
        raise MaskError(
            f"cannot read {text!r}{''.join(unpaired[:1])}. A mask looks like `documents([700, 324]) & window(128)`"
        ) from None


def _built(node: ast.expr, text: str) -> rs.Mask:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _built(left, text) & _built(right, text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _built(left, text) | _built(right, text)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _built(left, text) - _built(right, text)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_built(operand, text)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            return _called(name, node)
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name) if name not in _CALLS:
            raise MaskError(unknown_name("mask", name, [*_CALLS]))
        case ast.Name(id=name):
            raise MaskError(f"a mask is written with brackets: {name}(), or {name}(…) with what it takes")
    part = ast.unparse(node)
    where = "" if part == text.strip() else f" in {text!r}"
    raise MaskError(f"not a mask: {part!r}{where}. Masks are {', '.join(_CALLS)}, joined by & | - ~ and brackets")


def _called(name: str, call: ast.Call) -> rs.Mask:
    def value(node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise MaskError(f"{name} takes plain values, as 4096 or [700, 324]; not {ast.unparse(node)!r}") from None

    args, options = [value(arg) for arg in call.args], {str(word.arg): value(word.value) for word in call.keywords}
    try:
        return _CALLS[name](*args, **options)
    except TypeError as error:
        raise MaskError(f"{ast.unparse(call)!r} does not fit what {name} takes: {error}") from None


def lengths_in(path: str) -> list[int]:
    """The lengths in a file: whole numbers, one or many a line, between spaces or commas; behind a ``#``, words."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MaskError(f"cannot read the lengths in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MaskError(f"{path} is no text file: lengths are whole numbers, one or many a line") from None
    found = []
    for number, line in enumerate(lines, start=1):
        for word in line.partition("#")[0].replace(",", " ").split():
            if not word.isdecimal():
                raise MaskError(f"{path}, line {number}: a length is a whole number of tokens, not {word[:40]!r}")
            found.append(int(word))
    if not found:
        raise MaskError(f"{path} holds no length: write whole numbers, one or many a line")
    return found


def _documents(*args: Any, file: str | None = None, **options: Any) -> rs.Mask:
    return rs.documents(*args, **options) if file is None else rs.documents(lengths_in(file), *args, **options)


def _full(*args: int, **options: int) -> rs.Mask:
    if args or options:
        return rs.full(*args, **options)
    return rs.Mask(tables.table((0, MAX_LENGTH, 0, MAX_LENGTH, -MAX_LENGTH, MAX_LENGTH)), None, None, name="full()")


def _with_quoted_paths(text: str) -> str:
    """A path is written as in a shell, without quotes, which is no Python yet."""
    return re.sub(r"""\bfile\s*=\s*([^\s"',()]+)""", lambda path: f"file={path[1]!r}", text.strip())


_CALLS: dict[str, Callable[..., rs.Mask]] = {
    "full": _full,
    "causal": rs.causal,
    "window": rs.window,
    "documents": _documents,
    "prefix": rs.prefix,
    "chunked": rs.chunked,
    "from_bands": rs.Mask.from_bands,
}
