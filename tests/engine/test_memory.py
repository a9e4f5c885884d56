"""Compare ``peak_bytes`` with the memory that the engine holds.

One rank runs alone. Its kernel computes nothing, and nothing is merged or sent, so that all allocations are those of
the engine. The storage of every tensor that an operation returns is counted until it is freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringspan as rs
from ringspan.engine import AttentionConfig, backward, forward
from ringspan.engine.executor import BackwardInputs
from ringspan.kernels import Gradients, Partial, PartialRows, Saved, accumulation_dtype, accumulators
from ringspan.planner import Plan, memory_bytes, peak_bytes
from ringspan.plans import Program
from ringspan.plans.data import PHASES, Phase
from ringspan.transports import PostExchange, RankGenerator
from tests.plans.examples import MASKS, all_plans

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "v_dim": 6}


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of storages that are alive, except those of the ``given`` tensors.

    ``peak`` is the most so far.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.given = {x.untyped_storage()._cdata for x in given}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            # Scalars are the 0 of ``rows[a:b] = 0``, or the result of an idle kernel. Integers are row indices, which
            # are cached for a plan.
            if isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta:
                storage = x.untyped_storage()
                if storage.nbytes() <= 8 or storage._cdata in self.given:
                    continue
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return result


class IdleKernel:
    """A kernel that computes nothing. Its results have all rows and take no memory."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bands: Any, *, scale: float) -> Iterable[PartialRows]:
        out = torch.zeros((), dtype=accumulation_dtype(q.dtype)).expand(*q.shape[:3], v.shape[-1])
        yield PartialRows(0, q.shape[2], Partial(out, out[..., 0]))

    def attend_backward(self, saved: Saved, k: Tensor, v: Tensor, bands: Any, *, scale: float) -> Iterable[Gradients]:
        dq, dk, dv = (torch.zeros((), dtype=accumulation_dtype(k.dtype)).expand(x.shape) for x in (saved.q_BHSD, k, v))
        yield Gradients(slice(0, dq.shape[2]), dq, slice(0, dk.shape[2]), dk, dv)


IDLE = IdleKernel()


class AllocatingKernel(IdleKernel):
    """A kernel that allocates a partial result for every band, in the dtype of the tensors."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bands: Any, *, scale: float) -> Iterable[PartialRows]:
        for band in bands:
            out = q.new_empty((*q.shape[:2], band.rows, v.shape[-1]))
            yield PartialRows(band.q0, band.q1, Partial(out, out.new_empty(out.shape[:3], dtype=accumulation_dtype(q.dtype))))
            del out

    def attend_backward(self, saved: Saved, k: Tensor, v: Tensor, bands: Any, *, scale: float) -> Iterable[Gradients]:
        for band in bands:
            dq, (dk, dv) = (
                k.new_empty((*saved.q_BHSD.shape[:2], band.rows, k.shape[-1])),
                (x.new_empty((*x.shape[:2], band.cols, x.shape[-1])) for x in (k, v)),
            )
            yield Gradients(slice(band.q0, band.q1), dq, slice(band.k0, band.k1), dk, dv)
            del dq, dk, dv


def run_alone(generator: RankGenerator[Any]) -> Any:
    """Run a generator alone. Like a transport, hold the messages of an exchange until it has been waited for."""
    answer: Any = None
    try:
        while True:
            request = generator.send(answer)
            answer = request if isinstance(request, PostExchange) else None
            del request
    except StopIteration as end:
        return end.value


def measured(plan: Plan, phase: Phase, dtype: torch.dtype, kernel: IdleKernel = IDLE, kv_heads: int = SHAPE["kv_heads"]) -> int:
    """Measure the peak of a phase as ``peak_bytes`` counts it, own keys included. Queries are not contiguous.

    Own rows that the backward pass does not read have no memory there, and kept rows are given.
    """
    program, s, t, b, h, g = plan.program, plan.q_rows, plan.kv_rows, SHAPE["batch"], SHAPE["heads"], kv_heads
    d, e = SHAPE["head_dim"], SHAPE["v_dim"]
    kv = torch.empty(t, b, g, d + e, dtype=dtype)
    q, dout, out = (torch.empty(b, h, s, width, dtype=dtype).movedim(2, 0) for width in (d, e, e))
    lse = torch.empty(b, h, s, dtype=accumulation_dtype(dtype)).movedim(2, 0)
    config = AttentionConfig(kernel=kernel, scale=1.0, head_dim=d)  # type: ignore[arg-type]
    kept = kept_tensors_like(program, q, kv) if phase == "backward" else ()
    if phase == "backward":
        q, out = (x if "q" in program.own_rows_read else x.to("meta") for x in (q, out))
        kv = kv if "kv" in program.own_rows_read else kv.to("meta")
    given = BackwardInputs(q, kv, out, lse, dout, None, kept)
    with MemoryCounter([kv, q, out, lse, dout, *kept]) as memory:
        run_alone(forward(plan, q, kv, config) if phase == "forward" else backward(plan, given, config))
    return memory.peak + (0 if kv.is_meta else kv.nbytes)


def kept_tensors_like(program: Program, q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
    tensors: list[Tensor] = []
    for slot in (slot for slot in program.q_slots if slot.kept and slot.rows):
        rows = (slot.rows, SHAPE["batch"], slot.heads or SHAPE["heads"])
        tensors += [q.new_empty((*rows, width)) for width in (SHAPE["head_dim"], SHAPE["v_dim"])]
        tensors.append(q.new_empty(rows, dtype=accumulation_dtype(q.dtype)))
    for slot in (slot for slot in program.kv_slots if slot.kept and slot.rows):
        tensors.append(kv.new_empty((slot.rows, SHAPE["batch"], slot.heads or kv.shape[2], kv.shape[3])))
    return tuple(tensors)


def wider_lse_bytes(plan: Plan, phase: Phase, dtype: torch.dtype) -> int:
    """Return what a CPU needs beyond the estimate: lse is accumulated in float64, and cast in the end."""
    if phase == "backward" or dtype == torch.float64:
        return 0
    slots = plan.program.q_slots
    return 4 * SHAPE["batch"] * sum(slot.rows * (slot.heads or SHAPE["heads"]) for slot in (*slots, slots[0]))


@pytest.fixture(autouse=True)
def skip_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "merge_", lambda into, other, old=None: None)  # its temporary memory is not the engine's


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "strategy",
    [
        "ring",
        "gather",
        "gather(stages=3)",
        "exchange(stages=1)",
        "exchange",
        "pass_q(stages=1)",
        "pass_q",
        "ulysses(heads=4, kv_heads=4)",
        "ulysses(heads=4, kv_heads=4, keep=False)",
        "hierarchical(per_node=2)",
        "hybrid(per_node=2, heads=4, kv_heads=4)",
        "hybrid(per_node=2, heads=4, kv_heads=4, keep=False)",
    ],
)
def test_peak_bytes_bounds_the_memory_held(strategy: str, dtype: str) -> None:
    shape = rs.Shape(**SHAPE, dtype=dtype)  # type: ignore[arg-type]
    for mask in (MASKS["causal"], MASKS["documents"], MASKS["cross"]):
        for layout in ("contiguous", "zigzag", "round_robin"):
            for plan in all_plans(mask, 4, strategy, layout):
                for phase in PHASES:
                    found = measured(plan, phase, getattr(torch, dtype))
                    more = wider_lse_bytes(plan, phase, getattr(torch, dtype))
                    assert found <= peak_bytes(plan, shape, phase) + more, (plan, phase)


INTERLEAVED = [
    ("ulysses(heads=4, kv_heads=4)", "pass_q"),
    ("exchange(stages=2)", "ring"),
    ("hierarchical(per_node=2)", "gather"),
    ("pass_q", "exchange(stages=1)"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategies", INTERLEAVED, ids=" + ".join)
def test_peak_bytes_bounds_the_memory_of_several_exchanges_in_flight(strategies: tuple[str, str], dtype: str) -> None:
    """Messages of two steps exist at the same time, packed or still to be added."""
    shape = rs.Shape(**SHAPE, dtype=dtype)  # type: ignore[arg-type]
    for layout in ("zigzag", "round_robin"):
        pairs = [
            all_plans(mask, 4, one, layout) for mask, one in zip((MASKS["causal"], MASKS["documents"]), strategies, strict=True)
        ]
        for plan in (rs.interleave(*parts) for parts in zip(*pairs, strict=True)):
            assert plan.program.in_flight == 2
            for phase in PHASES:
                found, peak = measured(plan, phase, getattr(torch, dtype)), peak_bytes(plan, shape, phase)
                assert 0.8 * peak <= found <= peak + wider_lse_bytes(plan, phase, getattr(torch, dtype)), (plan, phase)


@pytest.mark.parametrize(
    "strategy",
    [
        "ring",
        "gather(stages=3)",
        "exchange",
        "ulysses(heads=4, kv_heads=4)",
        "hierarchical(per_node=2)",
        "hybrid(per_node=2, heads=4, kv_heads=4)",
    ],
)
def test_peak_bytes_counts_the_copies_of_rounded_messages(strategy: str) -> None:
    """A packed message of dkv is rounded in another copy, and is converted back before it is added."""
    shape = rs.Shape(**SHAPE, dtype="bfloat16")  # type: ignore[arg-type]
    for mask in (MASKS["causal"], MASKS["documents"]):
        for layout in ("zigzag", "round_robin"):
            for plan in rs.LocalWorld(4).plans(mask, strategy=strategy, layout=layout, dkv_dtype="bfloat16"):
                peak, found = peak_bytes(plan, shape, "backward"), measured(plan, "backward", torch.bfloat16)
                assert 0.7 * peak <= found <= peak, (plan, found / peak)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(
    "strategy", ["ring", "gather(stages=3)", "exchange(stages=1)", "exchange", "pass_q", "hierarchical(per_node=2)"]
)
def test_memory_bytes_bounds_the_memory_with_kernel_results(strategy: str, kv_heads: int) -> None:
    """Half-precision results are borrowed, and second ones are pending. The result of the pass is not counted."""
    shape = rs.Shape(**{**SHAPE, "kv_heads": kv_heads}, dtype="bfloat16")  # type: ignore[arg-type]
    b, h, d, e = SHAPE["batch"], SHAPE["heads"], SHAPE["head_dim"], SHAPE["v_dim"]
    for mask in (MASKS["causal"], MASKS["documents"], MASKS["cross"]):
        for layout in ("contiguous", "zigzag", "round_robin"):
            for plan in all_plans(mask, 4, strategy, layout):
                out = plan.q_rows * b * h * e * 2
                gradients = b * 2 * (plan.q_rows * h * d + plan.kv_rows * kv_heads * (d + e))
                for phase, result_bytes in (("forward", out), ("backward", gradients)):
                    held = measured(plan, phase, torch.bfloat16, AllocatingKernel(), kv_heads)  # type: ignore[arg-type]
                    assert held - result_bytes <= memory_bytes(plan, shape, phase), (plan, phase)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "strategy", ["ring", "gather", "exchange(stages=1)", "gather(stages=3)", "exchange", "pass_q", "hierarchical(per_node=2)"]
)
def test_peak_bytes_is_nearly_reached(strategy: str) -> None:
    """A bound that is never reached would be useless for planning."""
    shape = rs.Shape(**SHAPE, dtype="float32")  # type: ignore[arg-type]
    for plan in all_plans(rs.causal(64), 4, strategy, "zigzag"):
        for phase in PHASES:
            assert measured(plan, phase, torch.float32) >= 0.95 * peak_bytes(plan, shape, phase), (plan, phase)


@pytest.mark.parametrize(("strategy", "blocks"), [("ring", 3), ("gather", 8), ("gather(stages=7)", 3)])
def test_key_blocks_held_by_ring_and_gather(strategy: str, blocks: int) -> None:
    """With a full mask on 8 ranks, a ring holds the keys of three ranks, and a gather those of all eight."""
    shape = rs.Shape(heads=1, kv_heads=1, head_dim=4, dtype="float32")
    plan = rs.plan(rs.full(64), world=8, strategy=strategy, layout="contiguous")
    out = 8 * (4 + 1) * 4
    assert peak_bytes(plan, shape, "forward") == blocks * 8 * (4 + 4) * 4 + out
