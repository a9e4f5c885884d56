"""From a mask function of ``transformers.masking_utils`` to a mask over the whole sequence.

transformers composes the mask of a layer from small functions of (b, h, q, k)::

    and_masks(or_masks(causal, blockwise(ids)), sliding_window(512))

These functions index the local tokens of this rank. So the functions of transformers are not called: each is recognised
by its name, and the same mask is made over the whole sequence, of bands where bands can express it. Any other function
becomes an ``rs.mask_mod`` and is called with global indices. If it captures tensors, or reads ``b`` or ``h``, an error
is raised: its tensors could be those of this rank only.

Legend: B batch, N tokens of the whole sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ringspan.errors import UnplannedAttention
from ringspan.masks import Mask, Predicate, causal, documents, full, mask_mod, window
from ringspan.masks.predicate import MaskMod
from ringspan.torch_private.tensor_version import tensor_version

MODULE = "transformers.masking_utils"


class Sequence(NamedTuple):
    """The whole sequence that a mask is for."""

    q_len: int
    k_len: int
    padding_BN: Tensor | None = None
    """The padding mask of the whole sequence, as transformers has it: True for real tokens, False for padding."""
    gathered: Callable[[Tensor], Tensor] | None = None
    """Gathers a tensor (B, tokens of this rank) over the whole sequence."""
    positions: Tensor | None = None
    """The position ids (B, tokens of this rank), if in one process transformers counts tokens by these in packed documents."""

    def packed_positions(self) -> Tensor | None:
        """Return the position ids (B, N) of the whole sequence if it is packed, as transformers decides; None otherwise.

        All ranks must call it: they gather.
        """
        if self.positions is None or self.gathered is None:
            return None
        positions_BN = self.gathered(self.positions)
        return positions_BN if bool((positions_BN.diff(dim=-1) != 1).any()) else None

    @property
    def full(self) -> Mask:
        return full(self.q_len, self.k_len)


def mask_of(function: Callable[..., Any], sequence: Sequence) -> Mask:
    """Return the mask of a mask function, over the whole sequence.

    It does not hide padding: the caller intersects it with :func:`padding_mask`. Packed documents are ignored, because
    transformers derives them from the position ids of this rank; see
    :mod:`ringspan.integrations.transformers.packing`. Since transformers 5.23 a function gets the positions of tokens in
    their documents: this matters for chunks and functions of the user, not for those of ``k - q`` only.
    """
    known = _KNOWN.get(function.__qualname__) if is_from_masking_utils(function) else None
    if known is None:
        return _custom(function, sequence)
    return known(sequence, closure_of(function))


def is_from_masking_utils(function: Any) -> bool:
    return getattr(function, "__module__", None) == MODULE and hasattr(function, "__code__")


def padding_mask(padding_BN: Tensor, sequence: Sequence) -> Mask:
    """Return the mask in which every query sees the keys that are no padding."""
    rows = padding_BN.cpu().numpy().astype(bool)
    anywhere = runs(np.array(rows.any(axis=0), dtype=np.int64, ndmin=1))
    bands = [(0, sequence.q_len, start, stop, -sequence.q_len, sequence.k_len) for start, stop, seen in anywhere if seen]
    mask = Mask.from_bands(bands, sequence.q_len, sequence.k_len)
    if (rows == rows[:1]).all():
        return mask
    return mask & by_rows("padding", lambda b, h, q, k: padding_BN[b, k], (padding_BN,), sequence)


def either(a: Mask, b: Mask) -> Mask:
    """Return the union of two masks, of which one or both may have a predicate."""
    if a.predicate is None and b.predicate is None:
        return a | b
    bands = Mask(a.table, *a.lengths, name=a.name) | Mask(b.table, *b.lengths, name=b.name)
    parts = [_as_function(mask) for mask in (a, b)]
    predicates = [mask.predicate for mask in (a, b) if mask.predicate is not None]
    joined = reduce(Predicate.both, predicates)
    predicate = Predicate(
        functions=(lambda b, h, q, k: parts[0](b, h, q, k) | parts[1](b, h, q, k),),
        fingerprint=hashlib.sha256(f"{a.digest} | {b.digest}".encode()).hexdigest(),
        batch=joined.batch,
        heads=joined.heads,
        captured=joined.captured,
    )
    return Mask(bands.table, *bands.lengths, name=bands.name, predicate=predicate)


# -- the functions of transformers -------------------------------------------------------------------------------------

Closure = dict[str, Any]


def closure_of(function: Any) -> Closure:
    """Return the variables that a function has from the function around it."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _causal(sequence: Sequence, _: Closure) -> Mask:
    return causal(sequence.q_len) if sequence.q_len == sequence.k_len else sequence.full & window(right=0)


def _sliding(sequence: Sequence, closure: Closure) -> Mask:
    return sequence.full & window(left=closure["sliding_window"] - 1)


def _sliding_both_sides(sequence: Sequence, closure: Closure) -> Mask:
    return sequence.full & window(left=closure["sliding_window"], right=closure["sliding_window"])


def _chunked(sequence: Sequence, closure: Closure) -> Mask:
    """Return the mask of chunks, which start at the first token that is no padding, in each row of the batch.

    In packed documents they start where transformers starts them: since 5.23 in each document.
    """
    size, n = closure["chunk_size"], sequence.k_len
    padding_BN, positions_BN = sequence.padding_BN, sequence.packed_positions()
    if positions_BN is not None:
        return _chunks_of_documents(size, positions_BN, sequence)
    if padding_BN is None:
        return _chunks(size, 0, n)
    padded_B = (padding_BN.cumsum(dim=-1) == 0).sum(dim=-1)
    starts = padded_B.tolist()
    if len(set(starts)) == 1:
        return _chunks(size, starts[0], n)
    return sequence.full & by_rows(
        "chunks", lambda b, h, q, k: (k - padded_B[b]) // size == (q - padded_B[b]) // size, (padded_B,), sequence
    )


def _chunks(size: int, start: int, n: int) -> Mask:
    cuts = np.unique(np.clip(np.concatenate([[0, n], np.arange(start % size, n, size)]), 0, n))
    return documents(np.diff(cuts), causal=False)


def _chunks_of_documents(size: int, positions_BN: Tensor, sequence: Sequence) -> Mask:
    """Return the mask of chunks that are counted by position ids. Chunks of two documents differ."""
    starts_BN = (positions_BN.diff(dim=-1, prepend=positions_BN[:, :1] - 1) != 1) | (positions_BN % size == 0)
    ids_BN = starts_BN.cumsum(-1)
    if (ids_BN == ids_BN[:1]).all():
        return documents(ids=ids_BN[0], causal=False)
    return sequence.full & by_rows("chunks", lambda b, h, q, k: ids_BN[b, q] == ids_BN[b, k], (ids_BN,), sequence)


def _blockwise(sequence: Sequence, closure: Closure) -> Mask:
    """Return the mask in which tokens of the same block see each other; the id -1 is no block.

    The ids are those of the whole sequence. Models that make them from this rank's tokens are exact if no rank has a
    block (GIT without images).
    """
    ids_BN: Tensor = closure["block_sequence_ids"]
    n = sequence.k_len
    if ids_BN.shape[-1] != n and sequence.gathered is not None and not (sequence.gathered(ids_BN) >= 0).any():
        return Mask.from_bands([], sequence.q_len, n)
    if ids_BN.shape[-1] != n:
        raise UnplannedAttention(
            f"the blocks of this mask were found in {ids_BN.shape[-1]} tokens, but the whole sequence has {n}: a block can lie "
            "on two ranks. Pass what marks them (token_type_ids, mm_token_type_ids) for the whole sequence, on every rank"
        )
    rows = ids_BN.cpu().numpy()
    if (rows != rows[:1]).any():
        return sequence.full & by_rows(
            "blocks", lambda b, h, q, k: (ids_BN[b, q] == ids_BN[b, k]) & (ids_BN[b, q] >= 0), (ids_BN,), sequence
        )
    runs_of: dict[int, list[tuple[int, int]]] = {}
    for start, stop, block in runs(rows[0]):
        if block >= 0:
            runs_of.setdefault(block, []).append((start, stop))
    bands = [(*q, *k, -n, n) for same in runs_of.values() for q in same for k in same]
    return Mask.from_bands(bands, sequence.q_len, n)


def _all_of(sequence: Sequence, closure: Closure) -> Mask:
    return reduce(Mask.__and__, [mask_of(f, sequence) for f in closure["mask_functions"]])


def _any_of(sequence: Sequence, closure: Closure) -> Mask:
    return reduce(either, [mask_of(f, sequence) for f in closure["mask_functions"]])


# name of a function in transformers.masking_utils -> the mask it stands for
_KNOWN: dict[str, Callable[[Sequence, Closure], Mask]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": lambda sequence, _: sequence.full,
    "sliding_window_overlay.<locals>.inner_mask": _sliding,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": _sliding_both_sides,
    "chunked_overlay.<locals>.inner_mask": _chunked,
    "blockwise_overlay.<locals>.inner_mask": _blockwise,
    "packed_sequence_mask_function.<locals>.inner_mask": lambda sequence, _: sequence.full,
    "remap_positions_for_packed_sequence.<locals>.inner_mask": lambda sequence, of: mask_of(of["mask_function"], sequence),
    "and_masks.<locals>.and_mask": _all_of,
    "or_masks.<locals>.or_mask": _any_of,
}


def _custom(function: Callable[..., Any], sequence: Sequence) -> Mask:
    """Return the mask of a function that is not known. It is called with global indices."""
    from ringspan.user_functions.index_reads import inputs_read

    read = inputs_read(function, (sequence.q_len, sequence.k_len))
    if read.captured or read.batch or read.heads:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise UnplannedAttention(
            f"the mask function {name} depends on tensors, rows of the batch or heads, and it is not known whether it counts "
            "the tokens of this rank or of the whole sequence. Give this part of the mask to ContextParallel, as "
            "rs.mask_mod(function, length), and not to the model"
        )
    positions_BN = sequence.packed_positions()
    if positions_BN is None:
        return mask_mod(function, sequence.q_len, sequence.k_len)
    return mask_mod(
        lambda b, h, q, k: function(b, h, positions_BN[b, q], positions_BN[b, k]),
        sequence.q_len,
        sequence.k_len,
        batch=len(positions_BN),
    )


def by_rows(name: str, function: MaskMod, captured: tuple[Tensor, ...], sequence: Sequence) -> Mask:
    """Return a mask that differs between the rows of the batch, decided by a function."""
    digest = hashlib.sha256(name.encode())
    for x in captured:
        digest.update(f"{x.dtype} {tuple(x.shape)}".encode() + x.cpu().contiguous().numpy().tobytes())
    predicate = Predicate(
        functions=(function,),
        fingerprint=digest.hexdigest(),
        batch=captured[0].shape[0],
        captured=tuple((x, tensor_version(x)) for x in captured if not x.is_inference()),
    )
    return Mask(sequence.full.table, sequence.q_len, sequence.k_len, name=f"{name} by row", predicate=predicate)


def _as_function(mask: Mask) -> MaskMod:
    """Return a mask as one function of (b, h, q, k)."""
    bands = mask.table.tolist()
    inner = None if mask.predicate is None else mask.predicate.mask_mod

    def contains(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = (q < 0) & (k < 0)  # False, in the shape of the indices
        for q0, q1, k0, k1, lo, hi in bands:
            seen = seen | ((q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi))
        return seen if inner is None else seen & inner(b, h, q, k)

    return contains


def runs(values: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return the runs of equal values, as (start, stop, value).

    >>> runs(np.array([5, 5, -1]))
    [(0, 2, 5), (2, 3, -1)]
    """
    if not len(values):
        return []
    starts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]
    return [(a, b, int(values[a])) for a, b in zip(starts, [*starts[1:], len(values)], strict=True)]
