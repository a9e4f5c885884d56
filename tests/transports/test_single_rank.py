"""A transport of one rank out of several sends nothing, so ranks may use it in any order."""

from __future__ import annotations

import torch

import ringspan as rs
from ringspan.testing.assertions import assert_close
from ringspan.transports import as_transport
from ringspan.transports.single_rank import SingleRank
from tests.conftest import Pools


def attend_alone(rank: int) -> tuple[int, int, torch.Tensor]:
    cp = rs.ContextParallel(SingleRank(as_transport(None)), rs.causal(6))
    x = torch.arange(48.0).view(1, 2, 6, 4).cos()
    for _ in range(2 * rank):  # other numbers of calls on each rank: none of them waits for another
        cp.unshard(cp.attention(x, x, x), dim=2)
    return cp.rank, cp.world, cp.mean(cp.attention(x, x, x)) + cp.group.traffic.sent


def test_a_single_rank_sends_nothing(pools: Pools) -> None:
    x = torch.arange(48.0).view(1, 2, 6, 4).cos()
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).mean()
    for rank, world, mean in pools(2).run(attend_alone):
        assert (rank, world) == (0, 1)
        assert_close(mean, expected, atol=1e-6)
