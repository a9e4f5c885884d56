"""Every name of torch's context parallelism is provided, or ``docs/compat.md`` lists it as left out, with the reason."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.tensor import experimental
from torch.nn.attention.flex_attention import create_block_mask

from ringspan import compat

HERE = Path(__file__).parent
PAGE = (HERE.parent.parent / "docs" / "compat.md").read_text(encoding="utf-8")
PROVIDED, LEFT_OUT = PAGE.split("\n## Names\n")[1].split("\n## Differences\n")[0].split("\nNot provided")
ROWS = [row for row in PROVIDED.splitlines() if row.startswith("| `")]

PACKAGE = importlib.import_module(f"{experimental.__name__}._context_parallel")
MODULES = [
    experimental.__name__,
    f"{experimental.__name__}._attention",
    PACKAGE.__name__,
    *(module.name for module in pkgutil.walk_packages(PACKAGE.__path__, f"{PACKAGE.__name__}.")),
]


def defined_names(module: ModuleType) -> set[str]:
    """What a module defines at its top level, and what it exports."""
    found = set(getattr(module, "__all__", ()))
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.col_offset == 0:
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.col_offset == 0:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found - {"__all__", "_"}


@pytest.mark.parametrize("name", MODULES)
def test_every_name_of_torch_is_provided_or_listed_as_left_out(name: str) -> None:
    left_out = set(re.findall(r"`(\w+)`", LEFT_OUT))
    patterns = [pattern.replace("*", r"\w+") for pattern in re.findall(r"`(\w*\*\w*)`", LEFT_OUT)]
    for found in sorted(defined_names(importlib.import_module(name))):
        is_listed = found in left_out or any(re.fullmatch(pattern, found) for pattern in patterns)
        assert found in compat.__all__ or is_listed, (
            f"torch {torch.__version__} has {name}.{found}, which ringspan.compat does not provide: provide it, or list it in "
            'docs/compat.md under "Not provided", with the reason'
        )
        assert not (found in compat.__all__ and is_listed), f"{found} is provided, but docs/compat.md says that it is not"


def test_every_name_of_compat_has_a_row_with_its_tests() -> None:
    for name in compat.__all__:
        rows = [row for row in ROWS if f"`{name}`" in row.split(" | ")[0]]
        assert len(rows) == 1, f"docs/compat.md needs one row for {name} in its table of names; it has {len(rows)}"
    for row in ROWS:
        names, _, tests = row.strip("| ").split(" | ")
        files = [HERE / f"{test}.py" for test in tests.split(", ")]
        assert all(file.exists() for file in files), f"docs/compat.md names tests that do not exist: {tests}"
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`\.?(\w+)`", names):
            assert re.search(rf"\b{name}\b", text), (
                f"docs/compat.md says that {name} is tested in {tests}, which do not mention it"
            )


def mask() -> Any:
    return create_block_mask(lambda b, h, q, k: q >= k, 2, None, 64, 64, device="cpu", BLOCK_SIZE=16)


INSTANCES: dict[str, tuple[Any, ...]] = {
    "_HeadTailLoadBalancer": (64, 2, "cpu"),
    "_PerDocumentHeadTailLoadBalancer": ([[16, 48], [32, 32]], 2, "cpu"),
    "_ContextParallelOptions": (),
}


@pytest.mark.parametrize("name", [*INSTANCES, "_PTRRLoadBalancer"])
def test_attributes(name: str) -> None:
    """Public attributes of instances and public methods exist under torch's names, with torch's values."""
    theirs = next(found for place in MODULES if (found := getattr(importlib.import_module(place), name, None)) is not None)
    args = INSTANCES.get(name, (mask(), 2))
    other, mine = theirs(*args), getattr(compat, name)(*args)
    for attribute, value in vars(other).items():
        if not attribute.startswith("_"):
            found = getattr(mine, attribute)
            assert getattr(found, "name", found) == getattr(value, "name", value), attribute
    methods = [method for method, value in vars(theirs).items() if callable(value) and not method.startswith("__")]
    assert [method for method in methods if not hasattr(mine, method)] == []
    if name != "_ContextParallelOptions":
        for restore in (False, True):
            assert torch.equal(mine._generate_indices(restore), other._generate_indices(restore))
