"""FlexAttention by its FLASH back end: PyTorch compiles the functions of the user into FlashAttention-4.

It is the program of :mod:`ringspan.kernels.flex`, asked for another back end. PyTorch calls it experimental, so it is never
chosen unasked. Two things stand between it and the parts of a ring:

- A part's gradients need the out and lse over *all* keys. PyTorch's autograd gives the back end those of the part, and knows no
  way to correct them, since it takes no gradient of lse. So what autograd has saved is exchanged before it is used.
- In some releases lse is taken for one of base 2, and turned into what it already was. What it is of is looked up once.

What the back end cannot do is done by Triton, with a warning: gradients of lse, sums that are the same every time, and
gradients through functions of the user. Those it does compute, but they were found to be wrong where query heads share key
heads (torch 2.11, flash-attn-4 4.0.0b36, on Hopper).

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
    return "is experimental in PyTorch, and there for those who ask for it"


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


def _unsupported_backward_reason(saved: Saved, mods: IndexedMods | None) -> str | None:
    if mods is not None:
        return "those of the FLASH back end through a score_mod or mask_mod are not always right"
    if saved.dlse_BHS is not None:
        return "the FLASH back end takes no gradient of lse"
    if torch.are_deterministic_algorithms_enabled():
        return "the FLASH back end does not add up in the same order every time"
    return None


@cache_by_digest(64, plain=True)
def _lse_unit(device: torch.device) -> float:
    """What lse is to be divided by: of queries that are zero it must be the log of the number of keys."""
    nothing = torch.zeros(1, 1, BLOCK, 64, dtype=torch.bfloat16, device=device)
    ((_, _, (_, lse)),) = flex.attend(nothing, nothing, nothing, full(BLOCK).bands, scale=1.0, flex_backend="FLASH")
    found = float(lse.mean()) / math.log(BLOCK)
    for unit in (1.0, math.log(2.0), 1 / math.log(2.0)):
        if math.isclose(found, unit, rel_tol=1e-3):
            return unit
    raise KernelError(f'backend="flex_flash": PyTorch {torch.__version__} gives an lse that is {found} times what it should be')


class FinalResult(NamedTuple):
    """The out and lse over all keys, to be found in the place of a part's own."""

    out_BHSE: Tensor
    lse_BHS: Tensor
    part: list[int]  # the address of the part's out, once it is known
    outs: set[int]  # addresses of what was exchanged
    lses: set[int]


_thread = threading.local()  # the FinalResult of what this thread is about to save


def _pack(x: Tensor) -> tuple[Tensor, FinalResult]:
    return x, _thread.final


def _unpack(packed: tuple[Tensor, FinalResult]) -> Tensor:
    x, final = packed
    if x.shape == final.out_BHSE.shape and [x.data_ptr()] == final.part:
        final.outs.add(x.data_ptr())
        return torch.empty_like(x).copy_(final.out_BHSE)
    if x.shape == final.lse_BHS.shape and x.dtype == torch.float32:
        final.lses.add(x.data_ptr())
        return torch.empty_like(x).copy_(final.lse_BHS)
    return x


def _gradients(
    part: Callable[..., Partial], saved: Saved, k_BGTD: Tensor, v_BGTE: Tensor, learned: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """As :func:`ringspan.kernels.recompute.gradients`, of a part whose back end reads the final result."""
    leaves = [x.detach().requires_grad_() for x in (saved.q_BHSD, k_BGTD, v_BGTE)]
    final = FinalResult(saved.out_BHSE, finite_lse(saved.lse_BHS), [], set(), set())
    _thread.final = final
    try:
        with torch.enable_grad(), saved_tensors_hooks(_pack, _unpack):
            out, _ = part(*leaves)
    finally:
        del _thread.final
    final.part.append(out.data_ptr())
    grads = torch.autograd.grad(out, leaves, saved.dout_BHSE.to(out.dtype), allow_unused=True, materialize_grads=True)
    if (len(final.outs), len(final.lses)) != (1, 1):
        raise KernelError(
            'backend="flex_flash": out and lse of the whole are to be exchanged for those that PyTorch has saved for the '
            f"backward pass, but {len(final.outs)} and {len(final.lses)} were found where one each should be, in PyTorch "
            f'{torch.__version__}: use backend="flex"'
        )
    return grads
