"""The comparison that the GPU tests share, on a CPU."""

from __future__ import annotations

import pytest
import torch

import ringspan as rs
from ringspan.kernels import cpu
from ringspan.kernels.kernel import PartialRows
from tests.kernels.compare import compared

MASK = rs.causal(24)


def test_a_nan_in_lse_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 24, 8, requires_grad=True) for _ in range(3))
    assert all(each.error <= 1e-6 for each in compared(q, k, v, MASK))
    attend = cpu.attend

    def broken(*args, **options):  # type: ignore[no-untyped-def]
        for start, stop, partial in attend(*args, **options):
            yield PartialRows(start, stop, partial._replace(lse=partial.lse.index_fill(2, torch.tensor([1]), torch.nan)))

    monkeypatch.setattr(cpu, "attend", broken)
    with pytest.raises(AssertionError, match=r"lse differs in .*: nan instead of"):
        compared(q, k, v, MASK)
