"""The engine: walks plans. No I/O in it; a transport drives it."""

from ringspan.engine.autograd import attend
from ringspan.engine.inputs import DTYPES, shape_of
from ringspan.engine.operator import Seat, attend_by_ticket, is_watched, take_seat
from ringspan.engine.walk import Call, backward, forward

__all__ = [
    "DTYPES",
    "Call",
    "Seat",
    "attend",
    "attend_by_ticket",
    "backward",
    "forward",
    "is_watched",
    "shape_of",
    "take_seat",
]
