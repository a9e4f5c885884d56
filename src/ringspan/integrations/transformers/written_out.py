"""Attention that a model writes out in its own code, instead of calling ``AttentionInterface``.

Older models compute attention step by step in the layer::

    scores = torch.matmul(query, key.transpose(-1, -2)) / sqrt(head_dim)
    scores = scores + attention_mask
    weights = softmax(scores, dim=-1)
    out = torch.matmul(weights, value)

No rank has the scores of all keys. So while such a layer runs, the first product returns :class:`Scores`, which records
the operands and what is done to it: a scale, the mask, a bias that is linear in the key (ALiBi). Softmax turns it into
:class:`Weights`, and the product of these with the values is attention over all ranks. Any other operation raises: the
layer then computes something else than softmax attention under a mask.

Legend: B batch, H heads, S queries, T keys, D head dim, E value dim; S and T are this rank's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from inspect import Signature, signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ringspan.errors import UnplannedAttention
from ringspan.frontends.current_block import current_block
from ringspan.frontends.recompute import was_absent_in_forward
from ringspan.integrations.transformers.alibi import slope_of, slope_of_rows
from ringspan.integrations.transformers.masks import BiasedMask, LayerMask, ringspan_mask
from ringspan.integrations.transformers.model_call import documents_of_call
from ringspan.integrations.transformers.packing import refuse_documents
from ringspan.integrations.transformers.refusals import named_refusals

MATMULS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
BADDBMMS = {torch.baddbmm, Tensor.baddbmm}
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax}
BIASES = ("alibi", "position_bias")  # arguments of layers: ALiBi biases
KEYS = ("key_value_states", "encoder_hidden_states")  # arguments of layers: what the keys of cross-attention are made from


def attention_over_ranks(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a layer that writes attention out. Inside a block it attends over all ranks."""
    bound = _signature(original).bind(self, *args, **kwargs)
    given = bound.arguments
    mask, hidden = given.get("attention_mask"), next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    keys, buffer = next((given[name] for name in KEYS if name in given), None), getattr(self, "bias", None)
    is_made_here = not isinstance(mask, LayerMask | BiasedMask)
    if is_made_here:
        mask = _made_for(self, mask, hidden, keys)
    elif isinstance(mask, BiasedMask):
        mask = mask.mask  # its bias is read where the layer adds it
    if mask is None:
        if _has_biases_twice(given):
            given["alibi"] = torch.zeros_like(given["alibi"])
        return original(*bound.args, **bound.kwargs)
    mode = WrittenOut(
        mask,
        batch=hidden.shape[0],
        position_ids=given.get("position_ids"),
        buffer=buffer,
        needs_mask=not is_made_here or buffer is not None,
        needs_slope=any(given.get(name) is not None for name in BIASES),
    )
    with named_refusals(self, mask.refuse), mode:
        return original(self, *args, **kwargs)


def _has_biases_twice(given: dict[str, Any]) -> bool:
    """Return whether a layer gets ALiBi biases that are in its mask, too.

    Falcon adds them to the mask, for SDPA, and its eager attention adds them again. A prepared model counts them once, as
    SDPA does.
    """
    mask, alibi = given.get("attention_mask"), given.get("alibi")
    return isinstance(mask, Tensor) and mask.is_floating_point() and isinstance(alibi, Tensor) and alibi.ndim == 4


def _made_for(layer: Any, given: Any, hidden: Tensor, keys: Tensor | None) -> LayerMask | None:
    """Return the mask of a layer that has none of the model: causal if it has a buffer of its own, else full.

    None outside a block, and for keys that are not split: every rank has all of them.
    """
    block = current_block()
    if block is None or was_absent_in_forward(block):
        return None
    if keys is not None and keys.shape[1] != block.plan.kv_layout.counts[block.rank]:
        return None
    with named_refusals(layer, block.refuse):
        if given is not None:
            raise UnplannedAttention(
                f"this layer has a mask of shape {tuple(given.shape)} that ringspan did not make: give the mask of the whole "
                "sequence to ContextParallel, not to the model"
            )
        refuse_documents(documents_of_call(), block.mask, "A layer without a mask of the model")
    function = causal_mask_function if keys is None and hasattr(layer, "bias") else bidirectional_mask_function
    count = hidden.shape[1] if keys is None else keys.shape[1]
    found = ringspan_mask(hidden.shape[0], hidden.shape[1], count, mask_function=function)
    return found if isinstance(found, LayerMask) else None


@cache
def _signature(forward: Callable[..., Any]) -> Signature:
    return signature(forward)


class WrittenOut(TorchFunctionMode):
    """Computes attention over all ranks for a layer that multiplies queries, keys and values itself.

    ``buffer`` (1, 1, M, M) is a causal mask or window over M positions that the layer has besides the model's mask. A
    layer that ``needs_mask`` applies the mask to its scores, one that ``needs_slope`` adds ALiBi biases.
    """

    def __init__(
        self,
        mask: LayerMask,
        *,
        batch: int,
        position_ids: Tensor | None,
        buffer: Tensor | None,
        needs_mask: bool = True,
        needs_slope: bool = False,
    ) -> None:
        super().__init__()
        self.mask, self.batch, self.position_ids = mask, batch, position_ids
        self.needs_mask, self.needs_slope = needs_mask, needs_slope
        self.buffer = buffer if buffer is not None and buffer.ndim == 4 else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, Scores | Weights) for x in (*args, *kwargs.values())):
            return self._on_lazy(func, args, kwargs)
        if func in MATMULS and self._are_scores(*args):
            return Scores.of(args[0], args[1])
        if func in BADDBMMS:
            bias, q, k_transposed = _operands(args, kwargs)
            if self._are_scores(q, k_transposed):
                alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
                return Scores.of(q, k_transposed).times(alpha).plus(bias if beta == 1 else beta * bias)
        return func(*args, **kwargs)

    def _are_scores(self, a: Tensor, b: Tensor) -> bool:
        """Return whether a product has a row for each query and a column for each key of this rank."""
        if not (a.ndim == b.ndim >= 3 and (a.shape[-2], b.shape[-1]) == self.mask.local_lengths):
            return False
        return a.shape[:-2] == b.shape[:-2] or (a.ndim == 4 and a.shape[0] == b.shape[0] and b.shape[1] == 1)

    def _on_lazy(self, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs["input"]
        if isinstance(x, Scores):
            if func in SOFTMAXES and kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, x.ndim - 1):
                return Weights(x)
            if func in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__) and self._is_buffer(args[1]):
                self._apply_buffer()
                return replace(x, is_masked=True, hidden=1 - args[1])
            if func in (torch.max, torch.maximum) and _is_lowest(args[1]):  # the lowest number is that of a hidden key
                return x
        if func is torch.where and isinstance(args[1], Scores) and self._is_buffer(x) and _is_lowest(args[2]):
            self._apply_buffer()
            return args[1]
        if isinstance(x, Weights):
            if func is F.dropout and not (kwargs.get("training", True) and kwargs.get("p", 0.5)):
                return x
            if func in MATMULS:
                return self._attend(x.scores, args[1])
        raise _unknown(getattr(func, "__name__", str(func)), type(x).__name__)

    def _is_buffer(self, x: Any) -> bool:
        """Return whether a tensor is a part of the layer's own mask: of its first rows and columns."""
        if self.buffer is None or not isinstance(x, Tensor) or x.ndim != 4 or x.shape[-2:] != self.mask.local_lengths:
            return False
        return torch.equal(x.bool(), self.buffer[..., : x.shape[-2], : x.shape[-1]].bool())

    def _apply_buffer(self) -> None:
        """Intersect the mask with the layer's own: causal, or a window of as many keys as its last row shows."""
        assert self.buffer is not None
        size = int(self.buffer[0, 0, -1].count_nonzero())
        if not self.buffer[0, 0, -1, -size:].all() or self.buffer[0, 0].triu(1).any():
            raise _unknown("a mask that is not a causal window", "Scores")
        if size < self.buffer.shape[-1]:
            self.mask = self.mask.narrowed(size)

    def _attend(self, scores: Scores, v: Tensor) -> Tensor:
        if self.needs_mask and not scores.is_masked:
            raise UnplannedAttention("this layer attends without the mask that the model made for it")
        if self.needs_slope and scores.slope is None:
            raise UnplannedAttention(
                "this layer has ALiBi biases, but this rank has only padding or a single token, whose biases are 0 for any "
                "slope. Give every rank several tokens that are no padding"
            )
        block = self.mask.block_of(self.position_ids, None, None)
        wide = torch.promote_types(scores.q.dtype, v.dtype)  # some layers multiply queries and keys in float32
        q_BHSD, k_BHTD, v_BHTE = (x.reshape(self.batch, -1, *x.shape[-2:]).to(wide) for x in (scores.q, scores.k, v))
        if scores.slope is None:
            out_BHSE = block.attention(q_BHSD, k_BHTD, v_BHTE, scale=scores.scale)
        else:
            if self.mask.has_gaps:
                raise UnplannedAttention(
                    "this layer has ALiBi biases, which do not count padding, and the batch has padding between the tokens of "
                    "a row"
                )
            slope_H = slope_of_rows(scores.slope.reshape(-1, q_BHSD.shape[1]))
            if slope_H is None:
                raise _unknown("a bias with another slope for each row of the batch", "Scores")
            slope_H = slope_H.to(torch.promote_types(wide, torch.float32))
            found: Any = block.flex_attention(
                q_BHSD, k_BHTD, v_BHTE, lambda score, b, h, q, k: score + slope_H[h] * k, scale=scores.scale
            )
            out_BHSE = found
        return out_BHSE.reshape(*scores.leading, *out_BHSE.shape[-2:]).to(v.dtype)


class _Lazy:
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
            raise _unknown(f"view{tuple(shape)}", type(self).__name__)
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
        raise _unknown(name, type(self).__name__)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _unknown(getattr(func, "__name__", str(func)), cls.__name__)


@dataclass(frozen=True, kw_only=True)
class Scores(_Lazy):
    """The product of queries and keys, times a scale, plus a bias of ``slope`` × the key's position, under a mask."""

    q: Tensor
    k: Tensor
    leading: tuple[int, ...]
    scale: float = 1.0
    slope: Tensor | None = None
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
            raise _unknown("a product with a tensor", "Scores")
        return replace(self, scale=self.scale * float(factor), slope=None if self.slope is None else self.slope * factor)

    def plus(self, other: Any) -> Scores:
        """Add the mask of the layer, zeros, or a bias that is linear in the key."""
        if isinstance(other, LayerMask):
            return replace(self, is_masked=True)
        if isinstance(other, BiasedMask):
            # Falcon adds its biases to the mask, for SDPA, and its layers add them to the scores again. They count once,
            # as with SDPA.
            masked = replace(self, is_masked=True)
            if self.slope is None:
                return masked.plus(other.bias)
            slope = slope_of(other.bias)
            if slope is not None and torch.allclose(slope, self.slope, rtol=torch.finfo(torch.bfloat16).eps, atol=0):
                return masked
        if isinstance(other, Tensor) and not other.requires_grad:
            if not other.any() or (self.hidden is not None and torch.equal(other < 0, self.hidden.bool())):
                return self
            if self.slope is None and other.ndim >= 3 and other.shape[-2:] == (1, self._lengths[1]):
                slope = slope_of(other)
                if slope is None:
                    raise _unknown("a bias that is not linear in the key", "Scores")
                return replace(self, slope=slope)
        raise _unknown("a sum with a tensor", "Scores")

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
            raise _unknown("masked_fill with another mask than the layer's", "Scores")
        return replace(self, is_masked=True)


@dataclass(frozen=True)
class Weights(_Lazy):
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


def _operands(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    given = (*args, *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))
    return given[0], given[1], given[2]


def _is_lowest(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 0 and x.item() == torch.finfo(x.dtype).min


def _unknown(operation: str, kind: str) -> UnplannedAttention:
    what = "its scores" if kind == "Scores" else "its weights"
    return UnplannedAttention(
        f"this layer writes attention out, and applies {operation} to {what}. Only softmax attention under the mask of the "
        "model, with a scale or a bias that is linear in the key, can be computed over several ranks"
    )
