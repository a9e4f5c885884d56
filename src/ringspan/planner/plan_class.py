"""``ringspan.Plan``: the plan of one rank, with methods that make, check, cost and save plans."""

from __future__ import annotations

from dataclasses import replace

from ringspan.caching.by_digest import cache_by_digest
from ringspan.costs.hardware import Hardware, hardware
from ringspan.costs.plan_cost import Cost, cost
from ringspan.errors import PlanError
from ringspan.layouts import Layout
from ringspan.masks import Mask
from ringspan.plans.data import AS_ACCUMULATED, DKV_DTYPES, DkvDtype, Program, RankPlan
from ringspan.plans.explain import explain
from ringspan.plans.files import from_json, to_json
from ringspan.plans.shape import EXAMPLE, Shape, check_shape
from ringspan.plans.verify import verify
from ringspan.strategies.make_program import make_program
from ringspan.strategies.registry import BY_STRATEGY_NAME, strategy_for_heads, strategy_without_keeping

Machine = str | Hardware  # ``hardware`` is also the name of an argument below


class Plan(RankPlan):
    """One rank's program, and the mask, layouts and strategy it was made from.

    Make one with :func:`ringspan.plan`; no process group is needed. ``notes`` explain the automatic choice.
    """

    def at(self, rank: int) -> Plan:
        """Return the plan of another rank of the same world."""
        if rank == self.rank:
            return self
        return plan_rank(self.mask, self.q_layout, self.kv_layout, self.strategy, rank, self.notes, self.program.dkv_dtype)

    def for_heads(self, heads: int, kv_heads: int) -> Plan:
        """Return the plan for tensors with these numbers of heads: this plan, unless it splits heads and was made for
        others."""
        if self.program.heads in (None, (heads, kv_heads)):
            return self
        strategy = strategy_for_heads(self.strategy, heads, kv_heads)
        notes = (*self.notes, f"strategy {strategy}: for the heads of the tensors")
        return plan_rank(self.mask, self.q_layout, self.kv_layout, strategy, self.rank, notes, self.program.dkv_dtype)

    def without_keeping(self) -> Plan:
        """Return the plan that keeps no rows for the backward pass but exchanges them again: this plan, if it keeps
        none. The tasks are the same."""
        strategy, plan = strategy_without_keeping(self.strategy), self
        if strategy != self.strategy:
            plan = plan_rank(self.mask, self.q_layout, self.kv_layout, strategy, self.rank, self.notes, self.program.dkv_dtype)
        if plan.program.keeps_rows:
            raise PlanError(
                f"strategy {strategy} keeps rows for the backward pass, which compiled code cannot do: define "
                "without_keeping() so that it returns a strategy that keeps none, as strategies/ulysses.py does"
            )
        return plan

    def verify(self) -> Plan:
        """Check the plans of all ranks by simulating them (:mod:`ringspan.plans.verify`).

        Every visible pair must be computed exactly once, and sends must match receives. No row may be read before it
        has arrived, or overwritten while in use. Every partial result and gradient must reach the rank that owns it.
        Raises :class:`~ringspan.errors.PlanError` with rank and step; returns the plan itself if all checks pass.
        """
        verify([self.at(rank) for rank in range(self.world)])
        return self

    def explain(self, shape: Shape | None = None) -> str:
        """Return the steps of this rank as text, with bytes for tensors of the given shape."""
        for_shape = EXAMPLE if shape is None else check_shape(shape)
        return explain(self.for_heads(for_shape.heads, for_shape.kv_heads), shape)

    def cost(self, hardware: Machine, shape: Shape | None = None) -> Cost:
        """Return the cost of the plans of all ranks on a machine: seconds, exposed time, memory, and a timeline of each
        rank."""
        return _cost(self, hardware, EXAMPLE if shape is None else check_shape(shape))

    def to_json(self) -> str:
        return to_json(self)

    @staticmethod
    def from_json(text: str, *, trust: bool = False) -> Plan:
        """Read the output of :meth:`to_json`.

        A malformed text raises :class:`~ringspan.errors.PlanError` with the name of the field. So does a program other
        than the one that the strategy makes for this mask and these layouts. ``trust=True`` takes the program as it is:
        call :meth:`verify` on such a plan.
        """
        plan = from_json(text, Plan)
        if not trust:
            expected = make_program(plan.mask, plan.q_layout, plan.kv_layout, plan.strategy, plan.rank)
            if plan.program != replace(expected, dkv_dtype=plan.program.dkv_dtype):
                raise PlanError(
                    f"plan.forward, plan.backward: the program in the file is not the one that {plan.strategy} makes for this "
                    "mask and these layouts. The file was changed, or another version of the strategy wrote it: make the plan "
                    "again, or read it with trust=True and call verify()"
                )
        return plan


def _cost(plan: Plan, machine: Machine, shape: Shape) -> Cost:
    fitted = plan.for_heads(shape.heads, shape.kv_heads)
    return cost([fitted.at(rank) for rank in range(plan.world)], hardware(machine), shape)


def check_dkv_dtype(given: object) -> DkvDtype:
    """Return the argument ``dkv_dtype=`` of a user: the name of a dtype, or a ``torch.dtype``."""
    name = str(given).removeprefix("torch.")
    for allowed in DKV_DTYPES:
        if name == allowed:
            return allowed
    raise PlanError(f"dkv_dtype must be one of {', '.join(map(repr, DKV_DTYPES))}, not {given!r}")


def plan_rank(
    mask: Mask,
    q_layout: Layout,
    kv_layout: Layout,
    strategy: str,
    rank: int,
    notes: tuple[str, ...] = (),
    dkv_dtype: DkvDtype = AS_ACCUMULATED,
) -> Plan:
    """Return the plan of one rank for given layouts and a given strategy. A repeated call is a dictionary look-up.

    A plan holds its mask, and a mask with a function holds the tensors that the function has captured, perhaps on a
    GPU. So the plan of such a mask is not cached, only its program.
    """
    make = _make_cached if mask.predicate is None else _make
    return make(mask, q_layout, kv_layout, strategy, rank, notes, dkv_dtype)


def _make(
    mask: Mask,
    q_layout: Layout,
    kv_layout: Layout,
    strategy: str,
    rank: int,
    notes: tuple[str, ...],
    dkv_dtype: DkvDtype,
) -> Plan:
    program = make_program(mask, q_layout, kv_layout, strategy, rank)
    if dkv_dtype != AS_ACCUMULATED and isinstance(program, Program):
        program = replace(program, dkv_dtype=dkv_dtype)
    return Plan(mask=mask, q_layout=q_layout, kv_layout=kv_layout, strategy=strategy, rank=rank, program=program, notes=notes)


# A plan has its program, and the schedule that is derived from it.
_make_cached = cache_by_digest(
    512, group=BY_STRATEGY_NAME, bytes_of=lambda plan: 2 * plan.program.approximate_bytes + plan.mask.table.nbytes
)(_make)
