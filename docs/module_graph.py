"""Read the imports of ``src/ringspan`` and print which package imports which: the table in docs/design.md.

    python docs/module_graph.py            print the table
    python docs/module_graph.py --write    put it into docs/design.md, between the two marker comments

Imports inside functions and under TYPE_CHECKING count. No code of the package is run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src" / "ringspan"
PAGE = HERE / "design.md"
BEGIN, END = "<!-- package graph -->", "<!-- end of package graph -->"

# Packages and modules below everything: any other may import them, so the table leaves them out.
FOUNDATION = ("errors", "version", "debugging", "caching", "torch_private", "user_functions")


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of everything that a source imports.

    ``from a import b`` may mean the module a.b or the name b of a: it counts as ``a.b``.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def modules(root: Path = SOURCE) -> dict[str, Path]:
    """Return the modules of the package by name; ``__init__.py`` has the name of its package."""
    paths = sorted(root.rglob("*.py"))
    return {".".join(p.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def module_graph(sources: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    """Return, for each module, the modules it imports, with the line of the import."""
    graph: dict[str, dict[str, int]] = {}
    for name, path in sources.items():
        found = imports(path.read_text(encoding="utf-8"), name, is_package=path.name == "__init__.py")
        graph[name] = {}
        for line, target in found:
            module = target if target in sources else target.rpartition(".")[0]
            if module in sources and module != name:
                graph[name].setdefault(module, line)
    return graph


def find_cycle(graph: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the modules of one import cycle, in order; empty if there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for target in graph[module]:
            if cycle := visit(target, [*path, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in graph if (cycle := visit(module, []))), [])


def package_graph(sources: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return, for each package, the packages it imports. The package's own ``__init__`` and ``__main__`` are left
    out."""
    graph: dict[str, set[str]] = {}
    for name, targets in module_graph(sources).items():
        package = name.split(".")[1] if "." in name else ""
        if package and package != "__main__":
            found = {target.split(".")[1] for target in targets if "." in target}
            graph.setdefault(package, set()).update(found - {package, *FOUNDATION})
    return {package: found for package, found in graph.items() if package not in FOUNDATION}


def table() -> str:
    """Return the table: the packages, each after those that it imports."""
    graph, lines = package_graph(modules()), ["package      imports"]
    placed: list[str] = []
    while len(placed) < len(graph):
        ready = [package for package in sorted(graph) if package not in placed and graph[package] <= set(placed)]
        if not ready:
            raise SystemExit(f"the packages {', '.join(sorted(set(graph) - set(placed)))} import each other")
        placed.append(ready[0])
        lines.append(f"{ready[0]:13}{', '.join(p for p in placed if p in graph[ready[0]]) or '–'}")
    return "\n".join(lines)


def page_with_table(page: str) -> str:
    """Return the page with the current table between the markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n```\n{table()}\n```\n\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
