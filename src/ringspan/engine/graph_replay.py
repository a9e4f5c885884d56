"""Recorded passes as CUDA graphs: one graph for each run of instructions between two exchanges.

With ``cuda_graphs=True`` a recorded pass (:mod:`ringspan.engine.recorded_pass`) is replayed as it is once. The next
call captures it, and from then on a call launches a few graphs::

    recorded                                  captured
    r2 = empty(…);  r3 = view;  copy(r3, r2)  copy the inputs to static buffers;  graph 0
    p0 = yield PostExchange(… r2 … r4 …)      p0 = yield PostExchange(… the same tensors in each call …)
    kernel(…);  kernel(…)                     graph 1
    yield WaitExchange(p0)                    yield WaitExchange(p0)
    kernel(… r4 …)                            graph 2
    return r5, r6                             return copies of r5, r6

Exchanges are not captured: the order of messages, their tags, time limits and the comparison of calls stay as they are.
The graphs contain the launches of the recording in their order, so results are the same bits.

During capture the recorded function itself runs, on memory of a :class:`~ringspan.engine.graph_pool.GraphPool`. So each
tensor lives as long as in the recording, and its memory is used again afterwards. A message is held until its exchange
was waited for. The static memory is in use from the copies of the inputs to the copies of the results. A call in
between, or on another thread, replays the recording without graphs.

If a pass cannot be captured it is replayed without graphs. The logger ``ringspan.engine`` says why, at level INFO.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.engine.graph_pool import Graph, GraphPool, discard_pool, pool_of
from ringspan.engine.recorded_pass import ALIGNMENT, Empty, FunctionCall, Instruction, Post, RecordedPass, Result, Wait
from ringspan.torch_private.cuda_graphs import foreach_copy_
from ringspan.torch_private.pytree import tree_leaves
from ringspan.transports import PostExchange, RankGenerator, WaitExchange

# The most memory of a captured pass, counted as if it released nothing before its end. A pass that needs more keeps the
# device busy for longer than the host takes for its launches, so graphs would save no time.
MAX_BYTES = 2 << 30

log = logging.getLogger("ringspan.engine")


class NotCapturable(Exception):
    """A pass cannot be captured, for this reason."""


class CapturedStep(NamedTuple):
    """A graph, if the segment launches anything, and the exchange after it: WAIT is for the oldest one in flight."""

    graph: Graph | None
    exchange: PostExchange | object | None


WAIT = object()


class StaticInputs(NamedTuple):
    """The buffers that inputs are copied to, and the indices of these inputs. All have one dtype."""

    buffers: list[Tensor]
    indices: tuple[int, ...]
    is_expanded: bool = False
    """Whether the inputs have dims of stride 0, of which the buffers have one index: PyTorch does not write to the
    others."""

    def copy_from(self, inputs: Sequence[Tensor | None]) -> None:
        sources: Any = [inputs[i] for i in self.indices]
        foreach_copy_(self.buffers, [_without_repeats(x) for x in sources] if self.is_expanded else sources)


class CapturedPass(NamedTuple):
    """The graphs of a pass, and the tensors that they read and write."""

    pool: GraphPool
    inputs: tuple[StaticInputs, ...]
    steps: tuple[CapturedStep, ...]
    results: Result

    def replay(self, inputs: Sequence[Tensor | None]) -> RankGenerator[Result]:
        """Run the pass. The caller holds ``pool.busy``."""
        for static in self.inputs:
            static.copy_from(inputs)
        in_flight: deque[Any] = deque()
        for graph, exchange in self.steps:
            if graph is not None:
                graph.replay()
            if isinstance(exchange, PostExchange):
                in_flight.append((yield exchange))
            elif exchange is WAIT:
                yield WaitExchange(in_flight.popleft())
        return tuple([x.clone() for x in self.results])


class GraphedPass:
    """A recorded pass that is captured when it is replayed for the second time.

    ``pool_key`` is the stream and the rank of the pass. ``name`` names the pass in the log.
    """

    def __init__(self, recorded: RecordedPass, pool_key: Hashable, name: str) -> None:
        self.recorded = recorded  # keeps the constants alive, which the graphs read
        self.captured: CapturedPass | None = None
        self.failure: str | None = None
        self._pool_key, self._name = pool_key, name
        self._was_replayed = False

    def restore_constants(self) -> None:
        self.recorded.restore_constants()

    def replay(self, inputs: Sequence[Tensor | None]) -> RankGenerator[Result]:
        """Run the pass on other inputs of the same shapes, strides and dtypes."""
        if not self._was_replayed or self.failure is not None:
            self._was_replayed = True
            return self.recorded.replay(inputs)
        return self._replay_graphs(inputs)

    def _replay_graphs(self, inputs: Sequence[Tensor | None]) -> RankGenerator[Result]:
        if not self._can_capture(inputs):
            return (yield from self.recorded.replay(inputs))
        pool = pool_of(self._pool_key, next(x.device for x in inputs if x is not None))
        if not pool.busy.acquire(blocking=False):
            return (yield from self.recorded.replay(inputs))
        is_complete = False
        try:
            if self.captured is None or self.captured.pool is not pool:
                self._capture(pool, inputs)
            if self.captured is not None:
                result = yield from self.captured.replay(inputs)
                is_complete = True
                return result
        finally:
            if is_complete:
                pool.busy.release()
            else:  # a failed capture holds memory of it, and messages may still be written to it
                discard_pool(self._pool_key, pool)
        del pool  # if memory has run out, the recording needs that of the pool
        return (yield from self.recorded.replay(inputs))

    def _can_capture(self, inputs: Sequence[Tensor | None]) -> bool:
        try:
            if self.captured is None:
                _check(self.recorded, inputs)
            return True
        except NotCapturable as error:
            self._fail(error)
            return False

    def _capture(self, pool: GraphPool, inputs: Sequence[Tensor | None]) -> None:
        self.captured = None
        try:
            self.captured = capture(self.recorded, pool, inputs)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = str(error).partition("\n")[0] or type(error).__name__
        log.info("%s is not captured in CUDA graphs: %s", self._name, self.failure)


def _check(recorded: RecordedPass, inputs: Sequence[Tensor | None]) -> None:
    """Raise if a pass is known to be unfit for capture."""
    allocator = torch.cuda.get_allocator_backend()
    if allocator != "native":
        raise NotCapturable(f"the allocator {allocator} does not keep the memory of a pool")
    device = next(x.device for x in inputs if x is not None)
    size = sum(_size(x.shape, x.stride()) * x.element_size() for x in inputs if x is not None)
    for instruction in recorded.instructions:
        if isinstance(instruction, Empty):
            if instruction.device != device:
                raise NotCapturable(f"it allocates memory on {instruction.device}")
            size += _size(instruction.geometry.shape, instruction.geometry.stride) * instruction.geometry.dtype.itemsize
        elif isinstance(instruction, FunctionCall):
            size += instruction.new_bytes
            # A launch on a stream of its own would be executed once, instead of being captured.
            for x in tree_leaves((instruction.arguments, instruction.keyword_arguments)):
                if "stream" in type(x).__name__.lower():
                    raise NotCapturable(f"{instruction.function} is called with a stream")
    if size > MAX_BYTES:
        raise NotCapturable(f"it needs up to {size >> 20} MiB of static memory, more than {MAX_BYTES >> 20}")


def capture(recorded: RecordedPass, pool: GraphPool, inputs: Sequence[Tensor | None]) -> CapturedPass:
    """Capture a pass. Nothing is executed, and no message is exchanged."""
    steps: list[CapturedStep] = []
    # Tensors that are made in inference mode could not be written to outside of it.
    with pool.capture_stream(), torch.inference_mode(False), torch.no_grad():
        try:
            pool.begin()
            buffers = [None if x is None else _buffer_like(x, pool) for x in inputs]
            generator = recorded.replay(buffers)
            request: PostExchange | WaitExchange | None = None
            for segment in _segments(recorded.instructions):
                if _has_work(segment) and not pool.is_capturing:
                    pool.begin()
                # The handle of an exchange is the request: it holds the messages until the exchange is waited for.
                handle, request = request if isinstance(request, PostExchange) else None, None
                try:
                    request = generator.send(handle)
                except StopIteration as end:
                    results = tuple([_alias(x, pool) for x in end.value])
                del handle
                graph = pool.end() if pool.is_capturing else None
                steps.append(CapturedStep(graph if _launches(segment) else None, _static_exchange(request, pool)))
            return CapturedPass(pool, _static_inputs(buffers), tuple(steps), results)
        except BaseException:
            pool.abandon()
            raise
        finally:
            pool.free()


def _segments(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the runs of instructions before, between and after the exchanges."""
    segments: list[list[Instruction]] = [[]]
    for instruction in instructions:
        if isinstance(instruction, Post | Wait):
            segments.append([])
        else:
            segments[-1].append(instruction)
    return segments


def _has_work(segment: Sequence[Instruction]) -> bool:
    """Return whether a segment must be captured: its memory is allocated in the pool by a capture."""
    return any(isinstance(instruction, Empty | FunctionCall) for instruction in segment)


def _launches(segment: Sequence[Instruction]) -> bool:
    """Return whether a segment launches anything. Deterministic algorithms fill new memory."""
    kinds = Empty | FunctionCall if torch.are_deterministic_algorithms_enabled() else FunctionCall
    return any(isinstance(instruction, kinds) for instruction in segment)


def _static_exchange(request: PostExchange | WaitExchange | None, pool: GraphPool) -> PostExchange | object | None:
    if not isinstance(request, PostExchange):
        return None if request is None else WAIT
    sends, recvs = (tuple([(peer, _alias(x, pool)) for peer, x in side]) for side in (request.sends, request.recvs))
    return PostExchange(request.label, sends, recvs)


def _alias(x: Tensor, pool: GraphPool) -> Tensor:
    if x.device != pool.device:
        raise NotCapturable(f"a message or a result is on {x.device}")
    return pool.alias(x)


# -- inputs ------------------------------------------------------------------------------------------------------------


def _buffer_like(x: Tensor, pool: GraphPool) -> Tensor:
    """Return static memory with the shape, strides, dtype and alignment of an input."""
    if x.device != pool.device:
        raise NotCapturable(f"an input is on {x.device}")
    offset = x.data_ptr() % ALIGNMENT // x.element_size()
    size = _size(x.shape, x.stride())
    if not size:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return pool.allocate((offset + size) * x.element_size()).view(x.dtype).as_strided(x.shape, x.stride(), offset)


def _static_inputs(buffers: Sequence[Tensor | None]) -> tuple[StaticInputs, ...]:
    indices: dict[tuple[torch.dtype, bool], list[int]] = defaultdict(list)
    for i, x in enumerate(buffers):
        if x is not None and x.numel():
            indices[x.dtype, 0 in x.stride()].append(i)
    found = []
    for (_, is_expanded), of_kind in indices.items():
        given = [x for i in of_kind if (x := buffers[i]) is not None]
        found.append(StaticInputs([_without_repeats(x) for x in given], tuple(of_kind), is_expanded))
    return tuple(found)


def _without_repeats(x: Tensor) -> Tensor:
    """Return a view with one index of each dim of stride 0. The gradient of a sum has such dims."""
    return x.as_strided([n if step else 1 for n, step in zip(x.shape, x.stride(), strict=True)], x.stride())


def _size(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one in memory."""
    if not math.prod(shape):
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
