"""The packages import each other in one direction only, and no modules import each other in a circle.

    masks → layouts → plans → costs → strategies → planner → engine → frontends → compat → testing → bench → cli
                                           kernels ↗  ↖ transports              ↘ integrations

Below all of them lie ``errors``, ``debugging``, ``caching``, ``torch_private`` and ``user_functions``. The imports are
read from the source of every file (no code is run), those inside functions and under TYPE_CHECKING included.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringspan

ROOT = Path(ringspan.__file__).parent
SCRIPT = ROOT.parent.parent / "docs" / "module_graph.py"
_spec = importlib.util.spec_from_file_location("module_graph", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
module_graph = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(module_graph)

# package -> the packages of ringspan that it may import, beside itself, errors.py and version.py
FOUNDATION = {"debugging", "caching", "torch_private", "user_functions"}
PLANNING = {"masks", "layouts", "plans", "costs", "strategies"}
RUNNING = {*PLANNING, "planner", "kernels", "transports", *FOUNDATION}
MAY_IMPORT: dict[str, set[str]] = {
    "debugging": set(),
    "torch_private": set(),
    "caching": {"torch_private"},
    "user_functions": {"caching", "torch_private"},
    "masks": FOUNDATION,
    "layouts": {"masks", *FOUNDATION},
    "plans": {"masks", "layouts", *FOUNDATION},
    "costs": {"masks", "layouts", "plans", *FOUNDATION},
    "strategies": {"masks", "layouts", "plans", "costs", *FOUNDATION},
    "planner": {*PLANNING, *FOUNDATION},
    "kernels": {"masks", *FOUNDATION},
    "transports": FOUNDATION,
    "engine": RUNNING,
    "frontends": {*RUNNING, "engine"},
    "compat": {*RUNNING, "engine", "frontends"},
    "integrations": {*RUNNING, "engine", "frontends"},
    "testing": {*RUNNING, "engine", "frontends", "compat"},
    "bench": {*RUNNING, "engine", "frontends", "compat", "testing"},
    "cli": {*RUNNING, "engine", "frontends", "compat", "testing", "bench", "integrations"},
}

# The only modules that lie beside the packages.
TOP_LEVEL = {"__init__.py", "__main__.py", "errors.py", "version.py"}

# package -> what it must not use: planning runs without PyTorch, kernels know no ranks
MUST_NOT_USE: dict[str, set[str]] = {
    "masks": {"torch"},
    "layouts": {"torch"},
    "plans": {"torch"},
    "costs": {"torch"},
    "strategies": {"torch"},
    "planner": {"torch"},
    "kernels": {"torch.distributed"},
}

# Modules that may use it all the same, because they call a mask_mod with tensors or read a BlockMask. They are imported
# only for masks that have one.
MAY_USE: dict[str, set[str]] = {
    "ringspan.masks.survey": {"torch"},
    "ringspan.masks.block_mask": {"torch"},
}

# ``import ringspan`` imports everything, so only packages that nothing in it imports may use it.
MAY_IMPORT_ALL = {"testing", "bench", "cli"}


def uses(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """The line and full name of everything that a source imports, or reaches as an attribute of ``torch``."""
    yield from module_graph.imports(source, module, is_package=is_package)
    tree = ast.parse(source)
    imported = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    torch_names = {"torch", *(alias.asname for alias in imported if alias.name == "torch" and alias.asname)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in torch_names:
            yield node.lineno, f"torch.{node.attr}"


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What a source imports against the tables above, one line each."""
    own = module.split(".")[1]
    package = own if own in MAY_IMPORT else None
    found = []
    for line, name in uses(source, module, is_package=is_package):
        first, _, rest = name.partition(".")
        second = rest.partition(".")[0]
        if first == "ringspan":
            if second in MAY_IMPORT:
                allowed = package is not None and (second == package or second in MAY_IMPORT[package])
            else:  # errors.py, version.py, or a name that ringspan/__init__.py exports
                allowed = second in ("errors", "version") or package in MAY_IMPORT_ALL
            if not allowed:
                found.append(f"{module}:{line}: {own} must not import {name}")
        for banned in MUST_NOT_USE.get(own, set()) - MAY_USE.get(module, set()):
            if name == banned or name.startswith(f"{banned}."):
                found.append(f"{module}:{line}: {own} must not use {name}")
    return found


SOURCES = {name: path for name, path in module_graph.modules(ROOT).items() if name.count(".") and name != "ringspan.__main__"}


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_imports_only_what_its_package_may(module: str) -> None:
    path = SOURCES[module]
    assert violations(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py") == []


def test_every_package_is_in_the_table() -> None:
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("**/*.py"))}
    assert packages <= set(MAY_IMPORT), "a new package: say in MAY_IMPORT what it may import"


def test_only_errors_lies_beside_the_packages() -> None:
    stray = {path.name for path in ROOT.glob("*.py")} - TOP_LEVEL
    assert not stray, f"{', '.join(sorted(stray))}: put the module into a package"


def test_the_table_has_one_direction() -> None:
    before: set[str] = set()
    for package, allowed in MAY_IMPORT.items():
        assert allowed <= before, f"{package} may import {', '.join(sorted(allowed - before))}, which comes after it"
        before.add(package)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = module_graph.module_graph(module_graph.modules(ROOT))
    cycle = module_graph.find_cycle(graph)
    edges = zip(cycle, [*cycle[1:], *cycle[:1]], strict=True)
    assert not cycle, "\n".join(f"{a}:{graph[a][b]} imports {b}" for a, b in edges)


def test_the_table_in_the_design_page_is_up_to_date() -> None:
    page = module_graph.PAGE.read_text(encoding="utf-8")
    assert page == module_graph.page_with_table(page), "run python docs/module_graph.py --write"


# -- the tests can fail ------------------------------------------------------------------------------------------------

WRONG = [
    ("ringspan.masks.x", "from ringspan.layouts import zigzag", "masks must not import ringspan.layouts.zigzag"),
    ("ringspan.masks.x", "import ringspan.plans.data as p", "masks must not import ringspan.plans.data"),
    ("ringspan.masks.x", "from ..plans import Plan", "masks must not import ringspan.plans.Plan"),
    ("ringspan.masks.x", "from .. import engine", "masks must not import ringspan.engine"),
    ("ringspan.masks.x", "from ringspan import causal", "masks must not import ringspan.causal"),
    ("ringspan.masks.x", "import ringspan", "masks must not import ringspan"),
    ("ringspan.masks.x", "import torch", "masks must not use torch"),
    ("ringspan.masks.survey", "from ringspan.layouts import zigzag", "masks must not import ringspan.layouts.zigzag"),
    ("ringspan.layouts.x", "def f():\n    from torch import nn", "layouts must not use torch.nn"),
    (
        "ringspan.layouts.x",
        "if TYPE_CHECKING:\n    from ringspan.plans import Plan",
        "layouts must not import ringspan.plans.Plan",
    ),
    ("ringspan.plans.x", "try:\n    import torch.cuda\nexcept ImportError: ...", "plans must not use torch.cuda"),
    ("ringspan.plans.x", "import_module('torch')", "plans must not use torch"),
    ("ringspan.plans.x", "importlib.import_module('ringspan.engine')", "plans must not import ringspan.engine"),
    ("ringspan.kernels.x", "import torch.distributed as dist", "kernels must not use torch.distributed"),
    ("ringspan.kernels.x", "from torch import distributed", "kernels must not use torch.distributed"),
    (
        "ringspan.kernels.x",
        "from torch.distributed.tensor import DTensor",
        "kernels must not use torch.distributed.tensor.DTensor",
    ),
    ("ringspan.kernels.x", "import torch\ntorch.distributed.barrier()", "kernels must not use torch.distributed"),
    ("ringspan.kernels.x", "import torch as t\nt.distributed.barrier()", "kernels must not use torch.distributed"),
    ("ringspan.kernels.x", "from ringspan.plans import Plan", "kernels must not import ringspan.plans.Plan"),
    ("ringspan.transports.x", "from ringspan.kernels import attend", "transports must not import ringspan.kernels.attend"),
    ("ringspan.transports.x", "from ringspan.plans import Plan", "transports must not import ringspan.plans.Plan"),
    ("ringspan.engine.x", "from ringspan.frontends import sdpa", "engine must not import ringspan.frontends.sdpa"),
    ("ringspan.frontends.x", "from ringspan.cli import main", "frontends must not import ringspan.cli.main"),
    ("ringspan.strategies.x", "from ringspan.planner import Plan", "strategies must not import ringspan.planner.Plan"),
    ("ringspan.costs.x", "from ringspan.strategies import Ring", "costs must not import ringspan.strategies.Ring"),
    ("ringspan.planner.x", "import torch", "planner must not use torch"),
    ("ringspan.engine.x", "from ringspan import plan", "engine must not import ringspan.plan"),
    ("ringspan.errors", "from ringspan.masks import Mask", "errors must not import ringspan.masks.Mask"),
]


@pytest.mark.parametrize(("module", "source", "complaint"), WRONG, ids=[f"{m}: {s!r}" for m, s, _ in WRONG])
def test_a_wrong_import_is_found(module: str, source: str, complaint: str) -> None:
    assert [line.split(": ", 1)[1] for line in violations(source, module)] == [complaint]


RIGHT = [
    ("ringspan.masks.survey", "import torch"),
    ("ringspan.masks.x", "import numpy as np\nimport torchvision_is_not_torch"),
    ("ringspan.masks.x", "from ringspan.errors import MaskError\nfrom .band import Band\nfrom . import table"),
    ("ringspan.layouts.x", "from ringspan.masks import Mask\nfrom ringspan.layouts.layout import Layout"),
    ("ringspan.kernels.x", "import torch\nfrom torch.nn import functional as F\ntorch.cuda.synchronize()"),
    ("ringspan.transports.x", "import torch.distributed as dist"),
    ("ringspan.engine.x", "from ringspan.kernels import attend\nfrom ringspan.transports import Group"),
    ("ringspan.cli.x", "import ringspan as rs\nfrom ringspan import causal\nimport ringspan.frontends"),
]


@pytest.mark.parametrize(("module", "source"), RIGHT, ids=[f"{m}: {s!r}" for m, s in RIGHT])
def test_a_right_import_is_allowed(module: str, source: str) -> None:
    assert violations(source, module) == []


CIRCLES = {
    "at the top": {"a": "from ringspan import b", "b": "import ringspan.a"},
    "inside a function": {
        "a": "import ringspan.b",
        "b": "def f():\n    from ringspan.c import x",
        "c": "from ringspan.a import y",
    },
    "for type checkers": {"a": "if TYPE_CHECKING:\n    from ringspan.b import B", "b": "from ringspan.a import A"},
}


@pytest.mark.parametrize("sources", CIRCLES.values(), ids=CIRCLES)
def test_a_circle_is_found(sources: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "ringspan"
    root.mkdir()
    for name, source in sources.items():
        (root / f"{name}.py").write_text(source)
    graph = module_graph.module_graph(module_graph.modules(root))
    assert sorted(module_graph.find_cycle(graph)) == [f"ringspan.{name}" for name in sources]


def test_modules_in_one_direction_are_no_circle(tmp_path: Path) -> None:
    root = tmp_path / "ringspan"
    root.mkdir()
    for name, source in {"a": "import ringspan.b\nimport ringspan.c", "b": "from ringspan.c import x", "c": ""}.items():
        (root / f"{name}.py").write_text(source)
    assert module_graph.find_cycle(module_graph.module_graph(module_graph.modules(root))) == []
