"""The flight recorder: the last calls and exchanges of this rank, as text and as JSON.

Every rank keeps its last 64 calls and exchanges of each group in memory. When a call fails, the last few exchanges are
attached to the error as a note, which Python prints with the traceback, and with ``RINGSPAN_FLIGHT_RECORD=path`` all of
them are written to ``path.<global rank>.json``.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from ringspan.debugging.settings import settings
from ringspan.errors import TransportError
from ringspan.transports.calls import ExchangeRecord
from ringspan.transports.watchdog import WatchedGroup, watchdog

IN_NOTE = 8  # exchanges that are printed with an error

log = logging.getLogger("ringspan.transports")


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The last calls and exchanges of this rank on each of its groups. ``str()`` gives text."""

    groups: tuple[dict[str, Any], ...]

    def to_json(self) -> str:
        return json.dumps({"groups": self.groups})

    def __str__(self) -> str:
        return (
            "\n".join(_text(group, len(group["exchanges"])) for group in self.groups) or "no group of several ranks is in use"
        )


def flight_record() -> FlightRecord:
    """Return the last calls and exchanges of this process, for each group of several ranks that it has used.

    ::

        print(rs.flight_record())                # text, one line an exchange
        rs.flight_record().to_json()             # with the time of each, to merge the records of several ranks
    """
    return FlightRecord(tuple(_as_dict(group) for group in watchdog.groups() if group.calls.number))


def record_failure(group: WatchedGroup, error: BaseException) -> None:
    """Attach the last exchanges to an error of communication, and write the file that the environment asks for."""
    record = _as_dict(group)
    if isinstance(error, TransportError) and record["exchanges"]:
        error.add_note(_text(record, IN_NOTE))
    if settings.flight_record is not None:
        path = f"{settings.flight_record}.{group.global_ranks[group.rank]}.json"
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(flight_record().to_json())
        except OSError as failure:
            log.warning("the flight record could not be written to %s: %s", path, failure)


def _as_dict(group: WatchedGroup) -> dict[str, Any]:
    calls = group.calls
    return {
        "rank": group.rank,
        "global_ranks": list(group.global_ranks),
        "calls": [
            {"number": call.number, "error": call.error, **call.description._asdict(), "thread": call.thread}
            for call in list(calls.recent)
        ],
        "exchanges": [{name: getattr(x, name) for name in ExchangeRecord.__slots__} for x in list(calls.exchanges)],
        "error": None if calls.group_error is None else f"{type(calls.group_error).__name__}: {calls.group_error}",
    }


def _text(group: dict[str, Any], count: int) -> str:
    ranks = ", ".join(map(str, group["global_ranks"]))
    lines = [f"the last exchanges of rank {group['rank']} of the group of global ranks {ranks}:"]
    for x in group["exchanges"][-count:]:
        clock = time.strftime("%H:%M:%S", time.localtime(x["posted"])) + f"{x['posted'] % 1:.3f}"[1:]
        took = (
            f"{1e3 * (x['done'] - x['posted']):.1f} ms" if x["done"] else f"not ended after {time.time() - x['posted']:.1f} s"
        )
        peers = ", ".join(map(str, dict.fromkeys(x["peers"])))
        bytes_moved = f"sent {x['sent']:,} B, received {x['received']:,} B"
        lines.append(f"  {clock}  call {x['number']}, {x['label']}, with rank {peers}: {bytes_moved}, {took}")
    return "\n".join(lines)
