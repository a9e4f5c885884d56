"""Any function of (b, h, q, k) as a mask."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringspan.errors import MaskError
from ringspan.masks import table as tables
from ringspan.masks.mask import Mask, length
from ringspan.masks.predicate import MaskMod, Predicate
from ringspan.masks.runs_to_bands import bands_of_runs
from ringspan.masks.table import MAX_LENGTH, Table
from ringspan.torch_private.tensor_version import tensor_version

if TYPE_CHECKING:
    from ringspan.masks.survey import Survey

BLOCK = 128
MAX_EXACT_BANDS = 16  # up to this many bands, a mask is always converted to bands


def mask_mod(
    function: MaskMod,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    block: int | tuple[int, int] = BLOCK,
) -> Mask:
    """Return a mask from a function, as in FlexAttention: query ``q`` sees key ``k`` in batch row ``b`` and head ``h``
    iff ``function(b, h, q, k)``.

    The function is evaluated for every pair, some rows at a time, which costs O(q_len × kv_len): prefer masks of bands
    where they can express the same. If the result is a small set of bands (causal, windows, documents), the mask is
    these bands, and every kernel supports it. If not, the mask is planned by its non-empty blocks, and kernels call the
    function. A function that reads ``b`` or ``h`` needs their sizes: ``batch=``, ``heads=``.

    >>> mask_mod(lambda b, h, q, k: (k <= q) & (q - k < 3), 6)
    <Mask mask_mod(<lambda>): 6 × 6, area 15, 1 band>
    >>> print(mask_mod(lambda b, h, q, k: (q + k) % 3 == 0, 4, block=2).ascii())
    x . . x
    . . x .
    . x . .
    x . . x
    """
    from ringspan.masks.survey import survey_pairs
    from ringspan.user_functions.index_reads import inputs_read

    lengths = (length("q_len", q_len), length("q_len" if kv_len is None else "kv_len", q_len if kv_len is None else kv_len))
    blocks = _block(block)
    read = inputs_read(function, lengths)
    batch = _count("batch", batch) if read.batch else None
    heads = _count("heads", heads) if read.heads else None
    members = (1 if batch is None else batch, 1 if heads is None else heads)
    found = survey_pairs(function, lengths, *members, blocks, read.device)
    predicate = Predicate(
        functions=(function,),
        fingerprint=found.fingerprint,
        batch=batch,
        heads=heads,
        captured=tuple((x, tensor_version(x)) for x in read.captured if not x.is_inference()),
    )
    name = f"mask_mod({getattr(function, '__name__', type(function).__name__)})"
    return mask_of_survey(found, predicate, lengths, blocks, name)


def mask_of_survey(found: Survey, predicate: Predicate, lengths: tuple[int, int], block: tuple[int, int], name: str) -> Mask:
    """Return a mask of bands alone if these are few. Otherwise bands around the non-empty blocks, with the
    predicate."""
    exact = None if found.runs is None else bands_of_runs(found.runs)
    if exact is not None and len(exact) <= MAX_EXACT_BANDS:
        return Mask(exact, *lengths, name=name)
    around = _bands_of_blocks(found.touched_QK, block, lengths)
    if exact is not None and len(exact) <= len(around):
        return Mask(exact, *lengths, name=name)
    return Mask(around, *lengths, name=name, predicate=predicate)


def _count(what: str, given: int | None) -> int:
    if given is None:
        raise MaskError(f"this mask_mod reads the index of {what}: give its size, rs.mask_mod(…, {what}=…)")
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


def _bands_of_blocks(touched_QK: NDArray[np.bool_], block: tuple[int, int], lengths: tuple[int, int]) -> Table:
    """Return the blocks as few bands, clipped at the end of the sequence."""
    edges = np.diff(np.pad(touched_QK, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    q, first = np.nonzero(edges == 1)  # neighbours in a row of blocks are one rectangle
    last = np.nonzero(edges == -1)[1]
    far = np.full(len(q), MAX_LENGTH)
    q0, q1 = q * block[0], np.minimum((q + 1) * block[0], lengths[0])
    k0, k1 = first * block[1], np.minimum(last * block[1], lengths[1])
    return tables.coalesce(tables.tighten(np.stack([q0, q1, k0, k1, -far, far], axis=1)))
