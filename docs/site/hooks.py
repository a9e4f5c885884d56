"""Pages of the site that are made from the code: the reference, the commands, the examples, contributing, changelog.

``ringspan.__all__`` decides what is in the reference, and the package that a name comes from decides on which page.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "src"))

import ringspan as rs  # noqa: E402
from ringspan.cli import main as cli  # noqa: E402

# page -> (title, packages whose public names are on it). A new package is on the page of the engine.
PAGES = {
    "frontends": ("Context parallelism", ("frontends", "integrations")),
    "masks": ("Masks", ("masks",)),
    "layouts": ("Layouts", ("layouts",)),
    "plans": ("Plans", ("planner", "plans", "costs")),
    "strategies": ("Strategies", ("strategies",)),
    "errors": ("Errors", ("errors",)),
    "engine": ("Kernels, transports, caches", ()),
}
# Public modules: name -> where the module is.
MODULES = {
    "ringspan.compat": "ringspan.compat",
    "ringspan.sdpa": "ringspan.frontends.sdpa",
    "ringspan.integrations.transformers": "ringspan.integrations.transformers",
    "ringspan.integrations.accelerate": "ringspan.integrations.accelerate",
    "ringspan.testing.assertions": "ringspan.testing.assertions",
}
# Classes of the implementation: what a public class inherits from them is not for callers.
HIDDEN = ("refuse", "handle_of")
INTERNAL = ("ringspan.frontends.attention_block", "ringspan.torch_private")
# Pages in the root of the repository -> pages of the site.
REPOSITORY_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files of the repository to their pages on the site."""
    for path, made in REPOSITORY_PAGES.items():
        markdown = markdown.replace(f"](../{path}", f"]({made}")
    return re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples.md#\1)", markdown)


def pages() -> dict[str, str]:
    """Return path -> Markdown of the pages that are made from the software."""
    made = {f"reference/{page}.md": _reference_page(page) for page in PAGES}
    made["reference/index.md"] = _index()
    made["reference/modules.md"] = _modules()
    made["reference/commands.md"] = _commands()
    made["examples.md"] = _examples()
    for path, page in REPOSITORY_PAGES.items():
        made[page] = _repository_page((ROOT / path).read_text(encoding="utf-8"))
    return made


def _repository_page(text: str) -> str:
    """Return a page of the repository's root with its links as they are in docs/."""
    text = re.sub(r"\]\(docs/", "](", text)
    for path, page in REPOSITORY_PAGES.items():
        text = text.replace(f"]({path}", f"]({page}")
    return re.sub(r"\]\(examples/(\w+)\.py\)", r"](examples.md#\1)", text)


def page_of(name: str) -> str:
    """Return the page of a public name: a key of PAGES, or "modules"."""
    value = getattr(rs, name)
    if inspect.ismodule(value):
        return "modules"
    package = value.__module__.split(".")[1]
    return next((page for page, (_, packages) in PAGES.items() if package in packages), "engine")


def _reference_page(page: str) -> str:
    names = [name for name in rs.__all__ if page_of(name) == page]
    parts = [f"# {PAGES[page][0]}", ""]
    for name in names:
        value = getattr(rs, name)
        parts += [
            f"::: {anchor(name)}",
            "    options:",
            f"      heading: rs.{name}",
            f"      toc_label: {name}",
            *_members(value),
            "",
        ]
    return "\n".join(parts)


def anchor(name: str) -> str:
    """Return the full path of a public name where it is defined. It is also its anchor on the page."""
    value = getattr(rs, name)
    if inspect.ismodule(value):
        return f"ringspan.{name}"
    return f"{value.__module__}.{value.__qualname__}"


def _members(value: Any) -> list[str]:
    """Return the option that lists the members of a class that have a docstring and are meant for callers."""
    if not inspect.isclass(value):
        return []
    bases = [base for base in reversed(value.__mro__) if base.__module__.startswith("ringspan.")]
    members = {
        name: None
        for base in bases
        if not base.__module__.startswith(INTERNAL)
        for name, x in vars(base).items()
        if not name.startswith("_") and name not in HIDDEN and (inspect.isroutine(x) or isinstance(x, property))
        if inspect.getdoc(x)
    }
    return ["      inherited_members: true", f"      members: [{', '.join(members)}]"]


def _index() -> str:
    rows = ["# All names", "", "`import ringspan as rs`", "", "| name | what it is |", "| --- | --- |"]
    for name in sorted(rs.__all__, key=str.lower):
        first = re.sub(r"\s+", " ", (inspect.getdoc(getattr(rs, name)) or "").split("\n\n")[0])
        first = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", first).replace("|", "\\|").rstrip(":")
        rows.append(f"| [`rs.{name}`]({page_of(name)}.md#{anchor(name)}) | {first} |")
    return "\n".join(rows) + "\n"


def _modules() -> str:
    parts = ["# Modules", ""]
    for name, module in MODULES.items():
        parts += [f"## {name} {{ #{name} }}", "", f"::: {module}", "    options:"]
        parts += [
            "      show_root_heading: false",
            "      show_root_toc_entry: false",
            "      heading_level: 3",
            '      filters: ["!^_", "!^log$"]',
            "",
        ]
    return "\n".join(parts)


def _commands() -> str:
    parts = ["# Commands", "", "Also as `python -m ringspan`. The extra `ringspan[cli]` has what they need.", ""]
    commands = [*((c,) for c in cli.COMMANDS), *(("bench", name) for name in _benchmarks())]
    for command in commands:
        parts += [f"## ringspan {' '.join(command)}", "", "```text", _help(command), "```", ""]
    return "\n".join(parts)


def _benchmarks() -> list[str]:
    from ringspan.cli.bench import BENCHMARKS

    return [*BENCHMARKS]


def _help(command: tuple[str, ...]) -> str:
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    return printed.getvalue().rstrip()


def _examples() -> str:
    parts = ["# Examples", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts += [f"## examples/{path.name} {{ #{path.stem} }}", "", "```python", path.read_text(encoding="utf-8"), "```", ""]
    return "\n".join(parts)
