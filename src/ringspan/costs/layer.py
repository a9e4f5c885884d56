"""The time of one layer of a decoder: attention by pairs, everything else by tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

from ringspan.costs.hardware import Hardware
from ringspan.costs.plan_cost import flops_per_pair
from ringspan.errors import PlanError
from ringspan.plans.data import PHASES
from ringspan.plans.shape import Shape

# The backward pass computes two matrix products for each one of the forward pass.
PASSES = 3


class LayerCost(NamedTuple):
    """Seconds of a pair and of a token, forward and backward together, on one rank."""

    pair_s: float
    token_s: float

    def seconds(self, tokens: int, pairs: int) -> float:
        return pairs * self.pair_s + tokens * self.token_s


def layer_cost(machine: Hardware, shape: Shape, linear_flops: float | None = None) -> LayerCost:
    """Return the cost of a layer. Pairs are those of causal bands; matrix products run at the speed of rectangles.

    ``linear_flops`` are the FLOPs per token of the layer's matrix products, forward. By default they are 24 times the
    square of the width (heads × head dim): four products of that width, and an MLP of four times the width.
    """
    speeds = {"forward": machine.forward, "backward": machine.backward}
    pair_s = sum(shape.heads * flops_per_pair(shape, phase) / speeds[phase].causal for phase in PHASES)
    if linear_flops is None:
        linear_flops = 24 * (shape.heads * shape.head_dim) ** 2
    if isinstance(linear_flops, bool) or not isinstance(linear_flops, (int, float)) or not 0 <= linear_flops < math.inf:
        raise PlanError(f"linear_flops must be a number of at least 0, FLOPs of a layer for one token; not {linear_flops!r}")
    return LayerCost(pair_s, PASSES * shape.batch * linear_flops / machine.forward.full)
