"""Plans as JSON files. Nothing is unpickled, imported or run. The error for a malformed file names the wrong field."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from ringspan.errors import LayoutError, MaskError, PlanError
from ringspan.layouts import Layout
from ringspan.masks import Band, BatchMask, Mask
from ringspan.masks import table as tables
from ringspan.masks.table import K0, K1, MAX_LENGTH, Q0, Q1
from ringspan.plans.data import (
    AS_ACCUMULATED,
    DKV_DTYPES,
    PAYLOAD_KINDS,
    VERSION,
    Program,
    RankPlan,
    Slot,
    Step,
    Task,
    Transfer,
)
from ringspan.plans.slot_tokens import SlotTokens

T = TypeVar("T")
L = TypeVar("L")
P = TypeVar("P", bound=RankPlan)

# These bound memory and time for a file from an unknown source.
MAX_HEADS = 2**16
MAX_ROWS = 2**14


def to_json(plan: RankPlan) -> str:
    """Return the plan of one rank, with its mask and layouts."""
    if plan.mask.predicate is not None:
        raise PlanError(
            f"{plan.mask.name} is defined by a function, and functions are not saved in files: "
            "save the plan of a mask of bands, or plan anew from the function"
        )
    return json.dumps(
        {
            "ringspan_plan": VERSION,
            "digest": plan.digest,
            "rank": plan.rank,
            "strategy": plan.strategy,
            "mask": {
                "name": plan.mask.name,
                "q_len": plan.mask.q_len,
                "k_len": plan.mask.k_len,
                "bands": plan.mask.table.tolist(),
                **({"rows": len(plan.mask.rows)} if isinstance(plan.mask, BatchMask) else {}),
            },
            "q_layout": {"name": plan.q_layout.name, "spans": plan.q_layout.spans},
            "kv_layout": {"name": plan.kv_layout.name, "spans": plan.kv_layout.spans},
            "q_slots": [_slot_out(slot) for slot in plan.program.q_slots],
            "kv_slots": [_slot_out(slot) for slot in plan.program.kv_slots],
            "heads": plan.program.heads,
            **({"dkv_dtype": plan.program.dkv_dtype} if plan.program.rounds_dkv else {}),
            **({"in_flight": plan.program.in_flight} if plan.program.in_flight != 1 else {}),
            "forward": [_step_out(step) for step in plan.program.forward],
            "backward": [_step_out(step) for step in plan.program.backward],
            "notes": plan.notes,
        }
    )


def from_json(text: str, kind: type[P]) -> P:
    """Read a plan as an instance of ``kind``. Every field is checked here; ``plan.verify()`` checks the program."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # a ValueError that is no JSONDecodeError: a number of too many digits
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise PlanError(f"not a plan file: invalid JSON{where}. A plan file is the output of plan.to_json()") from None
    top = _Field(data, "plan")
    version = top.get("ringspan_plan").whole()
    if version != VERSION:
        raise PlanError(
            f"plan.ringspan_plan: this ringspan reads version {VERSION}, the file has version {version}: make the plan again "
            "with rs.plan, and save it with to_json()"
        )
    mask = _mask(top.get("mask"))
    q_layout = _layout(top.get("q_layout"), mask.lengths[0])
    kv_layout = _layout(top.get("kv_layout"), mask.lengths[1])
    rank = top.get("rank").whole(0, q_layout.world - 1)
    if q_layout.world != kv_layout.world:
        raise PlanError(f"plan.kv_layout: has {kv_layout.world} ranks where q_layout has {q_layout.world}")
    plan = kind(
        mask=mask,
        q_layout=q_layout,
        kv_layout=kv_layout,
        strategy=top.get("strategy").text(),
        rank=rank,
        program=Program(
            forward=top.get("forward").items(_step),
            backward=top.get("backward").items(_step),
            q_slots=top.get("q_slots").items(_slot),
            kv_slots=top.get("kv_slots").items(_slot),
            heads=top.get("heads").optional(_heads),
            dkv_dtype=top.get("dkv_dtype").one_of(DKV_DTYPES) if "dkv_dtype" in data else AS_ACCUMULATED,
            in_flight=top.get("in_flight").whole(1, MAX_LENGTH) if "in_flight" in data else 1,
        ),
        notes=top.get("notes").items(_Field.text),
    )
    if plan.digest != top.get("digest").text():
        raise PlanError(f"plan.digest: is {top.get('digest').text()}, but the plan in the file has digest {plan.digest}")
    return plan


class _Field:
    """A value of the file, with its name for error messages."""

    def __init__(self, value: Any, name: str) -> None:
        self.value, self.name = value, name

    def wrong(self, expected: str) -> PlanError:
        came = repr(self.value)
        return PlanError(f"{self.name}: expected {expected}, got {came if len(came) < 80 else came[:77] + '...'}")

    def get(self, key: str) -> _Field:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if key not in self.value:
            raise PlanError(f"{self.name}.{key}: missing")
        return _Field(self.value[key], f"{self.name}.{key}")

    def whole(self, low: int = -(2**63), high: int = 2**63 - 1) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not low <= self.value <= high:
            raise self.wrong("an integer" if low < 0 else f"an integer from {low} to {high}")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("text")
        return self.value

    def one_of(self, allowed: tuple[L, ...]) -> L:
        for value in allowed:
            if self.value == value:
                return value
        raise self.wrong(f"one of {', '.join(map(str, allowed))}")

    def items(self, read: Callable[[_Field], T], size: int | None = None) -> tuple[T, ...]:
        if not isinstance(self.value, list) or (size is not None and len(self.value) != size):
            raise self.wrong("a list" if size is None else f"a list of {size}")
        return tuple(read(_Field(item, f"{self.name}[{i}]")) for i, item in enumerate(self.value))

    def optional(self, read: Callable[[_Field], T]) -> T | None:
        return None if self.value is None else read(self)


def _mask(field: _Field) -> Mask:
    q_len, k_len = field.get("q_len").whole(0), field.get("k_len").whole(0)
    try:
        whole = Mask.from_bands([(0, q_len, 0, k_len, -q_len, k_len)], q_len, k_len)
        table = np.array(field.get("bands").items(_band), dtype=np.int64).reshape(-1, 6)
    except (MaskError, OverflowError) as error:
        raise PlanError(f"{field.name}: {error}") from None
    try:
        tables.check_count(len(table), "the mask")
        i, j = tables.touching(table, table)
    except MaskError as error:
        raise PlanError(f"{field.name}.bands: {error}") from None
    twice = tables.tighten(tables.intersect_pairwise(table[i[i < j]], table[j[i < j]]))
    within = tables.intersect(table, whole.table)
    tight = tables.tighten(table)
    if len(twice) or not np.array_equal(tight, table) or tables.area(within).sum() != tables.area(table).sum():
        raise PlanError(f"{field.name}.bands: bands must be disjoint, tight and within {q_len} × {k_len}")
    name = field.get("name").text()
    if "rows" in field.value:
        return _batch_mask(field, table, (q_len, k_len), name)
    return Mask(table, q_len, k_len, name=name)


def _batch_mask(field: _Field, table: tables.Table, lengths: tuple[int, int], name: str) -> Mask:
    """Return the mask of a batch from the bands of its rows laid end to end."""
    rows = field.get("rows").whole(1, MAX_ROWS)
    q_len, k_len = (n // rows for n in lengths)
    row = table[:, Q0] // max(q_len, 1)
    if (q_len * rows, k_len * rows) != lengths:
        raise PlanError(f"{field.name}.rows: {lengths[0]} × {lengths[1]} are not the lengths of {rows} rows")
    outside = (row != (table[:, Q1] - 1) // max(q_len, 1)) | (table[:, K0] < row * k_len) | (table[:, K1] > (row + 1) * k_len)
    if outside.any():
        raise PlanError(f"{field.name}.bands: a band is in several of the {rows} rows")
    shift = np.stack([row * q_len, row * q_len, row * k_len, row * k_len, *[row * (k_len - q_len)] * 2], axis=1)
    in_row, order = table - shift, np.argsort(row, kind="stable")
    cuts = np.searchsorted(row[order], np.arange(rows + 1)).tolist()
    made = [Mask(in_row[order[a:b]], q_len, k_len, name=f"row {n}") for n, (a, b) in enumerate(pairwise(cuts))]
    return BatchMask(made, name=name)


def _layout(field: _Field, length: int) -> Layout:
    spans = field.get("spans").items(lambda rank: rank.items(lambda span: span.items(_Field.whole, 3)))
    try:
        return Layout(spans, length=length, name=field.get("name").text())
    except LayoutError as error:
        raise PlanError(f"{field.name}.spans: {error}") from None


def _band(field: _Field) -> Band:
    return Band(*field.items(_Field.whole, 6))


def _pair(field: _Field) -> tuple[int, int]:
    start, stop = field.items(lambda x: x.whole(0), 2)
    if stop < start:
        raise field.wrong("a range [start, stop] with start <= stop")
    return start, stop


def _heads(field: _Field) -> tuple[int, int]:
    q, kv = field.items(lambda x: x.whole(1, MAX_HEADS), 2)
    return q, kv


def _slot_out(slot: Slot) -> dict[str, Any]:
    return {"rows": slot.rows, "heads": slot.heads, **({"kept": True} if slot.kept else {})}


def _slot(field: _Field) -> Slot:
    rows, heads = field.get("rows").whole(0), field.get("heads").optional(lambda h: h.whole(0))
    return Slot(rows=rows, heads=heads, kept="kept" in field.value and field.get("kept").one_of((True, False)))


def _tokens_out(tokens: SlotTokens | None) -> dict[str, Any] | None:
    return None if tokens is None else {"first_head": tokens.first_head, "spans": tokens.spans.tolist()}


def _tokens(field: _Field) -> SlotTokens:
    def span(s: _Field) -> tuple[int, int, int]:
        start, stop, step = s.items(lambda x: x.whole(0, MAX_LENGTH), 3)
        if not start < stop or step < 1:
            raise s.wrong("a span [start, stop, step] with start < stop and step >= 1")
        return start, stop, step

    spans = np.array(field.get("spans").items(span), dtype=np.int64).reshape(-1, 3)
    return SlotTokens(spans, first_head=field.get("first_head").whole(0, MAX_HEADS))


def _step_out(step: Step) -> dict[str, Any]:
    def transfer(t: Transfer) -> dict[str, Any]:
        made = {"what": t.what, "peer": t.peer, "slot": t.slot, "rows": t.rows, "heads": t.heads}
        return {**made, **({"complete": True} if t.complete else {})}

    def task(t: Task) -> dict[str, Any]:
        tokens = {"q_tokens": _tokens_out(t.q_tokens), "kv_tokens": _tokens_out(t.kv_tokens)}
        return {"q_slot": t.q_slot, "kv_slot": t.kv_slot, "bands": t.bands, **tokens}

    return {
        "sends": [transfer(t) for t in step.sends],
        "recvs": [transfer(t) for t in step.recvs],
        "tasks": [task(t) for t in step.tasks],
    }


def _step(field: _Field) -> Step:
    def transfer(t: _Field) -> Transfer:
        what = t.get("what").text()
        if what not in PAYLOAD_KINDS:
            raise t.get("what").wrong(f"one of {', '.join(PAYLOAD_KINDS)}")
        return Transfer(
            what=what,
            peer=t.get("peer").whole(0),
            slot=t.get("slot").whole(0),
            rows=t.get("rows").items(_pair),
            heads=t.get("heads").optional(_pair),
            complete="complete" in t.value and t.get("complete").one_of((True, False)),
        )

    def task(t: _Field) -> Task:
        return Task(
            q_slot=t.get("q_slot").whole(0),
            kv_slot=t.get("kv_slot").whole(0),
            bands=t.get("bands").items(_band),
            q_tokens=t.get("q_tokens").optional(_tokens),
            kv_tokens=t.get("kv_tokens").optional(_tokens),
        )

    return Step(
        sends=field.get("sends").items(transfer),
        recvs=field.get("recvs").items(transfer),
        tasks=field.get("tasks").items(task),
    )
