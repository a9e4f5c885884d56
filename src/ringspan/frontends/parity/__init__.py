"""Compare a model on several ranks with one process, and name the first difference and its probable cause."""

from ringspan.frontends.parity.causes import CAUSES, Cause
from ringspan.frontends.parity.check import check_parity
from ringspan.frontends.parity.result import Parity, ParityRow

__all__ = ["CAUSES", "Cause", "Parity", "ParityRow", "check_parity"]
