"""Kernels that return half precision, as those on GPUs do.

Accumulators borrow such results and combine them at the end.

A partial result that is added to the wrong rows, twice or not at all, changes the result by far more than rounding
does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from torch import Tensor

from ringspan.engine import slots
from ringspan.kernels import Gradients, Partial, PartialRows, Saved, cpu
from ringspan.masks import Band
from tests.engine.dense_comparison import Tensors, case, worst_error
from tests.engine.drivers import DeliverAtOnce, DeliverLate
from tests.plans.examples import MASKS, all_plans

ROUNDING = 0.02


class HalfPrecisionKernel:
    """The CPU kernel, called band by band or for all bands at once.

    Its results are rounded to the dtype of the tensors.
    """

    def __init__(self, *, one_by_one: bool) -> None:
        self.one_by_one = one_by_one

    def _groups(self, bands: tuple[Band, ...]) -> Iterable[tuple[Band, ...]]:
        return [(band,) for band in bands] if self.one_by_one else [bands]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bands: Any, *, scale: float) -> Iterable[PartialRows]:
        for group in self._groups(bands):
            for start, stop, (out, lse) in cpu.attend(q, k, v, group, scale=scale):
                yield PartialRows(start, stop, Partial(out.to(q.dtype), lse))

    def attend_backward(self, saved: Saved, k: Tensor, v: Tensor, bands: Any, *, scale: float) -> Iterable[Gradients]:
        for group in self._groups(bands):
            for grads in cpu.attend_backward(saved, k, v, group, scale=scale):
                dq, dk, dv = (x.to(k.dtype) for x in (grads.dq_BHSD, grads.dk_BGTD, grads.dv_BGTE))
                yield grads._replace(dq_BHSD=dq, dk_BGTD=dk, dv_BGTE=dv)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["together", "one by one"])
@pytest.mark.parametrize(
    "strategy",
    [
        "ring",
        "gather(stages=1)",
        "gather(stages=3)",
        "exchange(stages=1)",
        "exchange(stages=2)",
        "pass_q",
        "hierarchical(per_node=2)",
        "ulysses(heads=4, kv_heads=2)",
        "hybrid(per_node=2, heads=4, kv_heads=2)",
    ],
)
@pytest.mark.parametrize("added_together", [False, True], ids=["", "messages added together"])
def test_half_precision_results_differ_by_rounding_only(
    monkeypatch: pytest.MonkeyPatch, strategy: str, one_by_one: bool, added_together: bool
) -> None:
    """On GPUs the gradients that arrive in a step are added together."""
    monkeypatch.setattr(slots, "ADDED_TOGETHER", {"cpu"} if added_together else set())
    for mask in MASKS.values():
        given = case(mask)
        half = Tensors(*(x.half() for x in given[:4]), given.dlse.float())
        for layout in ("contiguous", "zigzag", "round_robin"):
            for driver in (DeliverAtOnce(), DeliverLate()):
                plans = all_plans(mask, 4, strategy, layout)
                error = worst_error(plans, half, driver.run, HalfPrecisionKernel(one_by_one=one_by_one))
                assert error <= ROUNDING, (mask, layout, driver)
