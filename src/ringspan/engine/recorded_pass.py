"""A recorded pass: a flat list of allocations, views, calls and exchanges, and its replay.

:mod:`ringspan.engine.recording` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.transports import PostExchange, RankGenerator, WaitExchange

Result = tuple[Tensor, ...]


class Geometry(NamedTuple):
    """The place of a tensor in its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Empty(NamedTuple):
    """Allocate memory."""

    to: int
    geometry: Geometry
    device: torch.device


class View(NamedTuple):
    """Make a view of the memory of another register. Its offset counts from the start of that register."""

    to: int
    source: int
    geometry: Geometry


class Call(NamedTuple):
    """Call an operator, or launch a kernel. ``results`` are (index of the result, register)."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keyword_arguments: dict[str, Any]
    registers: tuple[tuple[int, int], ...]
    """Which arguments are registers: (index of the argument, register)."""
    lists: tuple[tuple[int, tuple[int | None, ...]], ...]
    """Which arguments are lists of registers. Some operators take None for a tensor in a list."""
    results: tuple[tuple[int | None, int], ...]
    """Which results are new registers: (index of the result, register). None is the only result."""


class Post(NamedTuple):
    """Start an exchange."""

    label: str
    sends: tuple[tuple[int, int], ...]
    recvs: tuple[tuple[int, int], ...]


class Wait(NamedTuple):
    """Wait for the exchange of this number."""

    exchange: int


Instruction = Empty | View | Call | Post | Wait


class RecordedPass(NamedTuple):
    """The instructions of a pass, each with the registers that are released after it, and the registers of its
    result."""

    instructions: tuple[tuple[Instruction, tuple[int, ...]], ...]
    registers: int
    constants: tuple[tuple[int, Tensor], ...]
    results: tuple[int, ...]

    def replay(self, inputs: Sequence[Tensor | None]) -> RankGenerator[Result]:
        """Run the instructions on other inputs of the same shapes, strides and dtypes."""
        tensors: list[Any] = [*inputs, *[None] * (self.registers - len(inputs))]
        del inputs
        for number, constant in self.constants:
            tensors[number] = constant
        pending: list[Any] = []
        for instruction, released in self.instructions:
            if isinstance(instruction, View):
                tensors[instruction.to] = _view(tensors[instruction.source], instruction.geometry)
            elif isinstance(instruction, Empty):
                to, (shape, stride, _, dtype), device = instruction
                tensors[to] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            elif isinstance(instruction, Call):
                _call(instruction, tensors)
            elif isinstance(instruction, Post):
                label, sends, recvs = instruction
                pending.append(
                    (
                        yield PostExchange(
                            label,
                            tuple([(peer, tensors[n]) for peer, n in sends]),
                            tuple([(peer, tensors[n]) for peer, n in recvs]),
                        )
                    )
                )
            else:
                yield WaitExchange(pending[instruction.exchange])
                pending[instruction.exchange] = None
            for number in released:
                tensors[number] = None
        return tuple([tensors[n] for n in self.results])


def _view(source: Tensor, geometry: Geometry) -> Tensor:
    shape, stride, offset, dtype = geometry
    if dtype == source.dtype:
        return source.as_strided(shape, stride, source.storage_offset() + offset)
    return source.new_empty(0, dtype=dtype).set_(source.untyped_storage(), offset, shape, stride)


def _call(call: Call, tensors: list[Any]) -> None:
    function, fixed, keyword_arguments, registers, lists, results = call
    arguments = [*fixed]
    for index, number in registers:
        arguments[index] = tensors[number]
    for index, numbers in lists:
        arguments[index] = [None if n is None else tensors[n] for n in numbers]
    found = function(*arguments, **keyword_arguments)
    for place, number in results:
        tensors[number] = found if place is None else found[place]


def registers_of(instruction: Instruction) -> Iterable[int]:
    """Return the registers that an instruction reads or makes."""
    if isinstance(instruction, Empty):
        return (instruction.to,)
    if isinstance(instruction, View):
        return (instruction.to, instruction.source)
    if isinstance(instruction, Call):
        lists = [number for _, numbers in instruction.lists for number in numbers if number is not None]
        return [number for _, number in (*instruction.registers, *instruction.results)] + lists
    if isinstance(instruction, Post):
        return [number for _, number in (*instruction.sends, *instruction.recvs)]
    return ()
