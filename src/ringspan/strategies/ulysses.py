"""Ulysses: exchange heads for tokens. Every rank computes all tokens of some heads and sends the results to their
owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringspan.costs.hardware import Hardware
from ringspan.costs.timeline import Loads
from ringspan.costs.workload import Workload, tile_seconds
from ringspan.plans.data import PHASES, Phase, Program
from ringspan.plans.problem import Problem
from ringspan.plans.shape import Shape
from ringspan.strategies.exchange import Exchange
from ringspan.strategies.head_split import check_keep, head_split_loads, split_heads
from ringspan.strategies.heads import check_heads
from ringspan.strategies.nodes import Nodes
from ringspan.strategies.protocol import Strategy


@dataclass(frozen=True, slots=True)
class Ulysses(Strategy):
    """Exchange heads for tokens. Bytes per rank shrink with the number of ranks, and one launch covers the whole
    sequence. Ranks beyond the number of query heads have no work.

    Any number of heads is possible (see ``heads.py``). The options are defaults until the tensors are known: attention
    calls :meth:`ringspan.Plan.for_heads`, which fits the plan to their heads. Work is shared by heads, so it is
    balanced on any layout. Long spans are best: the interleaved tokens of a striped layout give many bands.

    ``keep``: the backward pass keeps the queries and keys that the forward pass has received, in place of the rank's
    own, and exchanges the gradients only. Without it they are sent again.
    """

    heads: int = 32
    kv_heads: int = 8
    keep: bool = True

    splits_heads = True
    depends_on_layout = False

    def __post_init__(self) -> None:
        check_heads(self.heads, self.kv_heads)
        check_keep(self.keep)

    def __call__(self, problem: Problem) -> Program:
        world = Nodes(problem.world, per_node=problem.world)
        return split_heads(problem, world, self.heads, self.kv_heads, keep=self.keep, between=Exchange())

    def without_keeping(self) -> Strategy:
        return replace(self, keep=False)

    def loads(self, workload: Workload) -> Mapping[Phase, Loads]:
        whole = tile_seconds(workload.mask.table, workload.machine, workload.shape)
        of_phases = {phase: float(whole[phase].sum()) for phase in PHASES}
        return head_split_loads(workload, workload.world, of_phases, keep=self.keep)

    @classmethod
    def candidates(cls, world: int, machine: Hardware, shape: Shape) -> Sequence[Strategy]:
        return [cls(heads=shape.heads, kv_heads=shape.kv_heads)] if 1 < world <= shape.heads else []

    @classmethod
    def example_options(cls, world: int) -> Mapping[str, Sequence[Any]]:
        return {"keep": (True, False)}
