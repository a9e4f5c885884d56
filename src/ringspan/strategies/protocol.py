"""What a strategy is: a frozen dataclass that makes programs and describes itself.

A strategy of your own derives from :class:`Strategy` and defines ``__call__``. Everything else has a default.
Registered with ``ringspan.planner.register_strategy``, it can be named in ``ringspan.plan(strategy=)``, verified,
explained, costed and saved in plan files. With ``candidates`` it takes part in ``strategy="auto"``, with
``example_options`` the fuzz draws its options::

    @dataclass(frozen=True, slots=True)
    class Mine(Strategy):
        moving_side = KEYS

        def __call__(self, problem: Problem) -> Program: ...

        @classmethod
        def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
            return [cls()]

    register_strategy("mine", Mine)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.timeline import Loads, simulate, without_messages
from ringspan.costs.workload import Workload
from ringspan.plans.data import PHASES, Phase, Program
from ringspan.plans.moving_side import MovingSide
from ringspan.plans.problem import Problem
from ringspan.plans.shape import Shape


class Strategy(ABC):
    """How a rank's program is made. The fields of the dataclass are the strategy's options."""

    __slots__ = ()

    moving_side: ClassVar[MovingSide | None] = None
    """``KEYS`` or ``QUERIES`` if only these leave the rank that owns them, and the rank computes with all of its rows
    of the other side. Then the layout alone says how long each rank computes. None: unknown, or heads are exchanged for
    tokens."""

    splits_heads: ClassVar[bool] = False
    """Whether programs depend on the number of heads. Such a strategy has the options ``heads`` and ``kv_heads``, and
    is not chosen automatically where the number of heads is not known."""

    depends_on_layout: ClassVar[bool] = True
    """Whether the layout changes how the work is shared. If not, the automatic choice tries only the simplest
    layout."""

    @abstractmethod
    def __call__(self, problem: Problem) -> Program:
        """The program of one rank."""

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        """The options that the automatic choice compares, the simpler first. None by default."""
        return ()

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        """What the ranks do in each step, without making programs: a lower bound, so that the automatic choice can skip
        what cannot be the fastest.

        What is known beforehand are the tiles of the layout, each at the best speed of the kinds it may be joined into,
        one launch for what a step computes, and the rows that have to move. A program can only add to that: more
        launches, slower kinds, messages that have to be packed. There is one exception: bands of a mask that complement
        each other, as two triangles do, may join to one of a faster kind. Masks are seldom written so, and the error is
        no larger than the kinds differ. By default nothing is known.
        """
        return {phase: without_messages(np.zeros((len(workload.ranks), 1))) for phase in PHASES}

    def computing_seconds(self, workload: Workload) -> float:
        """How long the rank that computes most computes at least: a bound that is found faster than
        ``least_seconds``."""
        return 0.0 if self.moving_side is None else workload.busiest(self.moving_side)

    def least_seconds(self, workload: Workload) -> float:
        """How long both directions take at least."""
        return sum(simulate(loads, workload.machine.overlap).seconds for loads in self.loads(workload).values())

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        """Values of the options for random tests on so many ranks. ``heads`` and ``kv_heads`` come from the tensors."""
        return {}


@dataclass(frozen=True, slots=True)
class UndescribedStrategy(Strategy):
    """A user's callable that is no :class:`Strategy`, with the defaults."""

    make: Any

    def __call__(self, problem: Problem) -> Program:
        program: Program = self.make(problem)
        return program


def described(strategy: Any) -> Strategy:
    """The strategy itself, or a description of a callable that has none."""
    return strategy if isinstance(strategy, Strategy) else UndescribedStrategy(strategy)
