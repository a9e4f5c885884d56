"""Convert batches whose rows have different masks to one sequence, the rows laid end to end, and back.

Plans and kernels know the one sequence; tensors of users have a batch dim.

::

    (B, H, S, D)  ──►  (1, H, B·S, D)  ──►  attention under the plan  ──►  (B, H, S, E)

Legend: B rows of the batch, H heads, S tokens of a row (all of them, or those of this rank), D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspan.errors import InputError
from ringspan.kernels import Partial
from ringspan.layouts import Layout
from ringspan.masks import BatchMask, Mask


def rows_of(mask: Mask) -> int | None:
    """Return the number of rows of the batch that a mask is for; None if it is the same for all rows."""
    return len(mask.rows) if isinstance(mask, BatchMask) else None


def refuse_rows(what: str, mask: Mask) -> None:
    """Raise for a function that does not know batches whose rows have masks of their own."""
    rows = rows_of(mask)
    if rows is not None:
        raise InputError(
            f"{what} does not support masks that differ between the {rows} rows of a batch ({mask.name}): use "
            "F.scaled_dot_product_attention, or one sequence with the rows as documents, rs.documents(lengths)"
        )


def attend_rows(attend: Callable[[Tensor, Tensor, Tensor], Partial], q: Tensor, k: Tensor, v: Tensor, rows: int) -> Partial:
    """Compute attention of the rows laid end to end, and return out and lse with a batch dim."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[0] != rows:
            raise InputError(
                f"the mask is for a batch of {rows} rows; {name} is {tuple(x.shape)}, not ({rows}, heads, tokens, dim)"
            )
    out, lse = attend(*(x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v)))
    return Partial(*(y[0].unflatten(1, (rows, q.shape[2])).transpose(0, 1) for y in (out, lse)))


def row_positions(layout: Layout, rank: int, rows: int) -> NDArray[np.int64]:
    """Return the tokens of each row that a rank has, counted within the row: (B, S)."""
    tokens = layout.positions(rank).reshape(rows, -1)
    return tokens - np.arange(rows)[:, None] * (layout.length // rows)


def take_rows(x: Tensor, dim: int, layout: Layout, rank: int, rows: int) -> Tensor:
    """Select a rank's tokens of each row. ``dim`` is the sequence dim; the batch is dim 0."""
    n = layout.length // rows
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != n:
        raise InputError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} does not have the {n} tokens of a row: the mask is for a batch "
            f"of {rows} rows of {n} tokens. Give the sequence dim as dim="
        )
    dim %= x.ndim
    tokens = torch.from_numpy(row_positions(layout, rank, rows)).to(x.device)
    if (tokens == tokens[:1]).all():
        return x.index_select(dim, tokens[0])
    if dim == 0 or x.shape[0] != rows:
        raise InputError(
            f"the rows of the batch have different layouts, so dim 0 must be the {rows} rows of the batch; got {tuple(x.shape)}"
        )
    return torch.stack([row.index_select(dim - 1, mine) for row, mine in zip(x, tokens, strict=True)])


def lay_end_to_end(x: Tensor, dim: int, rows: int, tokens_of_all_rows: int) -> Tensor:
    """Return (B, …, S, …) as (B·S, …)."""
    tokens = tokens_of_all_rows // rows
    if not -x.ndim <= dim < x.ndim or dim % x.ndim == 0 or x.shape[0] != rows or x.shape[dim] != tokens:
        raise InputError(
            f"dim 0 must be the {rows} rows of the batch, and dim={dim} this rank's {tokens} tokens of each row; got "
            f"{tuple(x.shape)}: unshard what cp.shard gave"
        )
    return x.movedim(dim, 1).flatten(0, 1)


def stack_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """Undo :func:`lay_end_to_end`; ``dim`` is that of the tensor with a batch dim."""
    return x.unflatten(0, (rows, len(x) // rows)).movedim(1, dim)
