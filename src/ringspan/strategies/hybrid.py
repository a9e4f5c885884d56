"""Hybrid: heads are split within a node, and keys are sent between the ranks of different nodes that have the same
heads.

::

    6 ranks, per_node=2                 heads a      heads b
    node 0 (tokens of ranks 0 and 1)    rank 0  ⇄    rank 1       ⇄ step 0: tokens for heads
    node 1                              rank 2  ⇄    rank 3       ↕ then keys between the nodes,
    node 2                              rank 4  ⇄    rank 5         as exchange or ring move them

So ``per_node`` heads are enough for any number of ranks, and a key is sent over the slow link once for each node that
sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.plan_cost import flops_per_pair
from ringspan.costs.timeline import Loads
from ringspan.costs.workload import Workload
from ringspan.errors import PlanError
from ringspan.layouts import areas
from ringspan.plans.data import PHASES, Phase, Program
from ringspan.plans.problem import Problem
from ringspan.plans.shape import Shape
from ringspan.strategies.exchange import Exchange
from ringspan.strategies.head_split import check_keep, head_split_loads, split_heads
from ringspan.strategies.heads import check_heads
from ringspan.strategies.nodes import Nodes, check_per_node
from ringspan.strategies.protocol import Strategy
from ringspan.strategies.ring import Ring

BETWEEN: dict[str, Callable[[Problem], Program]] = {"exchange": Exchange(), "ring": Ring()}


@dataclass(frozen=True, slots=True)
class Hybrid(Strategy):
    """Ulysses within nodes of ``per_node`` ranks, exchange or ring between them.

    The nodes must have the same size: the ranks that compute the same heads are those with the same index on their
    nodes. As with :class:`~ringspan.strategies.ulysses.Ulysses`, any number of heads is possible, and the options are
    defaults until the tensors are known. ``keep`` is as there: of the rows of the node, not of those from other nodes.
    """

    per_node: int = 8
    between: str = "exchange"
    heads: int = 32
    kv_heads: int = 8
    keep: bool = True

    splits_heads = True

    def __post_init__(self) -> None:
        check_per_node(self.per_node)
        check_heads(self.heads, self.kv_heads)
        check_keep(self.keep)
        if self.between not in BETWEEN:
            raise PlanError(f"between must be one of {', '.join(BETWEEN)}; got {self.between!r}")

    def __call__(self, problem: Problem) -> Program:
        nodes = Nodes(problem.world, min(self.per_node, problem.world))
        if nodes.world % nodes.per_node:
            fitting = [n for n in range(1, nodes.world + 1) if nodes.world % n == 0]
            raise PlanError(
                f"hybrid needs nodes of one size, but {nodes.world} ranks are not a multiple of per_node={self.per_node}: give "
                f"per_node= one of {', '.join(map(str, fitting))}, or take hierarchical, whose last node may be smaller"
            )
        return split_heads(problem, nodes, self.heads, self.kv_heads, keep=self.keep, between=BETWEEN[self.between])

    def without_keeping(self) -> Strategy:
        return replace(self, keep=False)

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        """Compute of the busiest node at the best speed. Rows that are sent between nodes are not counted."""
        per_node = min(self.per_node, workload.world)
        pairs = np.add.reduceat(areas(workload.mask, workload.q_layout), np.arange(0, workload.world, per_node)).max()
        shape, machine = workload.shape, workload.machine
        speeds = {"forward": machine.forward.best, "backward": machine.backward.best}
        work = {phase: float(pairs) * shape.heads * flops_per_pair(shape, phase) / speeds[phase] for phase in PHASES}
        return head_split_loads(workload, per_node, work, keep=self.keep)

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        if not shape.heads or not 1 < machine.per_node < world or world % machine.per_node:
            return []
        return [cls(per_node=machine.per_node, heads=shape.heads, kv_heads=shape.kv_heads)]

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        nodes = [n for n in range(1, world + 1) if world % n == 0]
        return {"per_node": nodes, "between": tuple(BETWEEN), "keep": (True, False)}
