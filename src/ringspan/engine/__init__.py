"""The engine: walks plans. No I/O in it; a transport drives it."""

from ringspan.engine.autograd import attend
from ringspan.engine.executor import Call, backward, forward
from ringspan.engine.inputs import DTYPES, Look, look_of, shape_of
from ringspan.engine.operator import Seat, attend_by_ticket, is_watched, take_seat

__all__ = [
    "DTYPES",
    "Call",
    "Look",
    "Seat",
    "attend",
    "attend_by_ticket",
    "backward",
    "forward",
    "is_watched",
    "look_of",
    "shape_of",
    "take_seat",
]
