"""The engine: walks plans. No I/O in it; a transport drives it."""

from ringspan.engine.autograd import attend
from ringspan.engine.inputs import DTYPES, shape_of
from ringspan.engine.walk import Call, backward, forward

__all__ = ["DTYPES", "Call", "attend", "backward", "forward", "shape_of"]
