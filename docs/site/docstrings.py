"""Convert the markup of the docstrings, which is that of Sphinx, to Markdown, as an extension of Griffe.

:func:`~ringspan.plan`      `plan`
text::  and indented lines  text: and a fenced block
>>> lines                   a fenced block of pycon
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`(~?)([^`]+)`")


class ConvertDocstrings(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Return a docstring as Markdown.

    >>> print(to_markdown("Call :func:`~a.f`::\\n\\n    f(1)\\n\\nThen stop."))
    Call `f`:
    <BLANKLINE>
    ```python
    f(1)
    ```
    <BLANKLINE>
    Then stop.
    """
    text = ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)
    lines, made = text.split("\n"), []
    while lines:
        line = lines.pop(0)
        if line.lstrip().startswith(">>>"):
            block = [line, *_take(lines, lambda x: bool(x.strip()))]
            made += ["", "```pycon", *_dedent(block), "```", ""]
        elif line.rstrip().endswith("::"):
            indent = len(line) - len(line.lstrip())
            block = _take(lines, lambda x, indent=indent: not x.strip() or len(x) - len(x.lstrip()) > indent)
            head = line.rstrip().removesuffix("::")
            made += [head.rstrip() + ":" if head.strip() else "", "", f"```{_language(block)}", *_dedent(block), "```", ""]
        elif line.startswith("    ") and (not made or not made[-1].strip()):
            block = [line, *_take(lines, lambda x: not x.strip() or x.startswith("    "))]
            made += ["```text", *_dedent(block), "```", ""]
        else:
            made.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(made)).strip()


def _take(lines: list[str], while_true: Any) -> list[str]:
    taken = []
    while lines and while_true(lines[0]):
        taken.append(lines.pop(0))
    return taken


def _dedent(block: list[str]) -> list[str]:
    while block and not block[0].strip():
        block = block[1:]
    while block and not block[-1].strip():
        block = block[:-1]
    least = min((len(x) - len(x.lstrip()) for x in block if x.strip()), default=0)
    return [x[least:] for x in block]


def _language(block: list[str]) -> str:
    """Return "python" if a block is code, and "text" if it is a drawing."""
    try:
        compile("\n".join(_dedent(list(block))), "docstring", "exec")
    except SyntaxError:
        return "text"
    return "python"
