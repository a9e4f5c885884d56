"""``rs.clear_caches()`` empties every container that grows while the process runs."""

from __future__ import annotations

import ast
from pathlib import Path

import ringspan as rs
from ringspan.caching.registry import on_clear_caches

ROOT = Path(rs.__file__).parent
CONTAINERS = {
    "dict",
    "list",
    "set",
    "OrderedDict",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "WeakSet",
    "deque",
    "defaultdict",
}

# Containers that are not caches, and why.
NOT_CACHES = {
    "caching/registry.py: _clear_functions": "the list of caches",
    "caching/by_digest.py: _caches": "the list of caches",
    "caching/by_stream.py: _caches": "the list of caches",
    "engine/pass_cache.py: _caches": "the caches of all plans, held weakly; clear_caches empties each of them",
    "strategies/text.py: STRATEGIES": "the registered strategies",
    "strategies/text.py: BUILT_IN": "the names of ringspan's own strategies",
    "frontends/rank_comparison.py: layouts_in_use": "digests of layouts with RINGSPAN_DEBUG=1: unshard refuses any other",
    "torch_private/script_calls.py: _operators": "the operators of a scripted function, as long as it lives",
    "frontends/sdpa.py: _active": "the kernels that the user has activated",
    "transports/watchdog.py: _states": "the calls of a group, as long as it lives: their numbers must agree on all ranks",
    "transports/handshake.py: _agreements": "what groups agreed on: ranks that forget it would wait for ranks that do not",
    "compat/block_masks.py: _origins": "the whole mask and the layouts of a sharded BlockMask, as long as the shard lives",
    "compat/block_masks.py: _shard_mods": "sharded BlockMasks by the number that compiled code passes on, held weakly",
    "compat/traced_style.py: _contexts": "styles by the number that compiled code passes on, held weakly",
    "compat/shardings.py: _of_groups": "the layouts of shards, as long as their process group lives",
    "engine/operator.py: _callbacks": "functions to call before each forward pass of the operator",
    "integrations/trainer.py: _losses": "the loss function of a model, as long as it lives: torch.compile has guards on it",
    "transports/bounded.py: _threads": "threads that the interpreter waits for when it ends",
    "testing/workers.py: _parent": "the connection of a worker process",
}


def empty_containers(path: Path) -> list[str]:
    """The names of module-level variables that are an empty container at import and are not emptied by clear_caches."""
    source = path.read_text()
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_empty_container(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = ast.unparse(target)
            if f"on_clear_caches({name}.clear)" not in source:
                names.append(f"{path.relative_to(ROOT)}: {name}")
    return names


def _is_empty_container(value: ast.expr | None) -> bool:
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=func, args=[], keywords=[]):
            return ast.unparse(func).split("[")[0].split(".")[-1] in CONTAINERS
    return False


def test_clear_caches_empties_every_module_level_cache() -> None:
    found = [name for path in sorted(ROOT.rglob("*.py")) for name in empty_containers(path)]
    assert set(found) == set(NOT_CACHES), "add on_clear_caches(NAME.clear), or a reason to NOT_CACHES"


def test_only_the_caching_package_uses_lru_cache() -> None:
    users = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if "lru_cache" in path.read_text()}
    assert users == {"caching/by_digest.py"}


def test_clear_caches_calls_what_was_added() -> None:
    cache = {1: 2}
    on_clear_caches(cache.clear)
    rs.clear_caches()
    assert not cache
