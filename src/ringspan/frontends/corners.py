"""Functions of the user on shards: they are told which members of the whole batch, and which of all heads, a shard has.

::

    q of a batch of 4 with 8 heads, (Shard(0), Shard(1)) on 2 × 2 ranks

              heads 0…3   heads 4…7
    b 0, 1    (0, 0)      (0, 4)         the corner of each shard: b = 0 there is b = 2 of the whole,
    b 2, 3    (2, 0)      (2, 4)         h = 0 is h = 4
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ringspan.frontends.attention import check_members
from ringspan.frontends.score_mods import check_heads
from ringspan.frontends.shards import BATCH, HEADS
from ringspan.kernels import ScoreMod
from ringspan.masks import Mask
from ringspan.planner import Plan

# Of batch and of heads: the first that a shard has, how many it has, and how many there are. Plain tuples, since compilers
# hand these on as they are.
Part = tuple[int, int, int]
Parts = tuple[Part, Part]


def parts_of(q: DTensor) -> Parts:
    return _part(q, BATCH), _part(q, HEADS)


def _part(q: DTensor, dim: int) -> Part:
    """What this rank has of a dim, which axes cut one after the other, each into equal parts as far as it goes."""
    first, size = 0, q.shape[dim]
    for axis, placement in enumerate(q.placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            most = -(-size // q.device_mesh.size(axis))
            start = min(most * q.device_mesh.get_local_rank(axis), size)
            first, size = first + start, min(most, size - start)
    return first, size, q.shape[dim]


def score_mod_at(parts: Parts, score_mod: ScoreMod) -> ScoreMod:
    """A score_mod of the whole as that of a shard."""
    (first_b, _, _), (first_h, _, heads) = parts
    check_heads(score_mod, heads)

    def moved(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score_mod(score, b + first_b, h + first_h, q, k)

    return moved


def plan_at(parts: Parts, plan: Plan) -> Plan:
    """A plan of the whole as that of a shard: its mask may be settled by a function."""
    predicate = plan.mask.predicate
    if predicate is None:
        return plan
    (first_b, batch, whole_batch), (first_h, heads, whole_heads) = parts
    check_members(plan.mask, whole_batch, whole_heads)
    function = predicate.mask_mod

    def moved(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return function(b + first_b, h + first_h, q, k)

    of_shard = replace(
        predicate,
        functions=(moved,),
        # Ranks that split one sequence have the same part of batch and heads, and so still the same digest.
        fingerprint=f"{predicate.fingerprint} {parts}",
        batch=None if predicate.batch is None else batch,
        heads=None if predicate.heads is None else heads,
    )
    return replace(plan, mask=Mask(plan.mask.table, *plan.mask.lengths, name=plan.mask.name, predicate=of_shard))
