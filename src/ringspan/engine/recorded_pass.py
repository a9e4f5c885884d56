"""A recorded pass: a flat list of allocations, views, calls and exchanges, which is replayed as a Python function.

:mod:`ringspan.engine.recording` makes the list. Its instructions become lines of Python, because a loop over them would
take as long as many of the calls::

    def replay(r0, r1):
        o0 = r0.storage_offset()
        r2 = empty((1, 512, 32, 128), (2097152, 4096, 128, 1), dtype=a0, device=a1)
        r3 = r0.as_strided((1, 512, 32, 128), (4096, 4096, 128, 1), o0 + 0)
        a2(r3, r1, r2, 0.088, None)
        del r3
        return (r2,)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.transports import PostExchange, RankGenerator, WaitExchange

# A recording is for inputs of the same address modulo this. Kernels require aligned addresses, and PyTorch and Triton
# choose other kernels for tensors that are not aligned.
ALIGNMENT = 16

Result = tuple[Tensor, ...]


class Geometry(NamedTuple):
    """The place of a tensor in its memory. The offset counts from the tensor that stands for all of the memory."""

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
    """Make a view of the memory of another register."""

    to: int
    source: int
    geometry: Geometry
    source_dtype: torch.dtype


class FunctionCall(NamedTuple):
    """Call an operator, or launch a kernel."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keyword_arguments: dict[str, Any]
    registers: dict[int, int]
    """Which arguments are registers: index of the argument -> register."""
    lists: dict[int, tuple[int | None, ...]]
    """Which arguments are lists of registers. Some operators take None for a tensor in a list."""
    results: tuple[tuple[int | None, int], ...]
    """Which results are new registers: (index of the result, register). None is the only result."""
    new_bytes: int
    """The memory of these results."""


class Post(NamedTuple):
    """Start an exchange. Messages are pairs of (peer, register)."""

    number: int
    label: str
    sends: tuple[tuple[int, int], ...]
    recvs: tuple[tuple[int, int], ...]


class Wait(NamedTuple):
    """Wait for the exchange of this number."""

    number: int


Instruction = Empty | View | FunctionCall | Post | Wait


class RecordedPass:
    """The instructions of a pass as a function. ``source`` is its text.

    Register 5 is the variable ``r5``, and exchange 0 is ``p0``. Objects without a literal are ``a0``, ``a1``, ….
    """

    def __init__(
        self,
        inputs: int,
        constants: Sequence[tuple[int, Tensor]],
        instructions: Sequence[Instruction],
        results: Sequence[int],
        restore: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.instructions = tuple(instructions)
        self._restore = restore
        self._names: dict[str, Any] = {
            "PostExchange": PostExchange,
            "WaitExchange": WaitExchange,
            "empty": torch.empty_strided,
            **{f"r{number}": constant for number, constant in constants},
        }
        self._name_of: dict[int, str] = {}  # by the id of an object in _names
        kept = {*results, *(number for number, _ in constants)}
        lines = []
        # Registers o5 of which is the start of r5 in its memory. New memory starts at 0.
        self._new = {instruction.to for instruction in self.instructions if isinstance(instruction, Empty)}
        with_offset = set(self._new)
        for instruction, released in zip(self.instructions, _last_uses(self.instructions, kept), strict=True):
            if isinstance(instruction, View) and instruction.source not in with_offset:
                with_offset.add(instruction.source)
                lines.append(f"o{instruction.source} = r{instruction.source}.storage_offset()")
            lines += self._lines(instruction)
            if released:
                lines.append(f"del {', '.join(f'r{n}' for n in released)}")
        lines.append(f"return {_tuple([f'r{n}' for n in results])}")
        lines.append("yield")  # never reached: it makes a pass without exchanges a generator, too
        head = f"def replay({', '.join(f'r{n}' for n in range(inputs))}):"
        self.source = "\n    ".join([head, *lines]) + "\n"
        exec(compile(self.source, "<recorded pass>", "exec"), self._names)  # numbers and names that are made here
        # The function refers to its globals. If they referred to it, only the garbage collector would free them.
        self._replay: Callable[..., RankGenerator[Result]] = self._names.pop("replay")

    def replay(self, inputs: Sequence[Tensor | None]) -> RankGenerator[Result]:
        """Run the instructions on other inputs of the same shapes, strides and dtypes."""
        return self._replay(*inputs)

    def restore_constants(self) -> None:
        """Put the constants back into their caches, from which other passes may have evicted them."""
        for restore in self._restore:
            restore()

    def _lines(self, instruction: Instruction) -> list[str]:
        if isinstance(instruction, Empty):
            to, (shape, stride, _, dtype), device = instruction
            return [f"r{to} = empty({shape}, {stride}, dtype={self._text(dtype)}, device={self._text(device)})"]
        if isinstance(instruction, View):
            to, source, (shape, stride, offset, dtype), source_dtype = instruction
            if dtype == source_dtype:
                start = offset if source in self._new else f"o{source} + {offset}"
                return [f"r{to} = r{source}.as_strided({shape}, {stride}, {start})"]
            new = f"r{source}.new_empty(0, dtype={self._text(dtype)})"
            return [f"r{to} = {new}.set_(r{source}.untyped_storage(), {offset}, {shape}, {stride})"]
        if isinstance(instruction, FunctionCall):
            return self._call(instruction)
        if isinstance(instruction, Post):
            number, label, *messages = instruction
            sends, recvs = (_tuple([f"({peer}, r{n})" for peer, n in side]) for side in messages)
            return [f"p{number} = yield PostExchange({label!r}, {sends}, {recvs})"]
        return [f"yield WaitExchange(p{instruction.number})", f"del p{instruction.number}"]

    def _call(self, call: FunctionCall) -> list[str]:
        texts = [self._text(x) for x in call.arguments]
        for index, number in call.registers.items():
            texts[index] = f"r{number}"
        for index, numbers in call.lists.items():
            texts[index] = f"[{', '.join('None' if n is None else f'r{n}' for n in numbers)}]"
        texts += [f"{name}={self._text(x)}" for name, x in call.keyword_arguments.items()]
        line = f"{self._text(call.function)}({', '.join(texts)})"
        if not call.results:
            return [line]
        if call.results[0][0] is None:
            return [f"r{call.results[0][1]} = {line}"]
        return [f"found = {line}", *[f"r{number} = found[{place}]" for place, number in call.results], "del found"]

    def _text(self, x: Any) -> str:
        """Return a literal, or the name of an object."""
        if x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        name = self._name_of.setdefault(id(x), f"a{len(self._name_of)}")
        self._names[name] = x
        return name


def _tuple(texts: Sequence[str]) -> str:
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _last_uses(instructions: Sequence[Instruction], kept: set[int]) -> list[tuple[int, ...]]:
    """Return the registers that no later instruction uses, for each instruction. Those of ``kept`` are in none."""
    used_later, last = set(kept), []
    for instruction in reversed(instructions):
        used = set(_registers_of(instruction))
        last.append(tuple(sorted(used - used_later)))
        used_later |= used
    return last[::-1]


def _registers_of(instruction: Instruction) -> Iterable[int]:
    """Return the registers that an instruction reads or makes."""
    if isinstance(instruction, Empty):
        return (instruction.to,)
    if isinstance(instruction, View):
        return (instruction.to, instruction.source)
    if isinstance(instruction, FunctionCall):
        lists = [number for numbers in instruction.lists.values() for number in numbers if number is not None]
        return [*instruction.registers.values(), *(number for _, number in instruction.results), *lists]
    if isinstance(instruction, Post):
        return [number for _, number in (*instruction.sends, *instruction.recvs)]
    return ()
