"""What torch's ring does in each of its steps under a causal mask. Our plans say the same band by band; this is their table."""

from __future__ import annotations

from enum import Enum

from ringspan.compat.options import _cp_options


class _CausalBehavior(Enum):
    SKIP = None
    NOT_IS_CAUSAL = False
    IS_CAUSAL = True


def _is_causal_behavior(rank: int, world_size: int, i: int, is_causal: bool) -> _CausalBehavior:
    """How a rank treats the keys that reach it in step ``i``, which are those of rank ``rank - i``.

    >>> [_is_causal_behavior(rank=1, world_size=3, i=i, is_causal=True).name for i in range(3)]
    ['IS_CAUSAL', 'NOT_IS_CAUSAL', 'NOT_IS_CAUSAL']
    """
    if not is_causal:
        return _CausalBehavior.NOT_IS_CAUSAL
    if i == 0:
        return _CausalBehavior.IS_CAUSAL
    # Head to tail, every rank has queries after some keys of every other. In order, those of later ranks are all too late.
    sees_some = _cp_options.enable_load_balance or (rank - i) % world_size < rank
    return _CausalBehavior.NOT_IS_CAUSAL if sees_some else _CausalBehavior.SKIP
