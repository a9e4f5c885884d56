"""torch's table of what each ring step computes under a causal mask. ringspan itself uses bands instead."""

from __future__ import annotations

from enum import Enum

from ringspan.compat.options import _cp_options


class _CausalBehavior(Enum):
    SKIP = None
    NOT_IS_CAUSAL = False
    IS_CAUSAL = True


def _is_causal_behavior(rank: int, world_size: int, i: int, is_causal: bool) -> _CausalBehavior:
    """Return what a rank computes in step ``i``, in which it has the keys of rank ``rank - i``.

    >>> [_is_causal_behavior(rank=1, world_size=3, i=i, is_causal=True).name for i in range(2)]
    ['IS_CAUSAL', 'NOT_IS_CAUSAL']
    """
    if not is_causal:
        return _CausalBehavior.NOT_IS_CAUSAL
    if i == 0:
        return _CausalBehavior.IS_CAUSAL
    # With the zigzag layout every rank has queries that come after some keys of each other rank. With the contiguous
    # layout the keys of later ranks come after all its queries.
    sees_some = _cp_options.enable_load_balance or (rank - i) % world_size < rank
    return _CausalBehavior.NOT_IS_CAUSAL if sees_some else _CausalBehavior.SKIP
