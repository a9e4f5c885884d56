"""The kernel flex_flash: FlexAttention with its FLASH back end, which compiles functions into FlashAttention-4.

It runs the program of :mod:`ringspan.kernels.flex` with another back end. PyTorch calls it experimental, so it is used
only when named. Two problems are worked around here:

- The gradients of a partial result need out and lse over *all* keys. Autograd saves those of the partial result, and
  the back end takes no gradient of lse by which they could be corrected. So the saved tensors are replaced before the
  backward pass reads them.
- Some releases of PyTorch convert lse from base 2 although it is natural already. The factor is measured once.

Triton computes what the back end cannot, with a warning: gradients of lse, deterministic gradients, and gradients
through ``score_mod`` and ``mask_mod``. The back end does compute the last, but they were found to be wrong where query
heads share key heads (torch 2.11, flash-attn-4 4.0.0b36, on Hopper).

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ringspan.caching.by_digest import cache_by_digest
from ringspan.errors import KernelError
from ringspan.kernels import fa4, flex
from ringspan.kernels.blocks import BLOCK
from ringspan.kernels.kernel import Gradients, Inputs, PartialRows, Saved
from ringspan.kernels.mods import IndexedMods
from ringspan.kernels.partial import Partial, finite_lse
from ringspan.masks import Band, full

PACKAGE = fa4.PACKAGE


def unsupported_reason(inputs: Inputs) -> str | None:
    reason = fa4.unsupported_reason(replace(inputs, has_mods=False)) or flex.unsupported_reason(inputs)
    if reason is None and inputs.head_dim != inputs.v_dim:
        return f"takes values as wide as heads, not {inputs.v_dim} and {inputs.head_dim}"
    return reason


def auto_skip_reason(inputs: Inputs) -> str | None:
    return "is experimental in PyTorch, and used only when named"


def is_installed() -> bool:
    return fa4.is_installed() and flex.is_installed()


def attend(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    mods: IndexedMods | None = None,
) -> Iterator[PartialRows]:
    unit = _lse_unit(q_BHSD.device)
    for start, stop, (out, lse) in flex.attend(q_BHSD, k_BGTD, v_BGTE, bands, scale=scale, mods=mods, flex_backend="FLASH"):
        yield PartialRows(start, stop, Partial(out, lse / unit))


def attend_backward(
    saved: Saved,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    mods: IndexedMods | None = None,
) -> Iterator[Gradients]:
    reason = _unsupported_backward_reason(saved, mods)
    if reason is not None:
        warnings.warn(f'backend="flex_flash": Triton computes these gradients, since {reason}', stacklevel=2)
        return flex.attend_backward(saved, k_BGTD, v_BGTE, bands, scale=scale, mods=mods)
    return flex.attend_backward(saved, k_BGTD, v_BGTE, bands, scale=scale, flex_backend="FLASH", compute_gradients=_gradients)


# The FLASH back end returns no largest scores; Triton computes them.
max_logits = flex.max_logits


def _unsupported_backward_reason(saved: Saved, mods: IndexedMods | None) -> str | None:
    if mods is not None:
        return "those of the FLASH back end through a score_mod or mask_mod are not always correct"
    if saved.dlse_BHS is not None:
        return "the FLASH back end takes no gradient of lse"
    if torch.are_deterministic_algorithms_enabled():
        return "the FLASH back end is not deterministic"
    return None


@cache_by_digest(64, plain=True)
def _lse_unit(device: torch.device) -> float:
    """Return the factor to divide lse by. For queries that are zero, lse must be the log of the number of keys."""
    zeros = torch.zeros(1, 1, BLOCK, 64, dtype=torch.bfloat16, device=device)
    ((_, _, (_, lse)),) = flex.attend(zeros, zeros, zeros, full(BLOCK).bands, scale=1.0, flex_backend="FLASH")
    found = float(lse.mean()) / math.log(BLOCK)
    for unit in (1.0, math.log(2.0), 1 / math.log(2.0)):
        if math.isclose(found, unit, rel_tol=1e-3):
            return unit
    raise KernelError(f'backend="flex_flash": PyTorch {torch.__version__} gives an lse that is {found} times what it should be')


class FinalResult(NamedTuple):
    """Out and lse over all keys, which replace those of the partial result."""

    out_BHSE: Tensor
    lse_BHS: Tensor
    partial_out: list[int]  # the address of the out of the partial result, once it is known; else empty
    outs: set[int]  # addresses of the saved tensors that were replaced
    lses: set[int]


_thread = threading.local()  # .final: the FinalResult for the tensors that this thread saves


def _pack(x: Tensor) -> tuple[Tensor, FinalResult]:
    """Save a tensor for the backward pass, with the final result of its call."""
    return x, _thread.final


def _unpack(packed: tuple[Tensor, FinalResult]) -> Tensor:
    """Return the saved tensor. If it is out or lse, return the final one instead."""
    x, final = packed
    if x.shape == final.out_BHSE.shape and [x.data_ptr()] == final.partial_out:
        final.outs.add(x.data_ptr())
        return torch.empty_like(x).copy_(final.out_BHSE)
    if x.shape == final.lse_BHS.shape and x.dtype == torch.float32:
        final.lses.add(x.data_ptr())
        return torch.empty_like(x).copy_(final.lse_BHS)
    return x


def _gradients(
    compute: Callable[..., Partial], saved: Saved, k_BGTD: Tensor, v_BGTE: Tensor, learned: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Return what :func:`ringspan.kernels.recompute.gradients` does.

    Here the back end reads the final out and lse itself.
    """
    leaves = [x.detach().requires_grad_() for x in (saved.q_BHSD, k_BGTD, v_BGTE)]
    final = FinalResult(saved.out_BHSE, finite_lse(saved.lse_BHS), [], set(), set())
    _thread.final = final
    try:
        with torch.enable_grad(), saved_tensors_hooks(_pack, _unpack):
            out, _ = compute(*leaves)
    finally:
        del _thread.final
    final.partial_out.append(out.data_ptr())
    grads = torch.autograd.grad(out, leaves, saved.dout_BHSE.to(out.dtype), allow_unused=True, materialize_grads=True)
    if (len(final.outs), len(final.lses)) != (1, 1):
        raise KernelError(
            'backend="flex_flash" replaces the one out and the one lse that PyTorch saves for the backward pass, but PyTorch '
            f"{torch.__version__} saved {len(final.outs)} and {len(final.lses)} of them: "
            'use backend="flex"'
        )
    return grads
