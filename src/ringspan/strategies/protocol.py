"""The interface of a strategy: a frozen dataclass that makes programs and describes itself.

Your own strategy derives from :class:`Strategy` and defines ``__call__``. Everything else has a default. Registered
with ``ringspan.planner.register_strategy``, it can be named in ``ringspan.plan(strategy=)``, verified, explained,
costed and saved in plan files. If it defines ``candidates``, it takes part in ``strategy="auto"``. If it defines
``example_options``, the fuzz draws its options::

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
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.timeline import Loads, simulate, without_messages
from ringspan.costs.workload import Workload
from ringspan.plans.columns import ProgramColumns
from ringspan.plans.data import PHASES, Phase, Program
from ringspan.plans.moving_side import MovingSide
from ringspan.plans.problem import Problem
from ringspan.plans.shape import Shape


class Strategy(ABC):
    """Makes the program of a rank. The fields of the dataclass are the strategy's options."""

    __slots__ = ()

    moving_side: ClassVar[MovingSide | None] = None
    """``KEYS`` or ``QUERIES`` if only these are sent to other ranks, and each rank computes for all its own rows of the
    other side. The work of each rank then follows from the layout alone. None: unknown, or heads are exchanged for
    tokens."""

    splits_heads: ClassVar[bool] = False
    """Whether programs depend on the number of heads. Such a strategy has the options ``heads`` and ``kv_heads``, and
    is not chosen automatically if the number of heads is not known."""

    depends_on_layout: ClassVar[bool] = True
    """Whether the balance of the work depends on the layout. If not, the automatic choice tries only the simplest
    layout."""

    @abstractmethod
    def __call__(self, problem: Problem) -> Program:
        """Make the program of one rank."""

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        """Return the instances that the automatic choice compares, the simplest first. By default there are none."""
        return ()

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        """Return a lower bound of the time that each rank spends in each step, without making programs.

        The automatic choice uses it to skip candidates that cannot be the fastest. The bound counts the tiles of the
        layout, each at the best speed of the kinds of band that it may be joined to, one launch for each step that
        computes, and the rows that must be sent. A program can only add to that: more launches, slower kinds of band,
        packed messages. There is one exception: bands of a mask that complement each other, as two triangles do, may
        join to a band of a faster kind. Few masks have such bands, and the error is at most the ratio of the speeds. By
        default the bound is zero.
        """
        return {phase: without_messages(np.zeros((len(workload.ranks), 1))) for phase in PHASES}

    def columns(self, workload: Workload) -> ProgramColumns | None:
        """Return the programs of all ranks as columns, which are costed much faster than programs. None, the default:
        the automatic choice makes the programs."""
        return None

    def computing_seconds(self, workload: Workload) -> float:
        """Return a lower bound of the compute time of the busiest rank. It is cheaper than ``least_seconds``."""
        return 0.0 if self.moving_side is None else workload.busiest(self.moving_side)

    def transfer_seconds(self, workload: Workload) -> float:
        """Return a lower bound of the time in which a rank receives its messages. It is cheaper than ``least_seconds``,
        and excludes strategies that send much more than is needed. By default it is zero."""
        return 0.0

    def least_seconds(self, workload: Workload) -> float:
        """Return a lower bound of the time of forward and backward together."""
        return sum(simulate(loads, workload.machine.overlap).seconds for loads in self.loads(workload).values())

    def for_heads(self, heads: int, kv_heads: int) -> Strategy:
        """Return the strategy for these numbers of heads. It is called for plans whose program depends on them."""
        made: Strategy = replace(self, heads=heads, kv_heads=kv_heads)  # type: ignore[type-var]
        return made

    def without_keeping(self) -> Strategy:
        """Return the strategy whose programs keep no rows for the backward pass (``Slot.kept``), for compiled code. It
        must be defined if programs have slots that are kept."""
        return self

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        """Return the values of the options for random tests on ``world`` ranks. ``heads`` and ``kv_heads`` come from
        the tensors."""
        return {}


@dataclass(frozen=True, slots=True)
class UndescribedStrategy(Strategy):
    """Wraps a user's callable that is not a :class:`Strategy`. It has the defaults."""

    make: Any

    def __call__(self, problem: Problem) -> Program:
        program: Program = self.make(problem)
        return program


def described(strategy: Any) -> Strategy:
    """Return the strategy itself, or a callable wrapped as one."""
    return strategy if isinstance(strategy, Strategy) else UndescribedStrategy(strategy)
