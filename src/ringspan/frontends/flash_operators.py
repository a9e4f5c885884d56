"""The two operators of SDPA's flash backend, forward and backward, computed by another implementation.

PyTorch chooses the backend, pads odd head dims, casts under autocast and registers the derivative, all above these
operators. The compiler takes shapes and strides from their meta functions, which are not replaced. So results must have
the strides that the meta functions report: out those of q, each gradient those of its input. Nested tensors have other
operators.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ringspan.errors import KernelError
from ringspan.kernels import Inputs, Saved
from ringspan.kernels.flash_calls import FlashCall, Window
from ringspan.torch_private.attention_operators import SDPA_FLASH_BACKWARD, SDPA_FLASH_FORWARD

# The operator's is_causal is aligned at the bottom right, as in flash attention. SDPA's is aligned at the top left, but
# SDPA calls this operator only if S == T, where both are the same; torch.nn.attention.bias.causal_lower_right calls it
# with any S, T.
ALL = slice(None)
CAUSAL, FULL = (FlashCall(ALL, (ALL,), ALL, Window(left=None, right=right)) for right in (0, None))


class Flash(Protocol):
    """An implementation of flash attention, as a module: ``ringspan.kernels.fa4``."""

    PACKAGE: str  # the package to install
    DISPATCH_KEY: str  # the dispatch key of the devices that it supports

    def is_installed(self) -> bool: ...
    def load(self) -> Any:
        """Import the package. The ``ModuleNotFoundError`` says what to install."""

    def unsupported_reason(self, inputs: Inputs) -> str | None:
        """Return None if it supports these inputs, else the reason, as the end of a sentence that starts with its
        name."""

    def forward(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, call: FlashCall, scale: float, into: Tensor, /
    ) -> tuple[Tensor, Tensor]:
        """Write out (B, S, H, D) to ``into``; return it and lse (B, H, S)."""

    def backward(
        self,
        saved: Saved,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        call: FlashCall,
        scale: float,
        into: tuple[Tensor, Tensor, Tensor],
        /,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write dq, dk and dv to ``into`` and return them. The tensors of ``saved`` have tokens before heads, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashOperators:
    """Kernels for aten's operators, with their arguments."""

    name: str
    flash: Flash

    def by_name(self) -> dict[str, Callable[..., Any]]:
        return {
            SDPA_FLASH_FORWARD: self.forward,
            SDPA_FLASH_BACKWARD: self.backward,
        }

    def forward(
        self,
        q_BHSD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        self._check(q_BHSD, k_BGTD, v_BGTD, dropout_p)
        if return_debug_mask:
            raise KernelError(f"{self.name} gives no debug mask: call with return_debug_mask=False")
        out_BHSD = torch.empty_like(q_BHSD)
        q, k, v, out = (x.transpose(1, 2) for x in (q_BHSD, k_BGTD, v_BGTD, out_BHSD))
        with torch.cuda.device_of(q):  # the tensors need not be on the current device
            _, lse_BHS = self.flash.forward(q, k, v, CAUSAL if is_causal else FULL, _scale(q, scale), out)
        # Only dropout uses the random state and the debug mask.
        seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
        debug_mask = torch.empty(0, dtype=q.dtype, device=q.device)
        return out_BHSD, lse_BHS, None, None, q.shape[1], k.shape[1], seed, offset, debug_mask

    def backward(
        self,
        dout_BHSD: Tensor,
        q_BHSD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        out_BHSD: Tensor,
        lse_BHS: Tensor,
        _cum_seq_q: Tensor | None,
        _cum_seq_k: Tensor | None,
        _max_q: int,
        _max_k: int,
        dropout_p: float,
        is_causal: bool,
        _seed: Tensor,
        _offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._check(q_BHSD, k_BGTD, v_BGTD, dropout_p)
        dq_BHSD, dk_BGTD, dv_BGTD = (torch.empty_like(x) for x in (q_BHSD, k_BGTD, v_BGTD))
        q, dout, out, k, v = (x.transpose(1, 2) for x in (q_BHSD, dout_BHSD, out_BHSD, k_BGTD, v_BGTD))
        into = (dq_BHSD.transpose(1, 2), dk_BGTD.transpose(1, 2), dv_BGTD.transpose(1, 2))
        with torch.cuda.device_of(q):
            saved = Saved(q, dout, out, lse_BHS)
            self.flash.backward(saved, k, v, CAUSAL if is_causal else FULL, _scale(q, scale), into)
        return dq_BHSD, dk_BGTD, dv_BGTD

    def _check(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> None:
        reason = self._why_not(q, k, v, dropout_p)
        if reason:
            raise KernelError(f"{self.name} {reason}. rs.restore() brings back PyTorch's own flash attention")

    def _why_not(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> str | None:
        if dropout_p:
            return f"has no dropout, and dropout_p is {dropout_p}"
        if not q.ndim == k.ndim == v.ndim == 4:
            return f"takes q, k and v of 4 dims (batch, heads, tokens, dim), not of {q.ndim}, {k.ndim} and {v.ndim}"
        if not q.dtype == k.dtype == v.dtype:
            return f"takes q, k and v of one dtype, not {q.dtype}, {k.dtype} and {v.dtype}"
        (b, h, _, d), (_, g, t, _) = q.shape, k.shape
        if k.shape != (b, g, t, d) or v.shape != k.shape or h % g:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            return f"takes q (B, H, S, D), k and v (B, G, T, D) with H a multiple of G, not {shapes}"
        if any(x.stride(-1) != 1 for x in (q, k, v)):
            return f"takes q, k and v with a contiguous last dim, not strides {q.stride()}, {k.stride()} and {v.stride()}"
        return self.flash.unsupported_reason(Inputs(device=q.device, dtype=q.dtype, head_dim=d, v_dim=d))


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale
