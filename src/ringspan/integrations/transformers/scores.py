"""Scores and weights of attention that a layer writes out, before they are computed.

No rank has the scores of all keys. So :class:`Scores` records the operands of the product and what is done to it: a
scale, the mask, a bias that is linear in the key (ALiBi). Softmax turns it into :class:`Weights`. Any other operation
raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ringspan.errors import UnplannedAttention
from ringspan.integrations.transformers.layer_mask import BiasedMask, LayerMask


class Lazy:
    """The shape and the views of :class:`Scores` and :class:`Weights`: only leading dims can change."""

    leading: tuple[int, ...]
    _source: Tensor
    _lengths: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.leading, *self._lengths))

    @property
    def ndim(self) -> int:
        return len(self.leading) + 2

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return self._source.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *shape: Any) -> Any:
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.shape.numel() // -math.prod(sizes)
        if math.prod(sizes) != self.shape.numel() or tuple(sizes[-2:]) != self._lengths:
            raise unknown_operation(f"view{tuple(shape)}", type(self).__name__)
        return self._with_leading(tuple(sizes[:-2]))

    reshape = view

    def _same(self, *_: Any, **__: Any) -> Any:
        return self

    to = type_as = float = contiguous = _same  # the kernel chooses the precision of softmax

    def _with_leading(self, leading: tuple[int, ...]) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unknown_operation(name, type(self).__name__)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise unknown_operation(getattr(func, "__name__", str(func)), cls.__name__)


@dataclass(frozen=True, kw_only=True)
class Scores(Lazy):
    """The product of queries and keys, times a scale, plus a bias of the keys (..., 1, T) times another, under a mask.

    The bias must be linear in the key, which is checked when attention is computed.
    """

    q: Tensor
    k: Tensor
    leading: tuple[int, ...]
    scale: float = 1.0
    bias: Tensor | None = None
    bias_scale: float = 1.0
    counts_padding: bool = False  # the bias does not count the keys that are padding
    is_masked: bool = False
    hidden: Tensor | None = None  # 1 for the pairs that the layer has set to 0 by its own mask, and lowers next

    @classmethod
    def of(cls, q: Tensor, k_transposed: Tensor) -> Scores:
        return cls(q=q, k=k_transposed.transpose(-1, -2), leading=tuple(q.shape[:-2]))

    @property
    def _source(self) -> Tensor:  # type: ignore[override]
        return self.q

    @property
    def _lengths(self) -> tuple[int, int]:  # type: ignore[override]
        return self.q.shape[-2], self.k.shape[-2]

    def _with_leading(self, leading: tuple[int, ...]) -> Scores:
        return replace(self, leading=leading)

    def times(self, factor: Any) -> Scores:
        """Multiply by a number. Hidden keys stay hidden."""
        if isinstance(factor, Tensor) and (factor.ndim or factor.requires_grad):
            raise unknown_operation("a product with a tensor", "Scores")
        return replace(self, scale=self.scale * float(factor), bias_scale=self.bias_scale * float(factor))

    def plus(self, other: Any) -> Scores:
        """Add the mask of the layer, zeros, or a bias of the keys."""
        if isinstance(other, LayerMask):
            return replace(self, is_masked=True)
        if isinstance(other, BiasedMask):
            # Falcon adds its biases to the mask, for SDPA, and its layers add them to the scores again. They count once,
            # as with SDPA.
            masked = replace(self, is_masked=True)
            if self.bias is None:
                return masked.plus(other.bias)
            if self._has_bias(other.bias):
                return masked
        if isinstance(other, Tensor) and not other.requires_grad:
            if not other.any() or (self.hidden is not None and torch.equal(other < 0, self.hidden.bool())):
                return self
            if self.bias is None and other.ndim >= 3 and other.shape[-2] == 1:
                # Bloom and Falcon count tokens in each row of the batch; the biases of MPT are those of all rows.
                return replace(self, bias=other, bias_scale=1.0, counts_padding=other.ndim == self.ndim)
        raise unknown_operation("a sum with a tensor", "Scores")

    def _has_bias(self, other: Tensor) -> bool:
        """Return whether the bias of these scores is this one, up to rounding to bfloat16."""
        if self.bias is None or self.bias.shape != other.shape:
            return False
        mine = self.bias.double() * self.bias_scale
        return torch.allclose(mine, other.double(), rtol=torch.finfo(torch.bfloat16).eps, atol=0)

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, Tensor) and factor.ndim:
            return torch.mul(cast(Any, self), factor)
        return self.times(factor)

    __rmul__ = __imul__ = __mul__
    __add__ = __radd__ = plus

    def __truediv__(self, factor: Any) -> Scores:
        return self.times(1 / factor)

    def masked_fill(self, mask: Any, value: float) -> Scores:
        if not isinstance(mask, LayerMask):
            raise unknown_operation("masked_fill with another mask than the layer's", "Scores")
        return replace(self, is_masked=True)


@dataclass(frozen=True)
class Weights(Lazy):
    """The softmax of scores."""

    scores: Scores

    @property
    def leading(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.scores.leading

    @property
    def _source(self) -> Tensor:  # type: ignore[override]
        return self.scores.q

    @property
    def _lengths(self) -> tuple[int, int]:  # type: ignore[override]
        return self.scores._lengths

    def _with_leading(self, leading: tuple[int, ...]) -> Weights:
        return Weights(self.scores._with_leading(leading))

    def __matmul__(self, v: Tensor) -> Any:
        return torch.matmul(cast(Any, self), v)


def unknown_operation(operation: str, kind: str) -> UnplannedAttention:
    what = "its scores" if kind == "Scores" else "its weights"
    return UnplannedAttention(
        f"this layer writes attention out, and applies {operation} to {what}. Only softmax attention under the mask of the "
        "model, with a scale or a bias that is linear in the key, can be computed over several ranks"
    )
