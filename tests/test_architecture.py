"""The street goes one way.

    masks → layouts → plans → engine → frontends → compat → integrations → cli
                         ↘ kernels ↗  ↖ transports

Every file's imports are read from its source (nothing is run), lazy ones and those for type checkers included, and compared
with the table below. What is not in the table of its package is driven the wrong way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringspan

ROOT = Path(ringspan.__file__).parent

# package -> the packages of ringspan it may import, beside itself and single files such as errors.py
BELOW = {"caching", "torch_private", "user_functions"}  # below everything, beside errors.py
PLANNING = {"masks", "layouts", "plans", "costs", "strategies", "planner"}
MAY_IMPORT: dict[str, set[str]] = {
    "torch_private": set(),
    "caching": {"torch_private"},
    "user_functions": {"caching", "torch_private"},
    "masks": BELOW,
    "layouts": {"masks", *BELOW},
    "plans": {"masks", "layouts", *BELOW},
    "costs": {"masks", "layouts", "plans", *BELOW},
    "strategies": {"masks", "layouts", "plans", "costs", *BELOW},
    "planner": {*PLANNING, *BELOW},
    "kernels": {"masks", *BELOW},
    "transports": BELOW,
    "engine": {*PLANNING, "kernels", "transports", *BELOW},
    "frontends": {*PLANNING, "kernels", "transports", "engine", *BELOW},
    "compat": {*PLANNING, "kernels", "transports", "engine", "frontends", *BELOW},
    "integrations": {*PLANNING, "kernels", "transports", "engine", "frontends", "compat", *BELOW},
    "testing": {*PLANNING, "kernels", "transports", "engine", "frontends", "compat", "integrations", *BELOW},
    "bench": {*PLANNING, "kernels", "transports", "engine", "frontends", "compat", "integrations", "testing", *BELOW},
    "cli": {*PLANNING, "kernels", "transports", "engine", "frontends", "compat", "integrations", "testing", "bench", *BELOW},
}

# package -> what it must not use of the outside: planning runs anywhere, kernels know of no ranks
MUST_NOT_USE: dict[str, set[str]] = {
    "masks": {"torch"},
    "layouts": {"torch"},
    "plans": {"torch"},
    "kernels": {"torch.distributed"},
}

# modules that may use it all the same: a mask_mod is called with tensors, a BlockMask is made of them. Whoever has neither
# never imports PyTorch through them.
MAY_USE: dict[str, set[str]] = {
    "ringspan.masks.survey": {"torch"},
    "ringspan.masks.block_mask": {"torch"},
}

# The front door, ``from ringspan import …``, pulls in everything: only those who stand outside it may use it.
FRONT_DOOR = {"integrations", "testing", "bench", "cli"}


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """The line and full name of everything a source imports, or reaches as an attribute of ``torch``.

    ``from a import b`` may mean the module a.b or the name b of a: it counts as ``a.b``, which lies in the same package.
    """
    here = module.split(".") if is_package else module.split(".")[:-1]
    torch_names = {"torch"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                if alias.name == "torch" and alias.asname:
                    torch_names.add(alias.asname)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{start}.{alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in torch_names:
            yield node.lineno, f"torch.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def wrong_way(source: str, module: str, *, is_package: bool = False, parts: frozenset[str] | None = None) -> list[str]:
    """What a source of ringspan imports against the table, one line each. ``parts`` are the packages there are."""
    packages = frozenset(MAY_IMPORT) if parts is None else parts
    own = module.split(".")[1] if module.count(".") or is_package else ""
    package = own if own in packages else None
    found = []
    for line, name in imports(source, module, is_package=is_package):
        first, _, rest = name.partition(".")
        second = rest.partition(".")[0]
        if first == "ringspan":
            if second in packages:
                allowed = package is not None and (second == package or second in MAY_IMPORT[package])
            else:
                # a single file such as errors.py, or a name that the front door hands out
                allowed = (ROOT / f"{second}.py").exists() or package in FRONT_DOOR
            if not allowed:
                found.append(f"{module}:{line}: {own} must not import {name}")
        for banned in MUST_NOT_USE.get(package or "", set()) - MAY_USE.get(module, set()):
            if name == banned or name.startswith(f"{banned}."):
                found.append(f"{module}:{line}: {own} must not use {name}")
    return found


# The two doors of the whole package open on everything.
DOORS = {ROOT / "__init__.py", ROOT / "__main__.py"}
SOURCES = sorted(set(ROOT.rglob("*.py")) - DOORS)
PACKAGES = sorted(path.name for path in ROOT.iterdir() if any(path.glob("**/*.py")) and path.name != "__pycache__")


def module_of(path: Path) -> tuple[str, bool]:
    parts = ["ringspan", *path.relative_to(ROOT).with_suffix("").parts]
    return (".".join(parts[:-1]), True) if parts[-1] == "__init__" else (".".join(parts), False)


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_no_file_drives_the_wrong_way(path: Path) -> None:
    module, is_package = module_of(path)
    assert wrong_way(path.read_text(encoding="utf-8"), module, is_package=is_package) == []


def test_every_package_is_in_the_table() -> None:
    assert set(PACKAGES) <= set(MAY_IMPORT), "a new package: say in MAY_IMPORT what it may import"


def test_the_street_has_no_circle() -> None:
    seen: set[str] = set()
    for package, allowed in MAY_IMPORT.items():
        assert allowed <= seen, f"{package} may import what comes after it"
        seen.add(package)


# -- the test can fail -------------------------------------------------------------------------------------------------

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
    ("ringspan.errors", "from ringspan.masks import Mask", "errors must not import ringspan.masks.Mask"),
]


@pytest.mark.parametrize(("module", "source", "complaint"), WRONG, ids=[f"{m}: {s!r}" for m, s, _ in WRONG])
def test_a_wrong_turn_is_seen(module: str, source: str, complaint: str) -> None:
    assert [line.split(": ", 1)[1] for line in wrong_way(source, module)] == [complaint]


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
def test_the_right_way_is_free(module: str, source: str) -> None:
    assert wrong_way(source, module) == []
