"""Settings of the whole process, as torch's module has them. All else in ringspan is told by arguments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class _RotateMethod(Enum):
    ALL_TO_ALL = auto()
    ALL_GATHER = auto()


# What travels in torch's words, and the strategy that does so in ours.
STRATEGIES = {_RotateMethod.ALL_GATHER: "gather", _RotateMethod.ALL_TO_ALL: "ring"}
METHODS = {"allgather": _RotateMethod.ALL_GATHER, "alltoall": _RotateMethod.ALL_TO_ALL}


@dataclass
class _ContextParallelOptions:
    """``enable_load_balance`` makes ``context_parallel`` lay buffers out head to tail. ``convert_to_f32`` is only kept: partial
    results are always merged in at least float32."""

    convert_to_f32: bool = True
    enable_load_balance: bool = True
    rotate_method: _RotateMethod = _RotateMethod.ALL_GATHER

    @property
    def strategy(self) -> str:
        return STRATEGIES[self.rotate_method]


_cp_options = _ContextParallelOptions()


def set_rotate_method(rotate_method: str) -> None:
    """How keys travel from now on: ``"allgather"`` (all at once, our ``gather``) or ``"alltoall"`` (our ``ring``)."""
    if rotate_method not in METHODS:
        raise NotImplementedError(
            f'there is no rotate method {rotate_method!r}: say "allgather" or "alltoall", or use '
            "ringspan.ContextParallel(mesh, mask, strategy=...), which knows more ways"
        )
    _cp_options.rotate_method = METHODS[rotate_method]
