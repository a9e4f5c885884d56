"""What a query takes along when it travels backward: all that its gradient needs, in one row of the queries' own dtype.

::

    | q  D elements | dout  E | out  E | … | lse | dlse |

lse and dlse are wide: in half precision each lies where two elements would. They are at the end of a row whose length is a
multiple of 16 bytes (``Shape.saved_bytes``), so that they are aligned, and q, dout and out can be read where they lie.

Legend: S queries, B batch, H query heads, D head dim, E value dim, W elements of a bundle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.kernels import Saved, accumulation_dtype
from ringspan.plans.shape import saved_bytes


def bundle(saved: Saved) -> Tensor:
    """Of each query and head one row (S, B, H, W). ``saved`` is rows first."""
    q, dout, out, lse, dlse = saved
    d, e = q.shape[-1], out.shape[-1]
    rows = q.new_zeros((*q.shape[:-1], saved_bytes(d, e, q.element_size()) // q.element_size()))
    into = unbundle(rows, d, e)
    for x, given in zip(into, (q, dout, out, lse, dlse), strict=True):
        if given is not None:
            assert x is not None
            x.copy_(given)
    return rows


def unbundle(rows_SBHW: Tensor, d: int, e: int) -> Saved:
    """The parts of the rows, as views, rows first."""
    dtype = accumulation_dtype(rows_SBHW.dtype)
    tail = 2 * torch.finfo(dtype).bits // torch.finfo(rows_SBHW.dtype).bits
    q, dout, out, rest = rows_SBHW.split([d, e, e, rows_SBHW.shape[-1] - d - 2 * e], dim=-1)
    lse, dlse = rest[..., rest.shape[-1] - tail :].view(dtype).unbind(-1)
    return Saved(q, dout, out, lse, dlse)
