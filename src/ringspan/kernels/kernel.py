"""What a kernel is: two functions over a list of bands, and a word on whether it can serve.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.kernels.mods import IndexedMods
from ringspan.kernels.partial import Partial
from ringspan.masks import Band


class PartialRows(NamedTuple):
    """A partial result for the queries ``start:stop``; its tensors are (B, H, rows, E) and (B, H, rows)."""

    start: int
    stop: int
    partial: Partial


class Gradients(NamedTuple):
    """What flows through some bands to the queries ``rows`` and to the keys ``keys``: (B, heads, rows, dim) each.

    And to what the functions of a call have captured and learn (``Mods.learned``), each of its own shape.
    """

    rows: slice
    dq_BHSD: Tensor
    keys: slice
    dk_BGTD: Tensor
    dv_BGTE: Tensor
    dlearned: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a kernel may depend on to say whether it can serve."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_dim: int
    windows_or_documents: bool = False
    """Whether there are windows, or many bands at once."""
    has_mods: bool = False
    """Whether functions of the user change scores or hide pairs: only then is a kernel given ``mods``."""


NO_MODS = "knows no score_mod and no mask_mod"


class Kernel(Protocol):
    """A back end. A module with these is one. One that says :data:`NO_MODS` need not take ``mods``.

    Tensors come in any layout, but for their last dim, whose numbers lie side by side.
    """

    PACKAGE: str
    """What to install before it can serve anything. A kernel that comes with PyTorch may leave this and the next out."""

    def is_installed(self) -> bool:
        """Whether that is here."""

    def unsupported_reason(self, inputs: Inputs) -> str | None:
        """None if it can serve these inputs, else the reason, as the end of a sentence that starts with its name.

        Of the inputs alone: it is asked about them whether or not its package is here.
        """

    def auto_skip_reason(self, inputs: Inputs) -> str | None:
        """A reason to let others go first although it can serve, for ``"auto"``. A kernel without one may leave this out."""

    def attend(
        self,
        q_BHSD: Tensor,
        k_BGTD: Tensor,
        v_BGTE: Tensor,
        bands: Sequence[Band],
        *,
        scale: float,
        mods: IndexedMods | None = None,
    ) -> Iterator[PartialRows]:
        """Attend through disjoint bands. Each query may appear in several parts, or in none if it sees nothing."""

    def attend_backward(
        self,
        saved: Saved,
        k_BGTD: Tensor,
        v_BGTE: Tensor,
        bands: Sequence[Band],
        *,
        scale: float,
        mods: IndexedMods | None = None,
    ) -> Iterator[Gradients]:
        """The gradients that flow through these bands. A query or key may appear in several, or in none."""


class Saved(NamedTuple):
    """What the backward pass knows of the queries. ``out`` and ``lse`` are final: over all keys of all ranks."""

    q_BHSD: Tensor
    dout_BHSE: Tensor
    out_BHSE: Tensor
    lse_BHS: Tensor
    dlse_BHS: Tensor | None = None

    def rows(self, start: int, stop: int) -> Saved:
        return Saved(*(None if x is None else x[:, :, start:stop] for x in self))  # type: ignore[arg-type]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of this dtype are accumulated: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def with_dlse_column(dout: Tensor, out: Tensor, v: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Say the gradient of lse in the kernel's own words.

    The kernel knows ``dscore = p * (dout · v - sum(dout * out))``, and what dlse asks for is ``+ p * dlse``. One more
    value column does it: 1 in dout, -dlse in out, 0 in v. dout and out come back as wide as dlse is.
    """
    column = dlse.unsqueeze(-1)
    return (
        torch.cat([dout.to(dlse.dtype), torch.ones_like(column)], -1),
        torch.cat([out.to(dlse.dtype), -column], -1),
        F.pad(v, (0, 1)),
    )
