"""Recorded passes: the second time that a rank runs a pass of a plan on tensors of the same shapes, it is recorded.
From the third time on it is replayed.

A pass takes the host many small calls: views of rows, states of accumulators, the Python code of a kernel. All of them
depend on the plan and on the shapes alone. What reaches the device is a flat list of allocations, operators, kernel
launches and exchanges. The recorder notes this list, and which tensors each entry reads::

    executed                                         recorded
    q = x[:, :, 0:512].transpose(1, 2)
    out = torch.empty(…)                             r2 = empty((1, 512, 32, 128))
    … 300 lines of Python …
    kernel(q, k, v, out, lse, 0.088, None)           r3 = view of r0;  kernel(r3, r4, r5, r2, r6, 0.088, None)

Registers are tensors: the inputs of the pass, new memory, and views of either. A view is made once, from the memory
itself, whatever chain of views led to it. Each register is released after its last use, so a replay needs no more
memory than the pass itself.

What is noted is complete, or the pass is not recorded. The dispatcher of PyTorch shows every operator
(:class:`PassRecorder` is a dispatch mode); launches that bypass it are reported by :mod:`ringspan.kernels.launches`. A
tensor must be an input of the pass, memory that it allocated, or a constant that :mod:`ringspan.caching.by_stream`
keeps. Memory must be written before an operator reads it: otherwise a launch was not reported. If the host reads a
value of a tensor, the pass is not recorded: the next time it may take another path.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ringspan.engine.recorded_pass import (
    Empty,
    FunctionCall,
    Geometry,
    Instruction,
    Post,
    RecordedPass,
    Result,
    View,
    Wait,
)
from ringspan.kernels.launches import NotRecordable, observe_launches
from ringspan.torch_private.dispatch_modes import TorchDispatchMode
from ringspan.torch_private.operator_schemas import written_arguments
from ringspan.torch_private.pytree import tree_leaves
from ringspan.transports import PostExchange, RankGenerator, WaitExchange

T = TypeVar("T")

# Operators that only allocate. Their results are allocated again, with the same strides.
ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
# Operators whose result depends on the values of tensors in a way that only the host sees.
READ_BY_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class KnownStorage(NamedTuple):
    """A storage that a pass uses: the register that stands for it, the offset of that tensor, and its dtype."""

    register: int
    offset: int
    dtype: torch.dtype
    is_input: bool


class PassRecorder(TorchDispatchMode):
    """Notes what a pass does. It is a dispatch mode while the pass runs on this thread, not while messages travel.

    ``failure`` is the reason why the pass cannot be recorded. The pass itself goes on.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.failure: str | None = None
        self._instructions: list[Instruction] = []
        self._inputs = self._registers = len(inputs)
        self._views: dict[tuple[int, Geometry], int] = {}  # by the register of the memory, and the place in it
        self._storages: dict[int, KnownStorage] = {}  # by the address of the storage object
        self._storage_references: list[StorageWeakRef] = []  # while these live, no other storage object has the same address
        self._constants: list[tuple[int, Tensor]] = []
        self._restore: dict[int, Callable[[], None]] = {}
        self._written = set(range(len(inputs)))  # registers of memory that has contents
        self._posted = self._waited = 0
        for number, x in enumerate(inputs):
            if x is not None:
                if self._find_storage(x) is not None:
                    self.failure = "two inputs share a storage"  # the next time they may be in two
                if x.is_neg() or x.is_conj():
                    self.failure = "an input is a lazily negated or conjugated view"  # geometries do not say so
                self._add_storage(number, x, is_input=True)

    def run(
        self,
        generator: RankGenerator[Result],
        observed_launches: Callable[[], AbstractContextManager[None]],
        finish: Callable[[RecordedPass | None], None],
    ) -> RankGenerator[Result]:
        """Run a pass. At its end, call ``finish`` with its recording, or with None if it cannot be recorded."""
        answer: Any = None
        while True:
            try:
                with observed_launches(), observe_launches(self), self:
                    request = generator.send(answer)
            except StopIteration as end:
                result: Result = end.value
                finish(self._recorded(result))
                return result
            self._note(self._add_request, request)
            answer = yield request
            del request  # it holds the messages of a step

    def _recorded(self, result: Result) -> RecordedPass | None:
        results = self._note(lambda: tuple([self._register(x) for x in result]))
        if results is None or self.failure is not None:
            return None
        return RecordedPass(self._inputs, self._constants, self._instructions, results, tuple(self._restore.values()))

    def _note(self, note: Callable[..., T], *args: Any) -> T | None:
        """Call one of the functions below, unless the recording has failed already."""
        if self.failure is None:
            try:
                return note(*args)
            except NotRecordable as error:
                self.failure = str(error)
        return None

    # -- what the pass does --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self._note(self._add_operator, function, args, kwargs or {}, found)
        return found

    def record_launch(self, kernel: Callable[..., Any], arguments: tuple[Any, ...], keyword_arguments: dict[str, Any]) -> None:
        """Note a launch that PyTorch's dispatcher does not see."""
        self._note(self._add_call, kernel, arguments, keyword_arguments, None, range(len(arguments)))

    def record_constants(self, value: Any, restore: Callable[[], None]) -> None:
        """Note tensors that are the same objects in every pass. ``restore`` puts them back into their cache."""
        self._restore[id(value)] = restore  # which holds the value
        for x in tree_leaves(value):
            if isinstance(x, Tensor) and self._find_storage(x) is None:
                number = self._new_register(x)
                self._constants.append((number, x))
                self._written.add(number)

    def _add_operator(self, function: Any, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        if any(tag in function.tags for tag in READ_BY_HOST):
            raise NotRecordable(f"the host reads the result of {function}")
        if any(isinstance(x, bool | int | float | complex) for x in _values(found)):
            raise NotRecordable(f"the host reads the result of {function}")
        if function in ALLOCATIONS:
            self._instructions.append(Empty(self._new_register(found), _geometry(found), found.device))
        elif not function.is_view or self._is_copy(args[0], found):
            self._add_call(function, args, kwargs, found, written_arguments(function))

    def _is_copy(self, x: Any, found: Any) -> bool:
        """Return whether an operator that returns a view by its schema has copied x.

        In inference mode and inside custom operators the dispatcher shows operators such as reshape, which do either.
        """
        if not isinstance(x, Tensor) or self._find_storage(x) is None:
            return False
        return any(self._find_storage(y) is None for y in _values(found))

    def _add_request(self, request: PostExchange | WaitExchange) -> None:
        if isinstance(request, WaitExchange):  # exchanges are waited for in the order in which they were posted
            self._instructions.append(Wait(self._waited))
            self._waited += 1
            return
        sends = tuple([(peer, self._register(x)) for peer, x in request.sends])
        recvs = tuple([(peer, self._register(x, is_written=True)) for peer, x in request.recvs])
        self._instructions.append(Post(self._posted, request.label, sends, recvs))
        self._posted += 1

    def _add_call(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], found: Any, written: Container[int]
    ) -> None:
        """Note a call. ``written`` are the indices of the arguments that it may write to."""
        if _has_tensor(kwargs.values()):
            raise NotRecordable(f"{function} has a tensor as a keyword argument")
        fixed, registers, lists = list(args), {}, {}
        for index, argument in enumerate(args):
            if isinstance(argument, Tensor):
                registers[index] = self._register(argument, is_written=index in written)
                fixed[index] = None  # else the recording would keep the tensor alive
            elif isinstance(argument, list | tuple) and any(isinstance(x, Tensor) for x in argument):
                lists[index] = self._list_of_registers(argument, is_written=index in written)
                fixed[index] = None
            elif _has_tensor([argument]):
                raise NotRecordable(f"{function} has tensors in a nested argument")
        results: list[tuple[int | None, int]] = []
        new_bytes = 0
        for place, x in enumerate(found) if isinstance(found, list | tuple) else ((None, found),):
            if isinstance(x, Tensor) and self._find_storage(x) is None:
                results.append((place, self._new_register(x)))
                self._written.add(results[-1][1])
                new_bytes += x.untyped_storage().nbytes()
        self._instructions.append(FunctionCall(function, tuple(fixed), kwargs, registers, lists, tuple(results), new_bytes))

    def _list_of_registers(self, tensors: Sequence[Any], *, is_written: bool) -> tuple[int | None, ...]:
        if not all(x is None or isinstance(x, Tensor) for x in tensors):
            raise NotRecordable("a list has tensors and other values")
        return tuple([None if x is None else self._register(x, is_written=is_written) for x in tensors])

    # -- registers -----------------------------------------------------------------------------------------------------

    def _new_register(self, x: Tensor) -> int:
        self._registers += 1
        self._add_storage(self._registers - 1, x, is_input=False)
        return self._registers - 1

    def _add_storage(self, number: int, x: Tensor, *, is_input: bool) -> None:
        reference = StorageWeakRef(x.untyped_storage())
        self._storage_references.append(reference)
        self._storages[reference.cdata] = KnownStorage(number, int(x.storage_offset()), x.dtype, is_input)
        self._views[number, _geometry(x, int(x.storage_offset()))] = number

    def _find_storage(self, x: Tensor) -> KnownStorage | None:
        return self._storages.get(StorageWeakRef(x.untyped_storage()).cdata)

    def _register(self, x: Tensor, *, is_written: bool = False) -> int:
        """Return the register of a tensor. Its view is made before the instruction that is added next."""
        storage = self._find_storage(x)
        if storage is None:
            raise NotRecordable("a tensor is neither an input, nor allocated in the pass, nor a cached constant")
        if is_written:
            self._written.add(storage.register)
        elif storage.register not in self._written and x.numel():
            raise NotRecordable("a tensor is read from memory that nothing has written to")
        geometry = _geometry(x, storage.offset)
        number = self._views.get((storage.register, geometry))
        if number is None:
            if geometry.dtype != storage.dtype and (storage.is_input or storage.offset):
                raise NotRecordable("an input, or a part of a storage, is viewed in another dtype")
            number = self._registers
            self._registers += 1
            self._views[storage.register, geometry] = number
            self._instructions.append(View(number, storage.register, geometry, storage.dtype))
        return number


def _geometry(x: Tensor, start: int = 0) -> Geometry:
    return Geometry(tuple(x.shape), x.stride(), int(x.storage_offset()) - start, x.dtype)


def _values(found: Any) -> Sequence[Any]:
    """Return the results of an operator as a sequence."""
    return found if isinstance(found, list | tuple) else (found,)


def _has_tensor(values: Iterable[Any]) -> bool:
    return any(isinstance(x, Tensor) for value in values for x in tree_leaves(value))
