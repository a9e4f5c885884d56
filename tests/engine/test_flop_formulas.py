"""PyTorch's FlopCounterMode counts the visible pairs that a rank computes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ringspan as rs
from tests.conftest import Pools

B, H, G, D, E = 2, 4, 2, 8, 6
LENGTHS = [23, 5, 12]


def counted(rank: int, strategy: str, compiled: bool) -> dict[str, int]:
    cp = rs.ContextParallel(None, rs.documents(LENGTHS), strategy=strategy, layout="zigzag")
    whole = [torch.randn(B, heads, sum(LENGTHS), dim) for heads, dim in ((H, D), (G, D), (G, E))]
    q, k, v = (x.requires_grad_() for x in cp.shard(*whole, dim=2))
    call = torch.compile(cp.attention, backend="aot_eager") if compiled else cp.attention
    with FlopCounterMode(display=False) as counter:
        call(q, k, v).sum().backward()
    found = counter.get_flop_counts()["Global"]
    return {str(name): count for name, count in found.items()}


@pytest.mark.parametrize(
    ("strategy", "compiled"), [("exchange", False), ("exchange", True), ("ulysses", False), ("pass_q", False)]
)
def test_all_ranks_together_count_every_visible_pair_once(strategy: str, compiled: bool, pools: Pools) -> None:
    pairs = B * H * sum(n * (n + 1) // 2 for n in LENGTHS)
    found = pools(2).run(counted, strategy, compiled)
    assert sum(of_rank["ringspan.attend"] for of_rank in found) == pairs * 2 * (D + E)
    assert sum(of_rank["ringspan.attend_backward"] for of_rank in found) == pairs * 2 * (3 * D + 2 * E)
