"""Process-wide settings, as torch's module has them. The rest of ringspan is configured by arguments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ringspan.compat.shardings import CONTIGUOUS, HEAD_TAIL, STATES, declare_order


class _RotateMethod(Enum):
    ALL_TO_ALL = auto()
    ALL_GATHER = auto()


# The ringspan strategy for each of torch's rotate methods.
STRATEGIES = {_RotateMethod.ALL_GATHER: "gather", _RotateMethod.ALL_TO_ALL: "ring"}
METHODS = {"allgather": _RotateMethod.ALL_GATHER, "alltoall": _RotateMethod.ALL_TO_ALL}


@dataclass
class _ContextParallelOptions:
    """``enable_load_balance`` says that tensors are in head-tail order (zigzag) and not contiguous.

    It is read when a ``context_parallel`` block is opened, and by calls whose tensors carry no layout.
    ``convert_to_f32=False`` sends gradients of the keys and values of bfloat16 tensors in bfloat16 instead of float32,
    which halves these messages and rounds at every rank. Partial results are still merged, and gradients summed, in at
    least float32 (float64 for float64 tensors, which torch rounds to float32 if it is True). It is read where
    ``enable_load_balance`` is.
    """

    convert_to_f32: bool = True
    enable_load_balance: bool = True
    rotate_method: _RotateMethod = _RotateMethod.ALL_GATHER

    @property
    def strategy(self) -> str:
        return STRATEGIES[self.rotate_method]


class _ProcessOptions(_ContextParallelOptions):
    """The settings of this process. An assignment to ``enable_load_balance`` says in which order all tensors are."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "enable_load_balance":
            declare_order(HEAD_TAIL if value else CONTIGUOUS)
            STATES.note(bool(value))


_cp_options: _ContextParallelOptions = _ProcessOptions()


def set_rotate_method(rotate_method: str) -> None:
    """Set how keys are exchanged: ``"allgather"`` (strategy ``gather``) or ``"alltoall"`` (strategy ``ring``)."""
    if rotate_method not in METHODS:
        raise NotImplementedError(
            f'there is no rotate method {rotate_method!r}: use "allgather" or "alltoall", or '
            "ringspan.ContextParallel(mesh, mask, strategy=...), which has more strategies"
        )
    _cp_options.rotate_method = METHODS[rotate_method]
