"""Find private names of PyTorch and FlashAttention-4 in a source, by reading its syntax tree. Nothing is run.

Found are::

    import torch._dynamo                     from torch.utils._pytree import tree_map       from torch import _C
    torch._C._len_torch_function_stack()     aten = torch.ops.aten; aten._flash_attention_forward
    from torch import overrides; overrides._pop_mode_temporarily
    x._version                               getattr(x, "_version")   attrgetter("_version")
    sys.modules.get("torch._dynamo")         {"_native_multi_head_attention": …}

An attribute of an object of unknown type counts as private if it begins with an underscore and ringspan defines no such
attribute, method or function. Names with two underscores on both sides are public.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

import ringspan

ROOT = Path(ringspan.__file__).parent
PACKAGES = ("torch", "flash_attn")

# Underscored names of the standard library. ``_actions`` are the options of a parser of argparse.
STANDARD_LIBRARY = {"_replace", "_asdict", "_fields", "_make", "_getframe", "_exit", "_Hash", "_actions"}

# Of accelerate and transformers. The tests of the integrations check that they exist.
OTHER_PACKAGES = {"_cp_context", "_models", "_attn_implementation", "_loss_function"}
OTHER_PACKAGES |= {"_patch_ids_from_lengths", "_position_bucket"}

# Where a private name that is given as a string may come from.
OWNERS = (torch.Tensor, torch, torch._C, torch.ops.aten, torch.nn.functional, torch.nn.Module())
OF_OPTIONAL_MODULES = {"_varlen_attn", "_varlen_attn_out", "_flash_attn_fwd", "_flash_attn_bwd"}

MODULE = re.compile(r"(torch|flash_attn)(\.[A-Za-z_]\w*)+")


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not (name.startswith("__") and name.endswith("__"))


@cache
def own_names() -> frozenset[str]:
    """Every underscored name that a file of ringspan defines."""
    found: set[str] = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
    return frozenset(name for name in found if is_private(name))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """The line and the full name of every private name of the packages in a source."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if _is_of_packages(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and _is_of_packages(node.module):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            names = [_full_name(node, aliases)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            names = [node.value] if MODULE.fullmatch(node.value) or _is_private_operator(node.value) else []
        for name in names:
            if any(is_private(part) for part in name.split(".")):
                yield node.lineno, name


def _is_of_packages(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] in PACKAGES


def _is_private_operator(text: str) -> bool:
    """Whether a string is a private name of PyTorch: of a function, an operator, an attribute of a tensor."""
    if not is_private(text) or not text.isidentifier() or text in own_names():
        return False
    return text in OF_OPTIONAL_MODULES or any(hasattr(owner, text) for owner in OWNERS)


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Local names that stand for something of the packages: ``import torch as t``, ``aten = torch.ops.aten``."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_of_packages(alias.name):
                    found[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and _is_of_packages(node.module):
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            full = _full_name(node.value, found)
            if _is_of_packages(full):
                found.update({target.id: full for target in node.targets if isinstance(target, ast.Name)})
    return found


def _full_name(node: ast.Attribute, aliases: dict[str, str]) -> str:
    """``torch._C._x`` for a chain of attributes; if it begins at an object of unknown type, only its private parts."""
    parts: list[str] = []
    start: ast.expr = node
    while isinstance(start, ast.Attribute):
        parts.insert(0, start.attr)
        start = start.value
    if isinstance(start, ast.Name) and start.id in aliases:
        return ".".join([aliases[start.id], *parts])
    unknown = [part for part in parts if is_private(part) and part not in own_names() | STANDARD_LIBRARY | OTHER_PACKAGES]
    return ".".join(unknown)
