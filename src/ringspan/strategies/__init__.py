"""Strategies: each makes the program of a rank from a mask and its layouts. One file each."""

from ringspan.strategies.exchange import Exchange
from ringspan.strategies.gather import Gather
from ringspan.strategies.hierarchical import Hierarchical
from ringspan.strategies.hybrid import Hybrid
from ringspan.strategies.interleave import Interleave
from ringspan.strategies.make_program import make_program
from ringspan.strategies.pass_q import PassQ
from ringspan.strategies.protocol import Strategy
from ringspan.strategies.registry import STRATEGIES, parse_strategy, register_strategy, spec, strategy_for_heads
from ringspan.strategies.ring import Ring
from ringspan.strategies.ulysses import Ulysses

__all__ = [
    "STRATEGIES",
    "Exchange",
    "Gather",
    "Hierarchical",
    "Hybrid",
    "Interleave",
    "PassQ",
    "Ring",
    "Strategy",
    "Ulysses",
    "make_program",
    "parse_strategy",
    "register_strategy",
    "spec",
    "strategy_for_heads",
]
