"""Rows that are kept from the forward pass to the backward pass: those of the slots that say so (``Slot.kept``).

The forward pass returns them as a flat tuple, which autograd saves in place of own rows that the backward pass does not
read::

    q, out, lse of each kept query slot, then kv of each kept key slot

Legend: S queries, T keys, B batch, H query heads, G key heads, D head dim, E value dim, F = D + E.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ringspan.kernels import OutputAccumulator
from ringspan.plans import Program, Slot


class KeptQueries(NamedTuple):
    """Queries with their final results, in the dtypes in which their owners have them."""

    q_SBHD: Tensor
    out_SBHE: Tensor
    lse_SBH: Tensor


class KeptRows(NamedTuple):
    """The tensors by the index of their slot."""

    queries: dict[int, KeptQueries]
    keys: dict[int, Tensor]


def kept_tensors(
    program: Program, q_rows: Sequence[Tensor], outputs: Sequence[OutputAccumulator], kv_rows: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return what the slots hold at the end of the forward pass."""
    tensors: list[Tensor] = []
    for n in _kept(program.q_slots):
        out, lse = outputs[n].finish()
        tensors += [q_rows[n], out.to(q_rows[n].dtype), lse]
    return *tensors, *(kv_rows[n] for n in _kept(program.kv_slots))


def count_kept(program: Program) -> int:
    """Return the number of tensors of :func:`kept_tensors`."""
    return 3 * len(_kept(program.q_slots)) + len(_kept(program.kv_slots))


def kept_rows(program: Program, tensors: Sequence[Tensor]) -> KeptRows:
    """Return the tensors of :func:`kept_tensors` by slot."""
    of_queries, of_keys = _kept(program.q_slots), _kept(program.kv_slots)
    queries = {n: KeptQueries(*tensors[3 * i : 3 * i + 3]) for i, n in enumerate(of_queries)}
    return KeptRows(queries, dict(zip(of_keys, tensors[3 * len(of_queries) :], strict=True)))


def _kept(slots: Sequence[Slot]) -> list[int]:
    return [n for n, slot in enumerate(slots) if slot.kept and slot.rows]
