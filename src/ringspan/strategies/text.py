"""Strategies by name, and as text such as ``"gather(stages=4)"``.

The built-in ones are in :mod:`ringspan.strategies.registry`. A strategy that is made of others imports this file.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ringspan.caching.by_digest import cache_by_digest, clear_digest_caches
from ringspan.errors import PlanError
from ringspan.layouts.options import parse_options
from ringspan.strategies.protocol import Strategy

# The group of caches whose results depend on which strategy a name means. They are cleared when a name is registered.
BY_STRATEGY_NAME = "by strategy name"

STRATEGIES: dict[str, type[Any]] = {}
BUILT_IN: set[str] = set()


def register_strategy(name: str, strategy: type[Any]) -> None:
    """Register a strategy under a name: a frozen dataclass that derives from :class:`ringspan.strategies.Strategy`.

    Any frozen dataclass whose instances map a Problem to a Program is accepted, but the automatic choice does not
    consider it.
    """
    if not re.fullmatch(r"[a-z]\w*", name) or name == "auto":
        raise PlanError(f"a strategy's name is a lower-case word other than auto, not {name!r}")
    if not is_dataclass(strategy) or not strategy.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise PlanError(f"a strategy is a frozen dataclass, whose fields are its options; {strategy!r} is not one")
    if name in BUILT_IN:
        raise PlanError(f"{name} is a strategy of ringspan: register yours under another name")
    STRATEGIES[name] = strategy
    clear_digest_caches(BY_STRATEGY_NAME)


@cache_by_digest(256, plain=True, group=BY_STRATEGY_NAME)
def parse_strategy(text: str) -> Strategy:
    """Make a strategy from text: ``"ring"``, ``"gather(stages=4)"``, ….

    >>> parse_strategy("gather(stages=4)")
    Gather(stages=4)
    """
    kind, options = parse_options(text, STRATEGIES, kind="strategy", error=PlanError)
    try:
        strategy: Strategy = kind(**options)
        return strategy
    except (TypeError, ValueError, RecursionError) as error:  # the last: a strategy that is made of others
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"cannot make strategy {text!r}: {type(error).__name__}: {error}") from error


def strategy_for_heads(text: str, heads: int, kv_heads: int) -> str:
    """Return the strategy with its options ``heads`` and ``kv_heads`` set.

    >>> strategy_for_heads("ulysses", 12, 4)
    'ulysses(heads=12, kv_heads=4, keep=True)'
    """
    strategy: Any = parse_strategy(text)
    try:
        if isinstance(strategy, Strategy):
            return spec(strategy.for_heads(heads, kv_heads))
        return spec(replace(strategy, heads=heads, kv_heads=kv_heads))
    except TypeError as error:
        raise PlanError(
            f"strategy {text} splits heads, but has no options heads= and kv_heads= to set to {heads} and {kv_heads}"
        ) from error


def strategy_without_keeping(text: str) -> str:
    """Return the strategy whose programs keep no rows for the backward pass.

    >>> strategy_without_keeping("ulysses(heads=12, kv_heads=4)"), strategy_without_keeping("ring")
    ('ulysses(heads=12, kv_heads=4, keep=False)', 'ring')
    """
    strategy: Any = parse_strategy(text)
    other = strategy.without_keeping() if isinstance(strategy, Strategy) else strategy
    return text if other == strategy else spec(other)


def spec(strategy: str | Strategy) -> str:
    """Return the strategy as text with all its options. This form is used in digests and plan files.

    >>> spec("gather")
    'gather(stages=1)'
    """
    if isinstance(strategy, str):
        strategy = parse_strategy(strategy)
    for name, kind in STRATEGIES.items():
        if type(strategy) is kind:
            options = ", ".join(f"{f.name}={getattr(strategy, f.name)!r}" for f in fields(strategy))  # type: ignore[arg-type]
            return f"{name}({options})" if options else name
    raise PlanError(f"{strategy!r} is not a registered strategy; register it with ringspan.planner.register_strategy")
