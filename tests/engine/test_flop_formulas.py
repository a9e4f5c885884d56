"""PyTorch's FlopCounterMode counts the visible pairs that a rank computes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import ringspan as rs
from tests.conftest import Pools

B, H, G, D, E = 2, 4, 2, 8, 6
LENGTHS = [23, 5, 12]


def counted(rank: int, strategy: str, how: str) -> dict[str, int]:
    cp = rs.ContextParallel(None, rs.documents(LENGTHS), strategy=strategy, layout="zigzag")
    call = torch.compile(cp.attention, backend="aot_eager") if how == "compiled" else cp.attention
    with FakeTensorMode(allow_non_fake_inputs=True) if how == "fake" else nullcontext():
        sizes = [(B, heads, cp.plan.q_rows, dim) for heads, dim in ((H, D), (G, D), (G, E))]
        q, k, v = (torch.randn(size, requires_grad=True) for size in sizes)
        with FlopCounterMode(display=False) as counter:
            call(q, k, v).sum().backward()
    found = counter.get_flop_counts()["Global"]
    return {str(name): count for name, count in found.items()}


@pytest.mark.parametrize(
    ("strategy", "how"),
    [("exchange", "eager"), ("exchange", "compiled"), ("exchange", "fake"), ("ulysses", "eager"), ("pass_q", "eager")],
)
def test_all_ranks_together_count_every_visible_pair_once(strategy: str, how: str, pools: Pools) -> None:
    pairs = B * H * sum(n * (n + 1) // 2 for n in LENGTHS)
    found = pools(2).run(counted, strategy, how)
    assert sum(of_rank["ringspan.attend"] for of_rank in found) == pairs * 2 * (D + E)
    assert sum(of_rank["ringspan.attend_backward"] for of_rank in found) == pairs * 2 * (3 * D + 2 * E)
