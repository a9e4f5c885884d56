"""The ``with`` block: PyTorch's own attention calls become context-parallel, by a torch function mode. Nothing is patched.

A mode belongs to the thread that entered it, nests, and is gone when the block is left, by whatever way.
"""

from __future__ import annotations

import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ringspan.errors import InputError, UnplannedAttention
from ringspan.masks import Mask, causal

# Attention by other doors, which would see only this rank's keys: refused by name, with what to do instead.
OTHER_DOORS = {
    "multi_head_attention_forward": "project q, k and v yourself and call F.scaled_dot_product_attention",
    "_native_multi_head_attention": "project q, k and v yourself and call F.scaled_dot_product_attention",
    "_transformer_encoder_layer_fwd": "project q, k and v yourself and call F.scaled_dot_product_attention",
    "flex_attention": "give the mask to ContextParallel as a ringspan mask and call F.scaled_dot_product_attention",
    "flex_attention_backward": "give the mask to ContextParallel as a ringspan mask and call F.scaled_dot_product_attention",
    "_varlen_attn": "give rs.documents(lengths) to ContextParallel and call F.scaled_dot_product_attention",
}

_outside = threading.local()


@contextmanager
def local_attention() -> Iterator[None]:
    """Inside a ``with cp:`` block, attention that is to stay on this rank: layers that are not part of the split sequence."""
    _outside.depth = getattr(_outside, "depth", 0) + 1
    try:
        yield
    finally:
        _outside.depth -= 1


class AttentionCatcher(TorchFunctionMode):
    """Hands every call of attention in the block to :meth:`caught`, but those within ``local_attention()``."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = getattr(_outside, "depth", 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # A graph break in here would leave the rest of the frame with the mode off. Raising makes the compiler run
            # the whole frame as it is, with the mode on, or say that it cannot.
            raise UnplannedAttention("the block cannot be traced: with fullgraph=True, compile what is between attention calls")
        kwargs = kwargs or {}
        if getattr(_outside, "depth", 0) <= self._depth and _is_attention(func):
            return self.caught(func, args, kwargs)
        return func(*args, **kwargs)

    @abstractmethod
    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call of attention. The mode is off in here: calling ``func`` again reaches the block outside."""


class AttentionMode(AttentionCatcher):
    """Hands ``F.scaled_dot_product_attention`` to ``attend(q, k, v, scale=)``, once the plan's mask is surely what is meant."""

    def __init__(self, mask: Mask, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.mask, self.attend = mask, attend
        self._is_causal: bool | None = None

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        name = _name(func)
        instead = OTHER_DOORS.get(name, "call F.scaled_dot_product_attention")
        raise UnplannedAttention(f"{name} would see only the keys of this rank: {instead}, or wrap it in {_WRAP}")

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not torch.is_grad_enabled() and _inside_reentrant_checkpoint():
            raise UnplannedAttention(
                "checkpoint(..., use_reentrant=True) would compute this attention again outside the block: use "
                "checkpoint(..., use_reentrant=False, context_fn=cp.checkpoint_context)"
            )
        if attn_mask is not None:
            raise UnplannedAttention(
                f"this call has an attn_mask of shape {tuple(attn_mask.shape)} that the plan does not know "
                f"(its mask is {self.mask.name}). "
                f"Give the mask to ContextParallel, and call without attn_mask; or wrap the call in {_WRAP}"
            )
        if dropout_p:
            raise UnplannedAttention(
                f"this call has dropout_p={dropout_p}; the ranks cannot drop the same pairs as one process would. Set it to 0"
            )
        if is_causal and not self._mask_is_causal():
            raise UnplannedAttention(
                f"this call says is_causal=True, but the plan's mask {self.mask.name} lets queries see later keys. "
                "Give ContextParallel a mask with & rs.causal(), or call with is_causal=False"
            )
        if query.ndim < 3 or key.ndim != query.ndim or value.ndim != query.ndim:
            raise InputError(
                f"q, k and v must be (..., heads, tokens, dim): got {query.ndim}, {key.ndim} and {value.ndim} dims"
            )
        if query.ndim > 3 and query.shape[-3] != key.shape[-3] and not enable_gqa:
            raise InputError(
                f"{query.shape[-3]} query heads and {key.shape[-3]} key heads: pass enable_gqa=True to share key heads"
            )
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (x.to(dtype) if x.dtype != torch.float64 else x for x in (query, key, value))
        out = self.attend(_four_dims(query), _four_dims(key), _four_dims(value), scale=scale)
        return out.reshape(*query.shape[:-1], value.shape[-1])

    def _mask_is_causal(self) -> bool:
        if self._is_causal is None:
            self._is_causal = (self.mask - causal()).area == 0
        return self._is_causal


_WRAP = "`with rs.local_attention():` if this layer is not part of the split sequence"


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "").split(".")[0]
    return name


def _is_attention(func: Any) -> bool:
    name = _name(func)
    return name in OTHER_DOORS or ("scaled_dot_product" in name and not name.endswith("backward"))


def _inside_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
    return False


def _four_dims(x: Tensor) -> Tensor:
    """(…, heads, tokens, dim) as (batch, heads, tokens, dim)."""
    return x.unsqueeze(1) if x.ndim == 3 else x.flatten(0, -4)
