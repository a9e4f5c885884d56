"""The interface of a kernel: attention over a list of bands, its gradients, and which inputs it supports.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.kernels.mods import IndexedMods
from ringspan.kernels.partial import Partial
from ringspan.masks import Band


class PartialRows(NamedTuple):
    """The partial result of the queries ``start:stop``: out (B, H, rows, E) and lse (B, H, rows)."""

    start: int
    stop: int
    partial: Partial


class Gradients(NamedTuple):
    """The gradients of the queries ``rows`` and of the keys ``keys`` through some bands: (B, heads, rows, dim) each.

    ``dlearned`` are those of the captured tensors that require a gradient (``Mods.learned``), in the shapes of these.
    """

    rows: slice
    dq_BHSD: Tensor
    keys: slice
    dk_BGTD: Tensor
    dv_BGTE: Tensor
    dlearned: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The properties of a call that decide which kernels support it."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_dim: int
    windows_or_documents: bool = False
    """Whether the mask has sliding windows, or so many documents that a task has many bands."""
    has_mods: bool = False
    """Whether there is a ``score_mod`` or a ``mask_mod``. Only then is a kernel called with ``mods``."""


NO_MODS = "supports neither score_mod nor mask_mod"


class Kernel(Protocol):
    """A kernel is a module with these functions. One that answers :data:`NO_MODS` need not take ``mods``.

    Tensors have any strides, except that the last dim is contiguous.
    """

    PACKAGE: str
    """The package to install. A kernel that is part of PyTorch may omit this and ``is_installed``."""

    def is_installed(self) -> bool:
        """Return whether the package is installed."""

    def unsupported_reason(self, inputs: Inputs) -> str | None:
        """Return None if it supports these inputs, else the reason, as the end of a sentence that starts with its name.

        The answer depends on the inputs and the device alone, not on whether the package is installed.
        """

    def auto_skip_reason(self, inputs: Inputs) -> str | None:
        """Return why ``"auto"`` must not take it although it supports these inputs, or None. A kernel may omit this."""

    def observed_launches(self) -> AbstractContextManager[None]:
        """Return a context in which all work on the device is either an operator of PyTorch or is launched by
        :func:`ringspan.kernels.launches.launch`. Passes of a kernel without this function are not recorded."""

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
        """Yield attention over disjoint bands.

        A query may be in several partial results, or in none if it sees no key. The engine keeps these tensors and
        writes to them: a kernel must return new ones each time.
        """

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
        """Yield the gradients through these bands. A query or key may be in several of them, or in none."""

    def max_logits(
        self, q_BHSD: Tensor, k_BGTD: Tensor, bands: Sequence[Band], *, scale: float, mods: IndexedMods | None = None
    ) -> Tensor:
        """Return the largest score of each head (:mod:`ringspan.kernels.max_logits`). A kernel may omit this."""


def kernel_name(kernel: Kernel) -> str:
    """Return the name of the kernel's module, as in ``backend=``."""
    return str(getattr(kernel, "__name__", kernel)).rpartition(".")[2]


class Saved(NamedTuple):
    """What the backward pass needs of the queries. ``out`` and ``lse`` are final: over all keys of all ranks."""

    q_BHSD: Tensor
    dout_BHSE: Tensor
    out_BHSE: Tensor
    lse_BHS: Tensor
    dlse_BHS: Tensor | None = None

    def rows(self, start: int, stop: int) -> Saved:
        """Return views of the queries ``start:stop``."""
        rows, dlse = slice(start, stop), self.dlse_BHS
        return Saved(
            self.q_BHSD[:, :, rows],
            self.dout_BHSE[:, :, rows],
            self.out_BHSE[:, :, rows],
            self.lse_BHS[:, :, rows],
            None if dlse is None else dlse[:, :, rows],
        )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results of this dtype are accumulated: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def with_dlse_column(dout: Tensor, out: Tensor, v: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Express the gradient of lse as one more value column, for a kernel that takes no such gradient.

    The kernel computes ``dscore = p * (dout · v - sum(dout * out))``, and dlse adds ``p * dlse`` to it. A column with 1
    in dout, -dlse in out and 0 in v has the same effect. dout and out are returned in the dtype of dlse.
    """
    column = dlse.unsqueeze(-1)
    return (
        torch.cat([dout.to(dlse.dtype), torch.ones_like(column)], -1),
        torch.cat([out.to(dlse.dtype), -column], -1),
        F.pad(v, (0, 1)),
    )
