"""What of a step's transfers is the same in every call: worked out once for a plan, since a step may have many.

What goes to several peers is one *parcel*, and rooms that lie side by side are cut from their slot at once::

    sends    kv rows 0-4 to rank 1, to rank 2; rows 4-8 to rank 2        two parcels
    recvs    kv rows 0-2 from rank 1, rows 2-6 from rank 2               one wall, two rooms
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from ringspan.planner import Plan
from ringspan.plans import Step, Transfer
from ringspan.plans.data import Phase
from ringspan.plans.shape import is_packed


class Wall(NamedTuple):
    """Rooms side by side in one slot: the rows of messages that are received where they belong, and whose they are."""

    what: str
    slot: int
    start: int
    stop: int
    sizes: tuple[int, ...]
    recvs: tuple[int, ...]


class Way(NamedTuple):
    """How something arrives: out of a parcel to oneself, in a room apart (a receive's number), or where it belongs."""

    transfer: Transfer
    parcel: int | None = None
    room: int | None = None


class Route(NamedTuple):
    """The transfers of a step. Numbers are those of parcels, and of receives from others."""

    parcels: tuple[Transfer, ...]
    sends: tuple[tuple[int, int], ...]  # to whom, which parcel
    recvs: tuple[Transfer, ...]
    walls: tuple[Wall, ...]
    arrivals: tuple[Way, ...]  # in the order in which they are to be taken in


def routes(plan: Plan, phase: Phase) -> tuple[Route, ...]:
    """One for each step."""
    return tuple(_route(step, plan.rank) for step in plan.program.steps(phase))


def _route(step: Step, rank: int) -> Route:
    numbers: dict[tuple[object, ...], int] = {}
    sent = [(t, numbers.setdefault((t.what, t.slot, t.rows, t.heads), len(numbers))) for t in step.sends]
    of_number = {number: t for t, number in sent}
    recvs = tuple(t for t in step.recvs if t.peer != rank)
    # What lies together in its slot is received right there.
    here = {n for n, t in enumerate(recvs) if t.what in ("q", "kv") and not is_packed(t)}
    to_self, from_others = iter([number for t, number in sent if t.peer == rank]), count()
    arrivals = []
    for t in step.recvs:
        if t.peer == rank:
            arrivals.append(Way(t, parcel=next(to_self)))
        else:
            n = next(from_others)
            arrivals.append(Way(t, room=None if n in here else n))
    return Route(
        parcels=tuple(of_number[number] for number in range(len(numbers))),
        sends=tuple((t.peer, number) for t, number in sent if t.peer != rank),
        recvs=recvs,
        walls=tuple(_walls(recvs, here)),
        arrivals=tuple(arrivals),
    )


def _walls(recvs: tuple[Transfer, ...], here: set[int]) -> list[Wall]:
    walls: list[Wall] = []
    for n in sorted(here, key=lambda n: (recvs[n].what, recvs[n].slot, recvs[n].rows[0])):
        t, ((start, stop),) = recvs[n], recvs[n].rows
        last = walls[-1] if walls else None
        if last is not None and (last.what, last.slot, last.stop) == (t.what, t.slot, start):
            walls[-1] = last._replace(stop=stop, sizes=(*last.sizes, stop - start), recvs=(*last.recvs, n))
        else:
            walls.append(Wall(t.what, t.slot, start, stop, (stop - start,), (n,)))
    return walls
