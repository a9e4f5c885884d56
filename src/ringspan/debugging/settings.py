"""The environment variables of ringspan. They serve diagnosis and change no result. They are read here only.

    ===============================  =================================================================================
    RINGSPAN_DEBUG=1                 compare every call with those of the other ranks, the values that a score_mod
                                     captures included; raise for non-finite inputs and partial results; compare
                                     sharded tokens and parameters of all ranks; ``rs.strict()``. Slow
    RINGSPAN_FLIGHT_RECORD=path      write the last exchanges of this rank to ``path.<rank>.json`` when a call fails
    ===============================  =================================================================================

Logging needs no variable of its own: all loggers are below the logger ``ringspan``, which ``logging`` and
``TORCH_LOGS="+ringspan"`` configure.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

OFF = ("", "0", "false", "no", "off")


class Settings:
    """What the environment variables say. Attributes, because they are read in every call."""

    __slots__ = ("debug", "flight_record", "strict")

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.debug = environment.get("RINGSPAN_DEBUG", "").lower() not in OFF
        self.strict = self.debug
        self.flight_record = environment.get("RINGSPAN_FLIGHT_RECORD") or None


settings = Settings(os.environ)

# Without a handler logging would print warnings to stderr, and every warning here is of an error that is raised, too.
logging.getLogger("ringspan").addHandler(logging.NullHandler())
