"""The ``--mask`` of the command line: an expression, and the length it is applied to."""

from __future__ import annotations

import ringspan as rs
from ringspan.errors import MaskError
from ringspan.masks.expressions import parse_mask
from ringspan.masks.table import HI


def mask_at(text: str, seq_len: int | None) -> rs.Mask:
    """Return the mask that ``--mask`` and ``--seq-len`` describe: a relation takes the length, another mask must have
    it.

    >>> mask_at("causal() & window(2)", 6)
    <Mask causal() & window(left=2) & full(6): 6 × 6, area 15, 1 band>
    """
    mask = parse_mask(text)
    if not mask.is_relation:
        if seq_len is not None and seq_len != mask.lengths[0]:
            raise MaskError(
                f"{text!r} is a mask of {mask.lengths[0]:,} tokens, but --seq-len is {seq_len:,}: "
                "leave --seq-len out, or write the mask for that length"
            )
        return mask
    if seq_len is None:
        raise MaskError(f"{text!r} has no length of its own: give it with --seq-len, as in --seq-len 1048576")
    if mask.name.startswith("window(") and (mask.table[:, HI] >= seq_len - 1).any():
        raise MaskError(
            f"{text!r} hides no later key, because a window has no limit on the right unless right= is given. Write "
            f"`causal() & {text}`, or `sliding_window(W)` to count the query's own key too, or `full() & {text}` for this mask"
        )
    return mask & rs.full(seq_len)
