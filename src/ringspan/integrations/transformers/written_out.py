"""Attention that a model writes out in its own code, instead of calling ``AttentionInterface``.

Older models compute attention step by step in the layer::

    scores = torch.matmul(query, key.transpose(-1, -2)) / sqrt(head_dim)
    scores = scores + attention_mask
    weights = softmax(scores, dim=-1)
    out = torch.matmul(weights, value)

No rank has the scores of all keys. So while such a layer runs, the first product returns
:class:`~ringspan.integrations.transformers.scores.Scores`, which records the operands and what is done to it. Softmax
turns it into ``Weights``, and the product of these with the values is attention over all ranks. Any other operation
raises: the layer then computes something else than softmax attention under a mask.

Legend: B batch, H heads, S queries, T keys, D head dim, E value dim; S and T are this rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from inspect import Signature, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ringspan.errors import UnplannedAttention
from ringspan.frontends.current_block import current_block
from ringspan.frontends.recompute import was_absent_in_forward
from ringspan.integrations.transformers.alibi import no_slope, slope_of
from ringspan.integrations.transformers.layer_mask import BiasedMask, LayerMask
from ringspan.integrations.transformers.masks import ringspan_mask
from ringspan.integrations.transformers.model_call import documents_of_call, returns_weights
from ringspan.integrations.transformers.packing import refuse_documents
from ringspan.integrations.transformers.refusals import named_refusals, refuse_layer
from ringspan.integrations.transformers.scores import Scores, Weights, unknown_operation

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
    with named_refusals(self, mask.refuse):
        refuse_layer(self, mask.tokens, 0.0, {"output_attentions": given.get("output_attentions") or returns_weights()})
        with mode:
            out = original(self, *args, **kwargs)
        if not mode.was_used:
            raise UnplannedAttention(
                "this layer has computed attention without a matrix product of queries and keys that ringspan knows, over the "
                "tokens of this rank only: it cannot run under context parallelism"
            )
    return out


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
        self.was_used = False
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
        raise unknown_operation(getattr(func, "__name__", str(func)), type(x).__name__)

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
            raise unknown_operation("a mask that is not a causal window", "Scores")
        if size < self.buffer.shape[-1]:
            self.mask = self.mask.narrowed(size)

    def _attend(self, scores: Scores, v: Tensor) -> Tensor:
        if self.needs_mask and not scores.is_masked:
            raise UnplannedAttention("this layer attends without the mask that the model made for it")
        self.was_used = True
        block = self.mask.block_of(self.position_ids, None, None)
        wide = torch.promote_types(scores.q.dtype, v.dtype)  # some layers multiply queries and keys in float32
        q_BHSD, k_BHTD, v_BHTE = (x.reshape(self.batch, -1, *x.shape[-2:]).to(wide) for x in (scores.q, scores.k, v))
        if scores.bias is None:
            if self.needs_slope:
                raise no_slope()
            out_BHSE = block.attention(q_BHSD, k_BHTD, v_BHTE, scale=scores.scale)
        else:
            slope_H = self._slope(scores, q_BHSD.shape[1]).to(torch.promote_types(wide, torch.float32))
            found: Any = block.flex_attention(
                q_BHSD, k_BHTD, v_BHTE, lambda score, b, h, q, k: score + slope_H[h] * (k - q), scale=scores.scale
            )
            out_BHSE = found
        return out_BHSE.reshape(*scores.leading, *out_BHSE.shape[-2:]).to(v.dtype)

    def _slope(self, scores: Scores, heads: int) -> Tensor:
        """Return the slope (H) of the bias, which is that of this rank's keys, or of all if the model got a mask of all."""
        assert scores.bias is not None
        count = scores.bias.shape[-1]
        if count not in (self.mask.local_lengths[1], self.mask.key_tokens):
            raise unknown_operation(f"a bias of {count} keys", "Scores")
        valid_BT = self.mask.valid_keys(count) if scores.counts_padding else None
        slope_H = slope_of(scores.bias.reshape(-1, heads, count), valid_BT)
        if slope_H is None:
            raise unknown_operation("a bias that is not linear in the key, with one slope for each head", "Scores")
        return slope_H * scores.bias_scale


def _operands(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    given = (*args, *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))
    return given[0], given[1], given[2]


def _is_lowest(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 0 and x.item() == torch.finfo(x.dtype).min
