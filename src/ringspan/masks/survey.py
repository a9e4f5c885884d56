"""The cells of a mask_mod: it is called with global indices, some rows at a time, so that memory stays small.

It needs PyTorch, so it is imported only where there is a function to call.

Legend: R rows that are looked at together, T keys, Q and K blocks of queries and keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ringspan.errors import MaskError
from ringspan.masks.predicate import MaskMod, Predicate
from ringspan.masks.runs_to_bands import RowRuns
from ringspan.user_functions.index_reads import inputs_read

# Cells that are looked at together.
MOST_CELLS = 2**24
# RowRuns of seen keys, for each row on average, beyond which a mask is not looked upon as one of bands.
MOST_RUNS = 16


class Survey(NamedTuple):
    """What a function says of all pairs: the blocks that anybody sees, the runs of its rows (None, if these are too many or
    not the same for the whole batch and all heads), and a number that follows from every cell."""

    touched_QK: NDArray[np.bool_]
    runs: RowRuns | None
    fingerprint: str


def survey(
    function: MaskMod, lengths: tuple[int, int], batch: int, heads: int, block: tuple[int, int], device: torch.device
) -> Survey:
    (q_len, k_len), (q_block, k_block) = lengths, block
    touched_QK = np.zeros((-(-q_len // q_block), -(-k_len // k_block)), dtype=np.bool_)
    found = [RowRuns(*np.zeros((3, 0), dtype=np.int64))]
    prints: list[str] = []
    for b in range(batch):
        for h in range(heads):
            hashed = hashlib.sha256()
            for start, cells_RT in strips(function, lengths, b, h, q_block, device):
                hashed.update(np.packbits(cells_RT, axis=1).tobytes())
                of_blocks = _by_blocks(cells_RT, block)
                touched_QK[start // q_block : start // q_block + len(of_blocks)] |= of_blocks
                if not prints and sum(len(runs.q) for runs in found) <= MOST_RUNS * q_len:
                    found.append(_runs(start, cells_RT))
            prints.append(hashed.hexdigest())
    few = sum(len(runs.q) for runs in found) <= MOST_RUNS * q_len
    alike = len(set(prints)) == 1
    together = RowRuns(*map(np.concatenate, zip(*found, strict=True)))
    whole = hashlib.sha256(repr((lengths, prints)).encode()).hexdigest()
    return Survey(touched_QK, together if few and alike else None, whole)


def strips(
    function: MaskMod, lengths: tuple[int, int], b: int, h: int, multiple: int, device: torch.device
) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """The cells of one member of the batch and one head: some rows at a time, a multiple of blocks."""
    q_len, k_len = lengths
    rows = max(1, MOST_CELLS // max(1, k_len) // multiple) * multiple
    of_all = torch.vmap(torch.vmap(function, in_dims=(None, None, None, 0)), in_dims=(None, None, 0, None))
    batch, head = torch.tensor(b, device=device), torch.tensor(h, device=device)
    for start in range(0, q_len if k_len else 0, rows):
        q, k = torch.arange(start, min(start + rows, q_len), device=device), torch.arange(k_len, device=device)
        cells_RT = of_all(batch, head, q, k)
        if cells_RT.dtype != torch.bool:
            raise MaskError(f"a mask_mod says True or False of a pair (torch.bool); this one gave {cells_RT.dtype}")
        yield start, cells_RT.cpu().numpy()


def evaluate(predicate: Predicate, lengths: tuple[int, int], b: int, h: int) -> NDArray[np.bool_]:
    """All cells of one member of the batch and one head, as the functions have them now."""
    device = inputs_read(predicate.mask_mod, lengths).device
    rows = [cells_RT for _, cells_RT in strips(predicate.mask_mod, lengths, b, h, 1, device)]
    return np.concatenate(rows) if rows else np.zeros(lengths, dtype=np.bool_)


def _by_blocks(cells_RT: NDArray[np.bool_], block: tuple[int, int]) -> NDArray[np.bool_]:
    """Which blocks have a cell that is seen."""
    pad = [(0, -size % by) for size, by in zip(cells_RT.shape, block, strict=True)]
    padded = np.pad(cells_RT, pad)
    rows, cols = padded.shape[0] // block[0], padded.shape[1] // block[1]
    return np.logical_or.reduce(padded.reshape(rows, block[0], cols, block[1]), axis=(1, 3))


def _runs(first: int, cells_RT: NDArray[np.bool_]) -> RowRuns:
    edges = np.diff(np.pad(cells_RT, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    q, start = np.nonzero(edges == 1)
    return RowRuns(q + first, start, np.nonzero(edges == -1)[1])
