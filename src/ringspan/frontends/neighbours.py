"""Layers other than attention that mix tokens: shifts and causal convolutions. Methods of ContextParallel.

The neighbour of a token may be on another rank. Its row is sent by a plan, as keys are for attention.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspan.engine import RowWindow, window_plan, windows_of_ranks
from ringspan.errors import InputError
from ringspan.frontends.batch_rows import refuse_rows
from ringspan.frontends.labels import document_lengths
from ringspan.frontends.rank_comparison import check_layout
from ringspan.frontends.reporting import reports_errors
from ringspan.frontends.token_data import TokenData
from ringspan.frontends.validate import check_index, check_moved_documents, check_moved_tensor
from ringspan.masks.table import MAX_LENGTH
from ringspan.planner import Plan
from ringspan.plans.data import Side
from ringspan.torch_private.dynamo import dynamo_disable
from ringspan.transports import CallPair, ProcessGroupTransport


class Neighbours(TokenData):
    """``roll`` and ``halo`` of the sequence that is split over the ranks of ``group``."""

    group: ProcessGroupTransport

    @reports_errors("cp.roll")
    def roll(self, x: Tensor, shift: int, *, dim: int = 1, documents: Any = None, fill: float = 0, of: Side = "q") -> Tensor:
        """Shift this rank's tokens within the whole sequence: the result at token ``t`` is ``x`` at ``t - shift``.

        ``shift=-1`` gives the next token, as for multi-token prediction, ``shift=1`` the one before. ``documents`` are
        the lengths of the documents (None: the sequence is one document). They may be parts of the documents of the
        mask, or consist of several of them, but not both. Unlike ``torch.roll`` it does not wrap around: where no such
        token is in the document, the result is ``fill``. ``dim`` is the sequence dim. Differentiable.
        """
        window = roll_window(shift, fill)
        return self._windows(x, window, dim, documents, of, "cp.roll").squeeze(dim % x.ndim + 1)

    @reports_errors("cp.halo")
    def halo(
        self, x: Tensor, *, before: int, after: int = 0, dim: int = 1, documents: Any = None, fill: float = 0, of: Side = "q"
    ) -> Tensor:
        """Return each token together with the ``before`` tokens before it and the ``after`` tokens after it.

        The window is a new dim after the sequence dim ``dim``: x (B, S, F) becomes (B, S, before + 1 + after, F), in
        the order of the sequence. Tokens that are not in the document are ``fill``; see :meth:`roll`. A causal
        convolution of width 4 is ``torch.einsum("bswf,wf->bsf", cp.halo(x, before=3), weight)``. Differentiable.
        """
        return self._windows(x, halo_window(before, after, fill), dim, documents, of, "cp.halo")

    def roll_plan(self, shift: int, *, documents: Any = None, of: Side = "q") -> Plan:
        """Return the plan by which :meth:`roll` moves rows."""
        lengths = self._lengths(documents, of, "cp.roll_plan")
        return window_plan(lengths, self._layout(of), roll_window(shift), self.plan.rank)

    def halo_plan(self, *, before: int, after: int = 0, documents: Any = None, of: Side = "q") -> Plan:
        """Return the plan by which :meth:`halo` moves rows."""
        lengths = self._lengths(documents, of, "cp.halo_plan")
        return window_plan(lengths, self._layout(of), halo_window(before, after), self.plan.rank)

    @dynamo_disable
    def _windows(self, x: Tensor, window: RowWindow, dim: int, documents: Any, of: Side, kind: str) -> Tensor:
        lengths = self._lengths(documents, of, kind)
        layout = self._layout(of)
        check_layout(x, layout)
        rows, dim = rows_first(x, dim, layout.counts[self.plan.rank])
        check_fill(window.fill, x.dtype)
        made = window_plan(lengths, layout, window, self.plan.rank)
        run = partial(self.group.run, device=rows.device, pair=CallPair())
        # Part of what the ranks compare: whether there will be a backward pass.
        kind += ", differentiable" * (rows.requires_grad and torch.is_grad_enabled())
        (windows,) = windows_of_ranks([made], [rows], window, run, kind)
        return windows_back(windows, x, dim)

    def _lengths(self, documents: Any, of: Side, what: str) -> NDArray[np.int64]:
        refuse_rows(what, self.plan.mask)
        lengths = document_lengths(documents, self._layout(of).length)
        if documents is not None:
            check_moved_documents(self.plan.mask, lengths, what)
        return lengths


def roll_window(shift: Any, fill: float = 0) -> RowWindow:
    """Return the window of ``roll``: one row, ``shift`` tokens before."""
    offset = -_tokens("shift", shift)
    return RowWindow(offset, offset, fill)


def halo_window(before: Any, after: Any, fill: float = 0) -> RowWindow:
    """Return the window of ``halo``: ``before`` rows, the token's own, and ``after`` rows."""
    first, last = _tokens("before", before), _tokens("after", after)
    if first < 0 or last < 0:
        raise InputError(f"before and after must not be negative; got {before} and {after}")
    return RowWindow(-first, last, fill)


def rows_first(x: Any, dim: int, tokens: int) -> tuple[Tensor, int]:
    """Return x as (tokens, features), and the sequence dim counted from the start."""
    if not isinstance(x, Tensor):
        raise InputError(f"x must be a tensor, of this rank's tokens; got {type(x).__name__}")
    check_moved_tensor("x", x)
    dim = check_index("dim", dim)
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != tokens:
        raise InputError(
            f"a tensor of shape {tuple(x.shape)} does not have this rank's {tokens} tokens on dim {dim}: give what cp.shard "
            "gave, and its sequence dim as dim="
        )
    features = x.numel() // tokens if tokens else torch.Size(n for i, n in enumerate(x.shape) if i != dim % x.ndim).numel()
    return x.movedim(dim, 0).reshape(tokens, features), dim % x.ndim


def check_fill(fill: Any, dtype: torch.dtype) -> None:
    """Raise if a tensor of this dtype cannot hold the fill value as it is."""
    is_real = isinstance(fill, (int, float, np.integer, np.floating))
    is_complex = isinstance(fill, (complex, np.complexfloating))
    if is_real and not dtype.is_floating_point and not dtype.is_complex:
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        fits = low <= fill <= high and int(fill) == fill
    elif is_real or (is_complex and dtype.is_complex):
        largest = torch.finfo(dtype).max  # a finite value beyond it would become infinite
        parts = (fill.real, fill.imag)
        fits = all(abs(part) <= largest or not (isinstance(part, int) or math.isfinite(part)) for part in parts)
    else:
        fits = False
    if not fits:
        advice = ": give fill.item()" if isinstance(fill, Tensor) else ""
        raise InputError(f"fill={fill!r} is not a value of {dtype}, the dtype of x{advice}")


def windows_back(windows_SWF: Tensor, x: Tensor, dim: int) -> Tensor:
    """Return the windows in the shape of x, with the width of the window as a new dim after the sequence dim."""
    others = [n for i, n in enumerate(x.shape) if i != dim]
    return windows_SWF.reshape(*windows_SWF.shape[:2], *others).movedim((0, 1), (dim, dim + 1))


def _tokens(what: str, value: Any) -> int:
    try:
        tokens = operator.index(value)
    except TypeError:
        raise InputError(f"{what} must be an integer number of tokens, not {value!r}") from None
    if abs(tokens) > MAX_LENGTH:
        raise InputError(f"{what} must be at most {MAX_LENGTH} tokens, the longest sequence; got {value!r}")
    return tokens
