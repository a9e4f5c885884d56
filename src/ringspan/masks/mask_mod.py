"""Any function of (b, h, q, k) as a mask."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ringspan.errors import MaskError
from ringspan.masks import table as tables
from ringspan.masks.mask import Mask, length
from ringspan.masks.predicate import MaskMod, Predicate
from ringspan.masks.runs_to_bands import bands_of_runs
from ringspan.masks.table import MAX_LENGTH, Table
from ringspan.torch_private.tensor_version import tensor_version

BLOCK = 128
FEW = 16  # bands that are few, whatever the blocks would make


def mask_mod(
    function: MaskMod,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    block: int | tuple[int, int] = BLOCK,
) -> Mask:
    """Query ``q`` of head ``h`` of member ``b`` of the batch sees key ``k`` iff ``function(b, h, q, k)``, as in FlexAttention.

    The function is called for every pair, some rows at a time; a mask that can be said in bands costs nothing of the kind.
    If what it says are bands after all (causal, windows, documents: no more bands than there are blocks to visit), they are the
    mask, and every kernel can serve it. If not, the mask is planned by the blocks of pairs that anybody sees, and kernels
    call the function again. One that reads ``b`` or ``h`` must be told how many there are: ``batch=``, ``heads=``.

    >>> mask_mod(lambda b, h, q, k: (k <= q) & (q - k < 3), 6)
    <Mask mask_mod(<lambda>): 6 × 6, area 15, 1 band>
    >>> print(mask_mod(lambda b, h, q, k: (q + k) % 3 == 0, 4, block=2).ascii())
    x . . x
    . . x .
    . x . .
    x . . x
    """
    from ringspan.masks import survey as cells
    from ringspan.user_functions.index_reads import inputs_read

    lengths = (length("q_len", q_len), length("q_len" if kv_len is None else "kv_len", q_len if kv_len is None else kv_len))
    blocks = _block(block)
    looks_at = inputs_read(function, lengths)
    batch = _count("batch", batch) if looks_at.batch else None
    heads = _count("heads", heads) if looks_at.heads else None
    members = (1 if batch is None else batch, 1 if heads is None else heads)
    found = cells.survey(function, lengths, *members, blocks, looks_at.device)
    name = f"mask_mod({getattr(function, '__name__', type(function).__name__)})"
    around = _bands_of_blocks(found.touched_QK, blocks, lengths)
    exact = None if found.runs is None else bands_of_runs(found.runs)
    if exact is not None and len(exact) <= max(FEW, len(around)):
        return Mask(exact, *lengths, name=name)
    predicate = Predicate(
        functions=(function,),
        fingerprint=found.fingerprint,
        batch=batch,
        heads=heads,
        captured=tuple((x, tensor_version(x)) for x in looks_at.captured if not x.is_inference()),
    )
    return Mask(around, *lengths, name=name, predicate=predicate)


def _count(what: str, given: int | None) -> int:
    if given is None:
        raise MaskError(f"this mask_mod reads the index of {what}: say how many there are, rs.mask_mod(…, {what}=…)")
    return length(what, given)


def _block(block: Any) -> tuple[int, int]:
    try:
        q, k = (block, block) if isinstance(block, int) else block
        q, k = operator.index(q), operator.index(k)
    except (TypeError, ValueError):
        q = k = 0
    if min(q, k) < 1:
        raise MaskError(f"block must be a number of tokens, or two (of queries and of keys), not {block!r}")
    return q, k


def _bands_of_blocks(touched_QK: Any, block: tuple[int, int], lengths: tuple[int, int]) -> Table:
    """The blocks as bands, joined into few; what reaches over the edge of the sequence is cut away."""
    q, k = np.nonzero(touched_QK)
    far = np.full(len(q), MAX_LENGTH)
    q0, k0 = q * block[0], k * block[1]
    q1, k1 = np.minimum(q0 + block[0], lengths[0]), np.minimum(k0 + block[1], lengths[1])
    return tables.coalesce(tables.tighten(np.stack([q0, q1, k0, k1, -far, far], axis=1)))
