"""The messages of each step. They are computed once for a plan, because a step may have many transfers.

Rows that go to several peers are one *payload*. Messages that arrive next to each other in one slot are one *receive
run*: their receive buffers are views of the slot, made by a single call::

    sends    kv rows 0-4 to rank 1, to rank 2; rows 4-8 to rank 2        two payloads
    recvs    kv rows 0-2 from rank 1, rows 2-6 from rank 2               one receive run of two messages
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from ringspan.plans import Step, Task, Transfer
from ringspan.plans.data import OVERWRITES, PayloadKind, Phase, RankPlan


class Payload(NamedTuple):
    """Rows to send. They are copied into a buffer of their own unless they are contiguous in their slot, or stay
    here."""

    transfer: Transfer
    is_packed: bool


class ReceiveRun(NamedTuple):
    """Consecutive rows of one slot that are received in place, and the receives they belong to."""

    what: str
    slot: int
    start: int
    stop: int
    sizes: tuple[int, ...]
    recvs: tuple[int, ...]


class Arrival(NamedTuple):
    """A transfer that ends on this rank.

    It comes from one of this rank's own payloads, or it is received into a buffer outside the slot (``buffer`` is the
    index of the receive). If both are None, it is received in place.
    """

    transfer: Transfer
    payload: int | None = None
    buffer: int | None = None


class StepMessages(NamedTuple):
    """The transfers of a step. Integers are indices of payloads, and of receives from other ranks."""

    payloads: tuple[Payload, ...]
    sends: tuple[tuple[int, int], ...]  # (peer, payload)
    recvs: tuple[Transfer, ...]
    receive_runs: tuple[ReceiveRun, ...]
    arrivals: tuple[Arrival, ...]  # in the order in which they are applied
    is_on_wire: bool  # whether any message is sent to or received from another rank


class ScheduledStep(NamedTuple):
    """A step as the executor runs it. ``messages`` is None if the step has no transfers."""

    number: int
    label: str
    tasks: tuple[Task, ...]
    messages: StepMessages | None


def schedule(plan: RankPlan, phase: Phase, only: PayloadKind | None = None) -> tuple[ScheduledStep, ...]:
    """Return the steps of a phase, with the payloads of one kind or of all.

    Call it as ``plan.derived(schedule, phase)``, which caches the result.
    """
    return tuple(
        ScheduledStep(n, f"{phase} step {n}", step.tasks, _messages(step, plan.rank) if step.sends or step.recvs else None)
        for n, step in enumerate(_of_kind(step, only) for step in plan.program.steps(phase))
    )


def _of_kind(step: Step, only: PayloadKind | None) -> Step:
    if only is None:
        return step
    sends, recvs = (tuple(t for t in side if t.what == only) for side in (step.sends, step.recvs))
    return Step(sends=sends, recvs=recvs, tasks=step.tasks)


def _messages(step: Step, rank: int) -> StepMessages:
    numbers: dict[tuple[object, ...], int] = {}
    sent = [(t, numbers.setdefault((t.what, t.slot, t.rows, t.heads, t.complete), len(numbers))) for t in step.sends]
    of_number = {number: t for t, number in sent}
    sends = tuple((t.peer, number) for t, number in sent if t.peer != rank)
    recvs = tuple(t for t in step.recvs if t.peer != rank)
    in_place = {n for n, t in enumerate(recvs) if t.what in OVERWRITES and not t.is_packed}
    to_self, from_others = iter([number for t, number in sent if t.peer == rank]), count()
    arrivals = []
    for t in step.recvs:
        if t.peer == rank:
            arrivals.append(Arrival(t, payload=next(to_self)))
        else:
            n = next(from_others)
            arrivals.append(Arrival(t, buffer=None if n in in_place else n))
    leaves = {number for _, number in sends}
    return StepMessages(
        payloads=tuple(Payload(t, t.is_packed and not _is_copied_once(t, n in leaves)) for n, t in sorted(of_number.items())),
        sends=sends,
        recvs=recvs,
        receive_runs=tuple(_receive_runs(recvs, in_place)),
        arrivals=tuple(arrivals),
        is_on_wire=bool(sends or recvs),
    )


def _is_copied_once(t: Transfer, leaves: bool) -> bool:
    """Return whether rows that stay on this rank are copied from slot 0 when they arrive. Nothing overwrites slot 0."""
    return not leaves and t.what in OVERWRITES and t.slot == 0 and len(t.rows) == 1


def _receive_runs(recvs: tuple[Transfer, ...], in_place: set[int]) -> list[ReceiveRun]:
    """Join the in-place receives of adjacent rows of a slot."""
    runs: list[ReceiveRun] = []
    for n in sorted(in_place, key=lambda n: (recvs[n].what, recvs[n].slot, recvs[n].rows[0])):
        t, ((start, stop),) = recvs[n], recvs[n].rows
        last = runs[-1] if runs else None
        if last is not None and (last.what, last.slot, last.stop) == (t.what, t.slot, start):
            runs[-1] = last._replace(stop=stop, sizes=(*last.sizes, stop - start), recvs=(*last.recvs, n))
        else:
            runs.append(ReceiveRun(t.what, t.slot, start, stop, (stop - start,), (n,)))
    return runs
