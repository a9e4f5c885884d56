"""Which passes are executed, recorded and replayed (:mod:`ringspan.engine.recording`).

::

    first call       executed      a plan that is used once, as in the first layer of a model, costs nothing more
    second call      recorded
    later calls      replayed
    the fourth call  captured in CUDA graphs, with ``cuda_graphs=True`` (:mod:`ringspan.engine.graph_replay`)

Calls are the same if they have one plan, phase, kernel and scale, on one stream, with tensors of the same shapes,
strides, dtypes and alignment, and if deterministic algorithms are enabled in all of them or in none, and likewise CUDA
graphs. A pass that cannot be recorded is always executed. The logger ``ringspan.engine`` says why, at level INFO.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ringspan.caching.by_stream import CAPTURING, stream_key
from ringspan.caching.registry import on_clear_caches
from ringspan.debugging.settings import settings
from ringspan.engine.graph_replay import GraphedPass
from ringspan.engine.recorded_pass import ALIGNMENT, RecordedPass, Result
from ringspan.engine.recording import PassRecorder
from ringspan.kernels import Kernel
from ringspan.kernels.launches import NotRecordable
from ringspan.plans.data import Phase, RankPlan
from ringspan.torch_private.dispatch_modes import dispatch_mode_depth
from ringspan.torch_private.dynamo import load_dynamo
from ringspan.torch_private.profiler import profiler_enabled
from ringspan.transports import RankGenerator

# The most recordings that a plan keeps. Layers of one model rarely differ in shapes or kernels.
MAX_RECORDINGS = 16
# Devices on which passes are recorded. The host of a CPU computes: it has no time to save.
DEVICES = {"cuda"}

log = logging.getLogger("ringspan.engine")


class NotRecorded(NamedTuple):
    """A pass without a recording. If there is no reason, the next call is recorded."""

    reason: str | None = None


class PassCache:
    """The recordings of a plan, by the properties of the call."""

    def __init__(self, plan: RankPlan) -> None:
        self.passes: OrderedDict[Hashable, RecordedPass | GraphedPass | NotRecorded] = OrderedDict()
        _caches.add(self)

    def store(self, key: Hashable, value: RecordedPass | GraphedPass | NotRecorded) -> None:
        self.passes[key] = value
        if len(self.passes) > MAX_RECORDINGS:
            self.passes.popitem(last=False)

    def restore_constants(self) -> None:
        """Put the constants of all recordings back into their caches: a CUDA graph that is captured reads them
        there."""
        for found in list(self.passes.values()):
            if not isinstance(found, NotRecorded):
                found.restore_constants()


_caches: WeakSet[PassCache] = WeakSet()


def _discard_recordings() -> None:
    """Discard all recordings. They hold tensors of the caches that are emptied, and memory of CUDA graphs."""
    for cache in list(_caches):
        cache.passes.clear()


on_clear_caches(_discard_recordings)


def run_pass(
    plan: RankPlan,
    phase: Phase,
    kernel: Kernel,
    options: tuple[Hashable, ...],
    inputs: Sequence[Tensor | None],
    execute: Callable[[], RankGenerator[Result]],
    *,
    cuda_graphs: bool = False,
) -> RankGenerator[Result]:
    """Return the generator of a pass: a replay if there is a recording, else ``execute()``.

    ``inputs`` are all tensors that the pass reads and that differ between calls. ``options`` are the numbers that do.
    ``cuda_graphs`` is whether recordings are captured in CUDA graphs.
    """
    device = next(x.device for x in inputs if x is not None)
    if device.type not in DEVICES or settings.debug or profiler_enabled() or dispatch_mode_depth():
        return execute()
    stream = stream_key(device)
    cache = plan.derived(PassCache)
    if stream == CAPTURING:
        cache.restore_constants()
        return execute()
    if stream is not None and torch.cuda.current_device() != stream[0]:
        return execute()
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = (phase, kernel, options, stream, deterministic, cuda_graphs, *map(_description, inputs))
    found = cache.passes.get(key)
    if found is None:
        cache.store(key, NotRecorded())
    elif not isinstance(found, NotRecorded):
        return found.replay(inputs)
    elif found.reason is None:
        return _record(plan, phase, kernel, inputs, execute, key, (stream, plan.rank) if cuda_graphs else None)
    return execute()


def _record(
    plan: RankPlan,
    phase: Phase,
    kernel: Kernel,
    inputs: Sequence[Tensor | None],
    execute: Callable[[], RankGenerator[Result]],
    key: Hashable,
    graph_pool: Hashable | None,
) -> RankGenerator[Result]:
    """Return the generator of a pass that is recorded, or of one that is executed if its kernel allows no recording.

    ``graph_pool`` is the key of the memory pool for CUDA graphs; None if there are to be none.
    """
    cache, name = plan.derived(PassCache), f"the {phase} pass of plan {plan.digest}, rank {plan.rank},"

    def store(recorded: RecordedPass | None, reason: str | None) -> None:
        if recorded is None:
            log.info("%s is not recorded: %s", name, reason)
            cache.store(key, NotRecorded(reason))
        else:
            cache.store(key, recorded if graph_pool is None else GraphedPass(recorded, graph_pool, name))

    try:
        with kernel.observed_launches():
            pass
    except NotRecordable as error:
        store(None, str(error))
        return execute()
    load_dynamo()
    recorder = PassRecorder(inputs)
    return recorder.run(execute(), kernel.observed_launches, lambda recorded: store(recorded, recorder.failure))


def _description(x: Tensor | None) -> Hashable:
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT
