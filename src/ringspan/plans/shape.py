"""The shape of the tensors, and the bytes of messages and slots that follow from it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ringspan.errors import InputError, PlanError
from ringspan.plans.data import (
    AS_ACCUMULATED,
    OVERWRITES,
    DkvDtype,
    PayloadKind,
    Phase,
    Program,
    RankPlan,
    Slot,
    Transfer,
    side,
)

# The alignment in bytes that kernels require of rows they read in place.
ROW_ALIGNMENT = 16

DIRECTIONS: tuple[Literal["sends", "recvs"], ...] = ("sends", "recvs")

# The smallest value of each field. A batch may be empty, and queries may have no heads.
MINIMUM = {"heads": 0, "kv_heads": 1, "head_dim": 1, "v_dim": 1, "batch": 0}

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Batch, heads, head dims and dtype of a call. ``v_dim`` is ``head_dim`` by default."""

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise InputError(
                f"attention is computed in {', '.join(ITEM_BYTES)}; got {self.dtype!r}: give its name, as in dtype='bfloat16'"
            )
        for name, fewest in MINIMUM.items():
            if name != "v_dim" or self.v_dim is not None:
                _check_count(name, getattr(self, name), fewest)
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly: give a multiple of the key heads"
            )

    @property
    def item(self) -> int:
        """Bytes of an element of q, k, v."""
        return ITEM_BYTES[self.dtype]

    @property
    def accumulator_item(self) -> int:
        """Bytes of an element of an accumulator: at least float32."""
        return accumulator_item(self.item)

    @property
    def words(self) -> str:
        """
        >>> Shape(heads=32, kv_heads=8, head_dim=192, v_dim=128).words
        'batch 1, 32 query heads, 8 key heads, head dim 192/128, bfloat16'
        """
        width = f"{self.head_dim}/{self.v_dim}" if self.v_dim is not None else f"{self.head_dim}"
        return f"batch {self.batch}, {self.heads} query heads, {self.kv_heads} key heads, head dim {width}, {self.dtype}"

    def row_bytes(self, what: PayloadKind, phase: Phase, heads: int | None = None) -> int:
        """Return the bytes of one row in a slot, and in a message unless dkv is sent in another dtype."""
        d, dv = self.head_dim, self.head_dim if self.v_dim is None else self.v_dim
        if side(what) == "kv":
            heads = self.kv_heads if heads is None else heads
            return self.batch * heads * (d + dv) * (self.item if what == "kv" else self.accumulator_item)
        heads = self.heads if heads is None else heads
        if what == "q":
            return self.batch * heads * (d * self.item if phase == "forward" else saved_bytes(d, dv, self.item))
        if what == "dout":
            return self.batch * heads * upstream_bytes(dv, self.item)
        return self.batch * heads * (d if what == "dq" else dv + 1) * self.accumulator_item

    def message_row_bytes(
        self,
        what: PayloadKind,
        phase: Phase,
        heads: int | None = None,
        *,
        dkv_dtype: DkvDtype = AS_ACCUMULATED,
        complete: bool = False,
    ) -> int:
        """Return the bytes of one row in a message."""
        if what == "out" and complete:  # with lse, as dout with dlse
            return self.row_bytes("dout", phase, heads)
        stored = self.row_bytes(what, phase, heads)
        item = self.item if complete else self.accumulator_item
        if what == "dkv" and dkv_dtype != AS_ACCUMULATED:
            item = min(item, ITEM_BYTES[dkv_dtype]) if complete else ITEM_BYTES[dkv_dtype]
        return stored if what in OVERWRITES else stored // self.accumulator_item * item

    def transfer_bytes(self, transfer: Transfer, phase: Phase, program: Program) -> int:
        """Return the bytes of a message: of the heads it names, or of all heads of its slot."""
        return self.total_bytes((transfer,), phase, program)

    def total_bytes(self, transfers: Iterable[Transfer], phase: Phase, program: Program) -> int:
        """Return the bytes of many messages. Rows of one kind are summed first, since a rank may have thousands of
        messages."""
        rows: dict[tuple[PayloadKind, int, tuple[int, int] | None, bool], int] = {}
        for t in transfers:
            kind = t.what, t.slot, t.heads, t.complete
            rows[kind] = rows.get(kind, 0) + t.count
        total = 0
        for (what, slot, named, complete), count in rows.items():
            slots = program.kv_slots if side(what) == "kv" else program.q_slots
            heads = slots[slot].heads if named is None else named[1] - named[0]
            total += count * self.message_row_bytes(what, phase, heads, dkv_dtype=program.dkv_dtype, complete=complete)
        return total

    def slot_bytes(self, slot: Slot, what: PayloadKind, phase: Phase) -> int:
        return slot.rows * self.row_bytes(what, phase, slot.heads)


def check_shape(given: Any) -> Shape:
    """Return the argument ``shape=`` of a user, which must be a :class:`Shape`."""
    if not isinstance(given, Shape):
        raise PlanError(f"shape must be a ringspan.Shape, as Shape(heads=32, kv_heads=8, head_dim=128); got {given!r}")
    return given


def _check_count(name: str, given: Any, fewest: int) -> None:
    try:
        count = operator.index(given)
    except TypeError:
        raise InputError(f"{name} must be an integer, not {given!r}") from None
    if count < fewest:
        raise InputError(f"{name} must be at least {fewest}, not {count}")


# The shape that is assumed where none is given.
EXAMPLE = Shape(heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")


def accumulator_item(item: int) -> int:
    return max(4, item)


def saved_bytes(head_dim: int, v_dim: int, item: int) -> int:
    """Return the bytes of one head of one query in the backward pass, where the query is sent with dout, out, lse and
    dlse (see ``engine/packing.py``)."""
    return _aligned((head_dim + 2 * v_dim) * item + 2 * accumulator_item(item))


def upstream_bytes(v_dim: int, item: int) -> int:
    """Return the bytes of one head of the upstream gradient of one query: dout and dlse."""
    return _aligned(v_dim * item + accumulator_item(item))


def _aligned(used: int) -> int:
    return used + -used % ROW_ALIGNMENT


def check_heads_fit(plan: RankPlan, shape: Shape) -> None:
    """Raise if the plan splits heads and was made for other numbers of heads than those of the shape."""
    planned = plan.program.heads
    if planned not in (None, (shape.heads, shape.kv_heads)):
        raise PlanError(
            f"the plan {plan.strategy} is for {planned[0]} query heads and {planned[1]} key heads, the shape has {shape.heads} "
            f"and {shape.kv_heads}: use plan.for_heads({shape.heads}, {shape.kv_heads})"
        )


def bytes_moved(plan: RankPlan, shape: Shape, phase: Phase) -> tuple[int, int]:
    """Return the bytes that this rank sends and receives in a phase. The plan must fit the heads of the shape."""
    check_heads_fit(plan, shape)
    sends, recvs = ([t for t in plan.transfers(phase, direction) if t.peer != plan.rank] for direction in DIRECTIONS)
    return shape.total_bytes(sends, phase, plan.program), shape.total_bytes(recvs, phase, plan.program)
