"""Evaluate a mask_mod: for all pairs (:func:`survey_pairs`) or only inside partial blocks (:func:`survey_blocks`).

The function is called for a limited number of pairs at a time (``MAX_CELLS``), to limit memory. This module imports
PyTorch, so it is imported only where there is a function to call.

Legend: N blocks evaluated together, R rows, T keys, Q and K blocks of queries and keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspan.errors import MaskError
from ringspan.masks.predicate import MaskMod, Predicate
from ringspan.masks.runs_to_bands import RowRuns
from ringspan.masks.table import Ints, Table
from ringspan.user_functions.captures import captured_tensors
from ringspan.user_functions.digests import function_digest
from ringspan.user_functions.index_reads import inputs_read

# The number of pairs to evaluate together. One row of blocks, or one block, is evaluated together even if it has more.
MAX_CELLS = 2**24
# A mask is converted to bands if its rows have at most this many runs of visible keys on average.
MAX_RUNS = 16
# Partial blocks are all evaluated if together they have no more pairs than this. Otherwise a sample of them is
# evaluated.
MAX_PARTIAL_CELLS = 2**27
SAMPLED_BLOCKS = 64
# The maximum number of values of a captured tensor that enter a fingerprint.
SAMPLED_VALUES = 2**22

# The kinds of blocks of a BlockMask: no pair visible, decided by the mask_mod, all pairs visible.
HIDDEN, PARTIAL, FULL = range(3)

Lengths = tuple[int, int]
Member = tuple[int, int]
"""The indices of a batch row and of a head."""
Bools = NDArray[np.bool_]


class Survey(NamedTuple):
    """The result of evaluating a function.

    ``touched_QK`` are the blocks in which a pair is visible, or may be. ``runs`` are the visible keys of each row; None
    if they are too many, not known, or not the same for the whole batch and all heads.

    ``fingerprint`` enters ``Mask.digest``, so it must be equal on all ranks that were given the same arguments. It may
    differ between equal masks: that of :func:`survey_blocks` depends on the block sizes, and that of a sample on the
    code of the function. After a sample, two masks that differ only in pairs outside of it can have equal fingerprints
    if the function captures a tensor with more than SAMPLED_VALUES values.
    """

    touched_QK: Bools
    runs: RowRuns | None
    fingerprint: str


# -- all pairs ---------------------------------------------------------------------------------------------------------


def survey_pairs(
    function: MaskMod, lengths: Lengths, batch: int, heads: int, block: tuple[int, int], device: torch.device
) -> Survey:
    """Evaluate the function for every pair of every member. The fingerprint follows from all results."""
    (q_len, k_len), (q_block, k_block) = lengths, block
    touched_QK = np.zeros((-(-q_len // q_block), -(-k_len // k_block)), dtype=np.bool_)
    runs = [RowRuns.empty()]
    fingerprints: list[str] = []
    for b in range(batch):
        for h in range(heads):
            hashed = hashlib.sha256()
            for start, cells_RT in row_chunks(function, lengths, b, h, q_block, device):
                hashed.update(np.packbits(cells_RT, axis=1).tobytes())
                touched_chunk = _any_in_blocks(cells_RT, block)
                touched_QK[start // q_block : start // q_block + len(touched_chunk)] |= touched_chunk
                if not fingerprints and _count(runs) <= MAX_RUNS * q_len:
                    runs.append(_runs(cells_RT, start + np.arange(len(cells_RT))))
            fingerprints.append(hashed.hexdigest())
    are_few, are_alike = _count(runs) <= MAX_RUNS * q_len, len(set(fingerprints)) == 1
    fingerprint = hashlib.sha256(repr((lengths, fingerprints)).encode()).hexdigest()
    return Survey(touched_QK, RowRuns.joined(runs) if are_few and are_alike else None, fingerprint)


def row_chunks(
    function: MaskMod, lengths: Lengths, b: int, h: int, multiple: int, device: torch.device
) -> Iterator[tuple[int, Bools]]:
    """Evaluate all pairs of one member in chunks of rows. Yields the first row of each chunk and its pairs.

    The number of rows of a chunk is a multiple of ``multiple``.
    """
    q_len, k_len = lengths
    rows = max(1, MAX_CELLS // max(1, k_len) // multiple) * multiple
    for start in range(0, q_len if k_len else 0, rows):
        yield start, evaluate_rectangle(function, (b, h), (start, min(start + rows, q_len)), (0, k_len), device)


def evaluate_rectangle(
    function: MaskMod, member: Member, rows: tuple[int, int], keys: tuple[int, int], device: torch.device
) -> Bools:
    """Evaluate the pairs of a range of rows and a range of keys."""
    q_R, k_T = torch.arange(*rows, device=device), torch.arange(*keys, device=device)
    return _evaluate(function, member, q_R[None], k_T[None])[0]


def _evaluate(function: MaskMod, member: Member, q_NR: Tensor, k_NT: Tensor) -> Bools:
    over_keys = torch.vmap(function, in_dims=(None, None, None, 0))
    over_pairs = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    b, h = (torch.tensor(index, device=q_NR.device) for index in member)
    cells_NRT = torch.vmap(over_pairs, in_dims=(None, None, 0, 0))(b, h, q_NR, k_NT)
    if cells_NRT.dtype != torch.bool:
        raise MaskError(f"a mask_mod returns True or False for a pair (torch.bool); this one returned {cells_NRT.dtype}")
    return cells_NRT.cpu().numpy()


def evaluate(predicate: Predicate, lengths: Lengths, b: int, h: int) -> Bools:
    """Evaluate all pairs of one member of the batch and one head, with the present values of captured tensors."""
    device = inputs_read(predicate.mask_mod, lengths).device
    rows = [cells_RT for _, cells_RT in row_chunks(predicate.mask_mod, lengths, b, h, 1, device)]
    return np.concatenate(rows) if rows else np.zeros(lengths, dtype=np.bool_)


def any_visible(predicate: Predicate, bands: Table, lengths: Lengths) -> bool:
    """Return whether a pair within these bands is visible for any member.

    Evaluates no chunk of rows and keys that is outside of the bands, and stops after the first with a visible pair.
    """
    device = inputs_read(predicate.mask_mod, lengths).device
    members = [(b, h) for b in range(predicate.batch or 1) for h in range(predicate.heads or 1)]
    for q0, q1, k0, k1, lo, hi in bands.tolist():
        step = max(1, MAX_CELLS // 16 // (k1 - k0))
        for start in range(q0, q1, step):
            stop = min(start + step, q1)
            first, last = max(k0, start + lo), min(k1, stop + hi)
            if first >= last:
                continue
            distance_RT = np.arange(first, last)[None, :] - np.arange(start, stop)[:, None]
            in_band_RT = (lo <= distance_RT) & (distance_RT <= hi)
            for member in members:
                if (in_band_RT & evaluate_rectangle(predicate.mask_mod, member, (start, stop), (first, last), device)).any():
                    return True
    return False


# -- partial blocks ----------------------------------------------------------------------------------------------------


def survey_blocks(
    function: MaskMod, kinds: Mapping[Member, NDArray[np.int8]], lengths: Lengths, block: tuple[int, int], device: torch.device
) -> Survey:
    """Evaluate the function inside the partial blocks of each member, ``kinds[member]`` being a (Q, K) table.

    If these have too many pairs, only a sample of the blocks is evaluated, and none if a single block has more than
    MAX_CELLS pairs. In both cases ``runs`` is None, and the fingerprint is computed from the sample, all block tables,
    the code of the function, and at most SAMPLED_VALUES values of each tensor that it has captured.
    """
    hashed = hashlib.sha256(repr((lengths, block, list(kinds))).encode())
    for kinds_QK in kinds.values():
        hashed.update(np.ascontiguousarray(kinds_QK).tobytes())
    touched_QK = np.any([kinds_QK != HIDDEN for kinds_QK in kinds.values()], axis=0)
    partial = {member: np.nonzero(kinds_QK == PARTIAL) for member, kinds_QK in kinds.items()}
    size = min(block[0], lengths[0]) * min(block[1], lengths[1])
    if sum(len(q) for q, _ in partial.values()) * size > MAX_PARTIAL_CELLS:
        _hash_function(hashed, function, device)
        sample_size = max(1, min(SAMPLED_BLOCKS, MAX_CELLS // max(1, size)))
        for member, (q, k) in partial.items() if size <= MAX_CELLS else ():
            sampled = np.linspace(0, len(q) - 1, min(len(q), sample_size)).astype(np.int64)
            for cells_NRT, *_ in _in_blocks(function, member, q[sampled], k[sampled], lengths, block, device):
                hashed.update(np.packbits(cells_NRT).tobytes())
        return Survey(touched_QK, None, hashed.hexdigest())
    first, *others = kinds
    touched_QK = np.any([kinds_QK == FULL for kinds_QK in kinds.values()], axis=0)
    full = _full_runs(kinds[first], lengths, block)
    runs = [RowRuns.empty() if full is None else full]
    member_digests = []
    for member, (q, k) in partial.items():
        member_hash = hashlib.sha256()
        for cells_NRT, q_N, k_N in _in_blocks(function, member, q, k, lengths, block, device):
            member_hash.update(np.packbits(cells_NRT).tobytes())
            seen = cells_NRT.any(axis=(1, 2))
            touched_QK[q_N[seen], k_N[seen]] = True
            if member == first and full is not None and _count(runs) <= MAX_RUNS * lengths[0]:
                n, rows, _ = cells_NRT.shape
                q_rows = (q_N[:, None] * block[0] + np.arange(rows)).ravel()
                runs.append(_runs(cells_NRT.reshape(n * rows, -1), q_rows, np.repeat(k_N * block[1], rows)))
        member_digests.append(member_hash.hexdigest())
    hashed.update(repr(member_digests).encode())
    are_few = full is not None and _count(runs) <= MAX_RUNS * lengths[0]
    are_alike = len(set(member_digests)) == 1 and all(np.array_equal(kinds[first], kinds[other]) for other in others)
    return Survey(touched_QK, RowRuns.joined(runs) if are_few and are_alike else None, hashed.hexdigest())


def _full_runs(kinds_QK: NDArray[np.int8], lengths: Lengths, block: tuple[int, int]) -> RowRuns | None:
    """Return the keys of full blocks, row by row, neighbouring blocks as one run. None if the runs are too many."""
    blocks, rows = _runs(kinds_QK == FULL, np.arange(len(kinds_QK))), min(block[0], lengths[0])
    if len(blocks.q) * rows > MAX_RUNS * lengths[0]:
        return None
    q = (blocks.q[:, None] * block[0] + np.arange(rows)).ravel()
    start, stop = (np.repeat(np.minimum(x * block[1], lengths[1]), rows) for x in blocks[1:])
    inside = q < lengths[0]
    return RowRuns(q[inside], start[inside], stop[inside])


def _in_blocks(
    function: MaskMod, member: Member, q: Ints, k: Ints, lengths: Lengths, block: tuple[int, int], device: torch.device
) -> Iterator[tuple[Bools, Ints, Ints]]:
    """Evaluate these blocks, some at a time; yields their pairs and their numbers. Pairs beyond the lengths are not
    visible."""
    rows, keys = (min(size, n) for size, n in zip(block, lengths, strict=True))
    together = max(1, MAX_CELLS // max(1, rows * keys))
    for start in range(0, len(q), together):
        q_N, k_N = q[start : start + together], k[start : start + together]
        q_NR, k_NT = q_N[:, None] * block[0] + np.arange(rows), k_N[:, None] * block[1] + np.arange(keys)
        inside_NR, inside_NT = q_NR < lengths[0], k_NT < lengths[1]
        indices = (np.minimum(x, n - 1) for x, n in zip((q_NR, k_NT), lengths, strict=True))
        cells_NRT = _evaluate(function, member, *(torch.from_numpy(x).to(device) for x in indices))
        if not (inside_NR.all() and inside_NT.all()):
            cells_NRT = cells_NRT & inside_NR[:, :, None] & inside_NT[:, None, :]
        yield cells_NRT, q_N, k_N


def _hash_function(hashed: hashlib._Hash, function: MaskMod, device: torch.device) -> None:
    """Add the code of a function, the numbers it captured and the values of the tensors it captured."""
    hashed.update(function_digest(function).encode())
    zero = torch.zeros((), dtype=torch.int64, device=device)
    for x in captured_tensors(function, zero, zero, zero, zero):
        values = x.detach().reshape(-1)
        values = values[:: max(1, -(-len(values) // SAMPLED_VALUES))].contiguous().cpu()
        hashed.update(repr((x.dtype, x.shape)).encode())
        hashed.update(values.view(torch.uint8).numpy().tobytes())


# -- cells -------------------------------------------------------------------------------------------------------------


def _any_in_blocks(cells_RT: Bools, block: tuple[int, int]) -> Bools:
    """Return which blocks have a visible pair."""
    pad = [(0, -size % by) for size, by in zip(cells_RT.shape, block, strict=True)]
    padded = np.pad(cells_RT, pad)
    rows, cols = padded.shape[0] // block[0], padded.shape[1] // block[1]
    return np.logical_or.reduce(padded.reshape(rows, block[0], cols, block[1]), axis=(1, 3))


def _runs(cells_RT: Bools, q_R: Ints, first_R: Ints | None = None) -> RowRuns:
    """Return the runs of each row: row i is query ``q_R[i]`` and begins with key ``first_R[i]``, or 0."""
    first_R = np.zeros_like(q_R) if first_R is None else first_R
    begins, ends = cells_RT.copy(), cells_RT.copy()
    begins[:, 1:] &= ~cells_RT[:, :-1]
    ends[:, :-1] &= ~cells_RT[:, 1:]
    width = max(1, cells_RT.shape[1])
    row, start = np.divmod(np.flatnonzero(begins), width)
    return RowRuns(q_R[row], first_R[row] + start, first_R[row] + np.flatnonzero(ends) % width + 1)


def _count(runs: list[RowRuns]) -> int:
    return sum(len(some.q) for some in runs)
