"""The ``--mask`` of the command line: an expression, and the length it is applied to."""

from __future__ import annotations

from typing import NamedTuple

import ringspan as rs
from ringspan.errors import MaskError
from ringspan.masks.expressions import parse_mask
from ringspan.masks.table import HI


class MaskArgument(NamedTuple):
    """A mask with lengths, and remarks for the user about how it was read."""

    mask: rs.Mask
    notes: tuple[str, ...]


def mask_at(text: str, seq_len: int | None) -> MaskArgument:
    """Return the mask that ``--mask`` and ``--seq-len`` describe: a relation takes the length, another mask must have
    it.

    >>> mask_at("causal() & window(2)", 6)
    MaskArgument(mask=<Mask causal() & window(left=2) & full(6): 6 × 6, area 15, 1 band>, notes=())
    """
    mask = parse_mask(text)
    if not mask.is_relation:
        if seq_len is not None and seq_len != mask.lengths[0]:
            raise MaskError(
                f"{text!r} is a mask of {mask.lengths[0]:,} tokens, but --seq-len is {seq_len:,}: "
                "leave --seq-len out, or write the mask for that length"
            )
        return MaskArgument(mask, ())
    if seq_len is None:
        raise MaskError(f"{text!r} has no length of its own: give it with --seq-len, as in --seq-len 1048576")
    hides_no_later_key = bool((mask.table[:, HI] >= seq_len - 1).any())
    remark = f"{mask.name} hides no later key; a causal window is `causal() & {text}`"
    return MaskArgument(mask & rs.full(seq_len), (remark,) if mask.name.startswith("window(") and hides_no_later_key else ())
