"""User functions on shards. They are called with the indices of the whole batch and of all heads.

::

    q of a batch of 4 with 8 heads, (Shard(0), Shard(1)) on 2 × 2 ranks

              heads 0…3   heads 4…7
    b 0, 1    (0, 0)      (0, 4)         the offsets of each shard. In the last one, b = 0 is b = 2 of the
    b 2, 3    (2, 0)      (2, 4)         whole, h = 0 is h = 4
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ringspan.engine import check_mask_sizes, check_score_mod_heads
from ringspan.frontends.dtensor.attention import BATCH, HEADS
from ringspan.kernels import ScoreMod
from ringspan.masks import Mask
from ringspan.planner import Plan

# Of the batch and of the heads: the first index of a shard, how many the shard has, and how many there are. Plain
# tuples, which torch.compile can hand on as constants.
Extent = tuple[int, int, int]
ShardExtents = tuple[Extent, Extent]


def extents_of(q: DTensor) -> ShardExtents:
    return _extent(q, BATCH), _extent(q, HEADS)


def _extent(q: DTensor, dim: int) -> Extent:
    """Return this rank's part of a dim. The axes split it one after the other, each into parts of ceil(size /
    ranks)."""
    first, size = 0, q.shape[dim]
    for axis, placement in enumerate(q.placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            part = -(-size // q.device_mesh.size(axis))
            start = min(part * q.device_mesh.get_local_rank(axis), size)
            first, size = first + start, min(part, size - start)
    return first, size, q.shape[dim]


def shard_score_mod(extents: ShardExtents, score_mod: ScoreMod) -> ScoreMod:
    """Return a score_mod of the whole tensors as one of a shard."""
    (first_b, _, _), (first_h, _, heads) = extents
    check_score_mod_heads(score_mod, heads)

    def shifted(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score_mod(score, b + first_b, h + first_h, q, k)

    return shifted


def shard_plan(extents: ShardExtents, plan: Plan) -> Plan:
    """Return a plan of the whole tensors as one of a shard: its mask may have a function of the batch index and the
    head."""
    predicate = plan.mask.predicate
    if predicate is None:
        return plan
    (first_b, batch, whole_batch), (first_h, heads, whole_heads) = extents
    check_mask_sizes(plan.mask, whole_batch, whole_heads)
    function = predicate.mask_mod

    def shifted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return function(b + first_b, h + first_h, q, k)

    of_shard = replace(
        predicate,
        functions=(shifted,),
        # Ranks that split one sequence have the same batch members and heads, and so still the same digest.
        fingerprint=f"{predicate.fingerprint} {extents}",
        batch=None if predicate.batch is None else batch,
        heads=None if predicate.heads is None else heads,
    )
    return replace(plan, mask=Mask(plan.mask.table, *plan.mask.lengths, name=plan.mask.name, predicate=of_shard))
