"""Passes that are recorded and replayed compute the same bits as passes that are executed."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import ringspan as rs
from ringspan.caching import by_stream
from ringspan.caching.by_stream import CAPTURING, cache_by_stream
from ringspan.engine import pass_cache, slots
from ringspan.engine.recorded_pass import Empty, FunctionCall, RecordedPass
from ringspan.engine.recording import PassRecorder
from ringspan.kernels import gradient_accumulator, launches, reference
from ringspan.masks import Band
from ringspan.masks import table as tables
from ringspan.transports import PostExchange, RankGenerator, WaitExchange
from tests.engine.test_memory import MemoryCounter

STRATEGIES = ["ring", "gather", "ulysses", "exchange(stages=2)", "pass_q", "hybrid(per_node=2)", "hierarchical(per_node=2)"]
MASKS = {
    "causal": rs.causal(60),
    "documents and window": rs.documents([17, 31, 12]) & rs.window(left=9),
    "rows without keys": rs.Mask.from_bands([(0, 25, 5, 30, -20, 0), (40, 60, 40, 60, -9, 9)], 60),
}


@cache_by_stream(256)
def rectangle(bands: tuple[Band, ...], device: torch.device) -> list[tuple[slice, slice, Tensor]]:
    """Return all bands as one rectangle and its visible pairs, a constant. The kernel's own parts are not
    recordable."""
    if not bands:
        return []
    q0, q1, k0, k1, *_ = zip(*bands, strict=True)
    (q, k), (rows, keys) = (min(q0), min(k0)), (slice(min(q0), max(q1)), slice(min(k0), max(k1)))
    seen = tables.dense(tables.table(*(band.shifted(-q, -k) for band in bands)), rows.stop - q, keys.stop - k)
    return [(rows, keys, torch.tensor(seen))]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[RecordedPass]:
    """Record passes of the kernel ``reference`` on CPUs. Returns a list of the passes that were replayed."""
    replayed: list[RecordedPass] = []
    replay = RecordedPass.replay
    rs.clear_caches()  # other tests may have used the same plans

    def noting(self: RecordedPass, inputs: Any) -> RankGenerator[Any]:
        replayed.append(self)
        return replay(self, inputs)

    monkeypatch.setattr(reference, "_parts", rectangle)
    monkeypatch.setattr(pass_cache, "DEVICES", {"cpu"})
    monkeypatch.setattr(reference, "observed_launches", nullcontext, raising=False)
    monkeypatch.setattr(RecordedPass, "replay", noting)
    return replayed


def attend(mask: rs.Mask, strategy: str, seed: int, *, dtype: torch.dtype = torch.float64, **options: Any) -> list[Tensor]:
    """Return out, lse and gradients for random inputs. The loss uses lse, too."""
    generator = torch.Generator().manual_seed(seed)
    qkv = [torch.randn(2, h, mask.lengths[0], 8, generator=generator, dtype=dtype, requires_grad=True) for h in (4, 2, 2)]
    out, lse = WORLD.attention(*qkv, mask=mask, strategy=strategy, backend="reference", return_lse=True, **options)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum() + lse.nan_to_num(neginf=0.0).sum()
    return [out, lse, *torch.autograd.grad(loss, qkv)]


WORLD = rs.LocalWorld(4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_replay_computes_the_same_bits(
    replays: list[RecordedPass], monkeypatch: pytest.MonkeyPatch, name: str, strategy: str, dtype: torch.dtype
) -> None:
    found = [attend(MASKS[name], strategy, seed, dtype=dtype) for seed in range(4)]
    assert len(replays) == 2 * 2 * 4, "the third and the fourth call, both passes, on four ranks"
    monkeypatch.setattr(pass_cache, "DEVICES", set())
    for seed, results in enumerate(found):
        for x, y in zip(results, attend(MASKS[name], strategy, seed, dtype=dtype), strict=True):
            assert torch.equal(x.nan_to_num(nan=-1.0), y.nan_to_num(nan=-1.0))
            assert not x.isnan().any()


@pytest.mark.parametrize("strategy", ["exchange(stages=1)", "exchange(stages=2)", "ring"])
def test_sums_by_the_kernel_for_gpus_are_recorded(
    replays: list[RecordedPass], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """In Triton's interpreter. The messages of a step are added in one launch."""
    fused_sums = pytest.importorskip("ringspan.kernels.fused_sums", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is used only without a GPU")
    expected = [attend(MASKS["causal"], strategy, seed, dtype=torch.float32) for seed in range(4)]
    rs.clear_caches()
    replays.clear()
    monkeypatch.setattr(slots, "ADDED_TOGETHER", {"cpu"})
    monkeypatch.setattr(gradient_accumulator, "sums_kernel_for", lambda gradient: fused_sums)
    monkeypatch.setattr(fused_sums, "_write_sum", BypassesDispatcher(fused_sums._write_sum))
    found = [attend(MASKS["causal"], strategy, seed, dtype=torch.float32) for seed in range(4)]
    assert len(replays) == 2 * 2 * 4
    backward = [one for one in replays if "PostExchange('backward" in one.source]
    assert all(_launches(one) > 0 for one in backward)
    for results, wanted in zip(found, expected, strict=True):
        for x, y in zip(results, wanted, strict=True):
            assert torch.equal(x, y)


class BypassesDispatcher:
    """A Triton kernel whose interpreter is hidden from the recorder: it uses operators of PyTorch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*given: Any) -> None:
            with _disable_current_modes():
                self.kernel[grid](*given)

        return launch


def _launches(recorded: RecordedPass) -> int:
    """Return how many instructions launch a kernel of Triton."""
    calls = [one for one in recorded.instructions if isinstance(one, FunctionCall)]
    return sum(not isinstance(one.function, torch._ops.OpOverload) for one in calls)


def test_other_shapes_strides_and_scales_are_other_recordings(replays: list[RecordedPass]) -> None:
    for n in range(3):
        attend(MASKS["causal"], "ring", n)
    assert len(replays) == 8
    for options in ({"scale": 0.3}, {"dtype": torch.float32}):
        attend(MASKS["causal"], "ring", 0, **options)
        assert len(replays) == 8


def test_clear_caches_discards_recordings(replays: list[RecordedPass]) -> None:
    for n in range(3):
        attend(MASKS["causal"], "gather", n)
    assert len(replays) == 8
    alive = weakref.ref(replays.pop())
    replays.clear()
    rs.clear_caches()
    gc.collect()
    assert alive() is None, "recordings of plans that are still in use are freed at once"
    attend(MASKS["causal"], "gather", 3)
    assert not replays


def test_the_reason_why_a_pass_is_not_recorded_is_logged(
    replays: list[RecordedPass], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reference, "_parts", rectangle.__wrapped__)  # not cached: another tensor in each pass
    with caplog.at_level("INFO", logger="ringspan.engine"):
        for n in range(4):
            attend(MASKS["causal"], "gather", n)
    assert not replays
    messages = [record.getMessage() for record in caplog.records if "is not recorded" in record.getMessage()]
    assert len(messages) == 2 * 4, "once for each pass and rank"
    assert all("neither an input" in message for message in messages)


def test_a_replay_is_a_warm_up_for_a_cuda_graph(replays: list[RecordedPass], monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture takes constants from the caches, which replays do not read. Other plans may have evicted them."""
    expected = [attend(MASKS["documents and window"], "exchange(stages=2)", 0) for _ in range(3)][-1]
    rectangle.cache_clear()
    slots._index.cache_clear()
    before = len(replays)
    attend(MASKS["documents and window"], "exchange(stages=2)", 0)
    assert len(replays) == before + 8
    for module in (by_stream, pass_cache):
        monkeypatch.setattr(module, "stream_key", lambda device: CAPTURING)
    for x, y in zip(attend(MASKS["documents and window"], "exchange(stages=2)", 0), expected, strict=True):
        assert torch.equal(x, y)
    assert len(replays) == before + 8


class Counter(MemoryCounter):
    def record_constants(self, value: Any, restore: Callable[[], None]) -> None:
        """Do nothing. With this function, constants are cached under the mode."""


def test_a_replay_needs_no_more_memory(replays: list[RecordedPass], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_cache, "dispatch_mode_depth", lambda: 0)  # the memory counter is a dispatch mode, too
    peaks = []
    mask = rs.causal(512)
    qkv = [torch.randn(1, 4, 512, 16) for _ in range(3)]
    for _ in range(3):
        with Counter(qkv) as memory:
            WORLD.attention(*qkv, mask=mask, strategy="ring", backend="reference")
        peaks.append(memory.peak)
    assert replays
    assert peaks[2] <= peaks[0]


# -- what cannot be recorded -------------------------------------------------------------------------------------------


def record(step: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[RecordedPass | None, str | None]:
    """Record a pass without exchanges. Returns the recording, and the reason if there is none."""
    recorder, finished = PassRecorder([x]), []

    def generate() -> RankGenerator[Any]:
        return step(x)
        yield

    with pytest.raises(StopIteration):
        recorder.run(generate(), nullcontext, finished.append).send(None)
    return finished[0], recorder.failure


def replayed(recorded: RecordedPass | None, x: Tensor) -> tuple[Tensor, ...]:
    assert recorded is not None
    with pytest.raises(StopIteration) as end:
        recorded.replay([x]).send(None)
    return end.value.value  # type: ignore[no-any-return]


def test_views_are_collapsed_and_new_memory_is_allocated_again() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        doubled = torch.empty_like(x)
        doubled.copy_(x.transpose(0, 1)[1:].transpose(0, 1).transpose(0, 1).new_zeros(()) + 2 * x)
        return doubled[:, 1:].transpose(0, 1), doubled

    recorded, _ = record(step, torch.randn(3, 5))
    x = torch.randn(3, 5)
    first, second = replayed(recorded, x)
    assert torch.equal(second, 2 * x)
    assert torch.equal(first, 2 * x[:, 1:].T)
    assert first.data_ptr() == second[:, 1:].data_ptr()
    assert recorded is not None
    kinds = [type(instruction) for instruction in recorded.instructions]
    assert kinds.count(Empty) == 1
    assert kinds.count(FunctionCall) == 4


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda x: (x * float(x.sum()),), "the host reads"),
        (lambda x: (x[x > 0],), "the host reads"),
        (lambda x: (x + GLOBAL,), "neither an input"),
        (lambda x: (torch.empty_like(x),), "nothing has written"),
    ],
    ids=["item", "nonzero", "global tensor", "unknown kernel"],
)
def test_a_pass_that_may_differ_next_time_is_not_recorded(step: Callable[[Tensor], tuple[Tensor, ...]], reason: str) -> None:
    recorded, failure = record(step, torch.randn(7))
    assert recorded is None
    assert failure is not None
    assert reason in failure


GLOBAL = torch.ones(7)


def unreported(x: Tensor) -> Tensor:
    """Compute with a kernel that neither the dispatcher nor the observer of launches sees."""
    out = torch.empty_like(x)
    out.numpy()[:] = 3 * x.numpy()
    return out


def test_the_result_of_an_unreported_launch_is_not_read() -> None:
    recorded, failure = record(lambda x: (unreported(x) + 1,), torch.randn(7))
    assert recorded is None
    assert "nothing has written" in str(failure)


def test_a_host_that_reads_in_inference_mode_is_seen() -> None:
    """Autograd decomposes ``bool(x)``. Without it the dispatch mode sees an operator that has no tag."""
    with torch.inference_mode():
        recorded, failure = record(lambda x: (x if x.sum() > 0 else -x,), torch.ones(7))
    assert recorded is None
    assert "the host reads" in str(failure)


@pytest.mark.parametrize("step", [lambda x: x.T.reshape(-1), lambda x: x.T.contiguous(), lambda x: x.to(torch.float64)])
def test_copies_in_inference_mode_are_recorded(step: Callable[[Tensor], Tensor]) -> None:
    """In inference mode the dispatch mode sees ``reshape`` itself, which is a view by its schema, and may copy."""
    with torch.inference_mode():
        recorded, failure = record(lambda x: (step(x),), torch.randn(3, 5))
    assert failure is None
    x = torch.randn(3, 5)
    assert torch.equal(replayed(recorded, x)[0], step(x))


def test_a_tensor_with_a_negative_bit_is_not_recorded() -> None:
    negated = torch.view_as_complex(torch.randn(3, 2)).conj().imag
    assert negated.is_neg()
    recorded, failure = record(lambda x: (x[1:] * 2,), negated)
    assert recorded is None
    assert "negated" in str(failure)


@cache_by_stream(1)
def second_half(device: torch.device) -> Tensor:
    return torch.arange(8.0, device=device)[4:]


def test_a_constant_inside_a_larger_storage() -> None:
    expected = second_half(torch.device("cpu")).clone()
    recorded, _ = record(lambda x: (x + second_half(x.device)[1:],), torch.zeros(3))
    assert torch.equal(replayed(recorded, torch.ones(3))[0], 1 + expected[1:])
    recorded, failure = record(lambda x: (x + second_half(x.device).view(torch.int32)[1:],), torch.zeros(3))
    assert recorded is None
    assert "another dtype" in str(failure)


def test_a_recording_is_freed_without_the_garbage_collector() -> None:
    """Training loops often disable it, and recordings hold tensors of the device."""
    recorded, _ = record(lambda x: (x * 2,), torch.ones(3))
    assert recorded is not None
    alive = weakref.ref(recorded)
    function = weakref.ref(recorded._replay)
    gc.disable()
    try:
        del recorded
        assert alive() is None
        assert function() is None
    finally:
        gc.enable()


def test_inputs_that_share_a_storage_are_not_recorded() -> None:
    both = torch.randn(2, 7)
    assert PassRecorder([both[0], both[1]]).failure == "two inputs share a storage"


def test_launches_that_the_dispatcher_does_not_see_are_recorded() -> None:
    def kernel(x: Tensor, out: Tensor, factor: float) -> None:
        out.numpy()[:] = x.numpy() * factor  # no operator of PyTorch

    def step(x: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty_like(x)
        launches.launch(kernel, x, out, 3.0)
        return (out,)

    recorded, _ = record(step, torch.ones(4))
    assert torch.equal(replayed(recorded, torch.arange(4.0))[0], torch.arange(4.0) * 3)


def test_exchanges_are_replayed() -> None:
    def generate(x: Tensor) -> RankGenerator[Any]:
        buffer = torch.empty_like(x)
        handle = yield PostExchange("step 0", ((1, x),), ((1, buffer),))
        doubled = 2 * x
        yield WaitExchange(handle)
        return (doubled + buffer,)

    def drive(generator: RankGenerator[Any]) -> Tensor:
        post = generator.send(None)
        assert isinstance(post, PostExchange)
        assert post.label == "step 0"
        post.recvs[0][1].copy_(10 * post.sends[0][1])
        wait = generator.send("handle")
        assert isinstance(wait, WaitExchange)
        assert wait.pending == "handle"
        with pytest.raises(StopIteration) as end:
            generator.send(None)
        return end.value.value[0]  # type: ignore[no-any-return]

    x, finished = torch.ones(3), []
    assert torch.equal(drive(PassRecorder([x]).run(generate(x), nullcontext, finished.append)), 12 * x)
    y = torch.arange(3.0)
    assert torch.equal(drive(finished[0].replay([y])), 12 * y)


THREADS = """
import sys, threading
from contextlib import nullcontext
import torch, ringspan as rs
from ringspan.engine import pass_cache
from ringspan.kernels import reference
from tests.engine.test_recording import rectangle
assert "torch._dynamo" not in sys.modules
pass_cache.DEVICES, reference.observed_launches, reference._parts = {"cpu"}, nullcontext, rectangle
failed = []
def attend(n):
    q = torch.randn(1, 2, 8 * n, 4)
    try:
        for _ in range(3):
            rs.LocalWorld(2).attention(q, q, q, mask=rs.causal(8 * n), strategy="ring", backend="reference")
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=attend, args=(n,)) for n in range(1, 5)]
for t in threads: t.start()
for t in threads: t.join()
assert not failed, failed
"""


def test_several_threads_make_the_first_recordings() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
