"""Layouts and strategies as text: a name with options, such as ``"balanced(per_node=8)"`` or ``"gather(stages=4)"``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, TypeVar

from ringspan.caching.by_digest import cache_by_digest
from ringspan.errors import RingspanError, unknown_name

F = TypeVar("F", bound=Callable[..., Any])

_signature = cache_by_digest(64, plain=True)(signature)  # reading one takes longer than parsing the text


def parse_options(
    text: str, known: Mapping[str, F], *, kind: str, error: type[RingspanError], positional: int = 0, hint: str = ""
) -> tuple[F, dict[str, Any]]:
    """Return the function (or class) of this name, and the options that it takes by keyword.

    ``positional`` is the number of arguments of the function before its options. Nothing is called here, so errors of
    the function itself are not caught. ``kind`` and ``hint`` are for error messages.

    >>> def gather(mask, *, stages=1): ...
    >>> _, options = parse_options("gather(stages=4)", {"gather": gather}, kind="strategy", error=ValueError, positional=1)
    >>> options
    {'stages': 4}
    """
    match = re.fullmatch(r"\s*(\w+)\s*(\(.*\))?\s*", text)
    if match is None or match[1] not in known:
        raise error(unknown_name(kind, text, [*known, "auto"]) + hint)
    function = known[match[1]]
    takes = _signature(function)
    try:
        options = {} if match[2] is None else _read_options(match[2])
        takes.bind(*[None] * positional, **options)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):  # the last two: deep nesting
        listed = ", ".join([str(p.replace(annotation=p.empty)) for p in list(takes.parameters.values())[positional:]])
        raise error(f"cannot read {kind} {text!r}: {match[1]} takes {f'({listed})' if listed else 'no options'}") from None
    return function, options


def _read_options(text: str) -> dict[str, Any]:
    """Return the options of a text such as ``(stages=4)``. Raises ValueError or SyntaxError for any other text."""
    call = ast.parse(f"f{text}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a list of options")
    return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
