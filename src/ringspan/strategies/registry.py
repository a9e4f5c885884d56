"""The built-in strategies, by name."""

from __future__ import annotations

from ringspan.strategies.exchange import Exchange
from ringspan.strategies.gather import Gather
from ringspan.strategies.hierarchical import Hierarchical
from ringspan.strategies.hybrid import Hybrid
from ringspan.strategies.interleave import Interleave
from ringspan.strategies.pass_q import PassQ
from ringspan.strategies.ring import Ring
from ringspan.strategies.text import (
    BUILT_IN,
    BY_STRATEGY_NAME,
    STRATEGIES,
    parse_strategy,
    register_strategy,
    spec,
    strategy_for_heads,
    strategy_without_keeping,
)
from ringspan.strategies.ulysses import Ulysses

# The simplest first: of candidates with equal cost, the automatic choice takes the first.
STRATEGIES.update(
    {
        "exchange": Exchange,
        "ring": Ring,
        "gather": Gather,
        "ulysses": Ulysses,
        "hierarchical": Hierarchical,
        "hybrid": Hybrid,
        "pass_q": PassQ,
        "interleave": Interleave,
    }
)
BUILT_IN.update(STRATEGIES)

__all__ = [
    "BUILT_IN",
    "BY_STRATEGY_NAME",
    "STRATEGIES",
    "parse_strategy",
    "register_strategy",
    "spec",
    "strategy_for_heads",
    "strategy_without_keeping",
]
