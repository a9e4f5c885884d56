"""Cross-entropy of a linear layer over a large vocabulary. The logits of all tokens never exist at once.

The loss is a sum over tokens, so the gradients of hidden states and weights are known, up to the factor that the
backward pass brings, as soon as the logits of a tile are. They are computed in the forward pass, with the logits still
there::

    tile of hidden (T, D) ─► logits (T, V) ─► loss of the tile
                                │
                                └─► softmax − one-hot ─► d hidden of the tile (T, D), and its part of d weight (V, D)

Legend: N tokens, T tokens of a tile, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.errors import InputError
from ringspan.frontends.dtensor import any_dtensor
from ringspan.frontends.validate import check_tile_tokens


def check_cross_entropy(hidden: Any, weight: Any, targets: Any, tokens: Any) -> None:
    if isinstance(weight, torch.nn.Module):
        raise InputError(
            f"weight must be a tensor (V, D), not a module: give layer.weight (there is no bias); got {type(weight).__name__}"
        )
    for name, x in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor; got {type(x).__name__}")
    if any_dtensor(hidden, weight, targets):
        raise InputError("cross_entropy takes plain tensors: with FSDP call it inside the forward of the module of the weight")
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or targets.shape != hidden.shape[:-1]:
        raise InputError(
            f"cross_entropy needs hidden (…, D), weight (V, D) and targets (…); got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise InputError(f"targets must be integers, the index of a row of weight for each token; got {targets.dtype}")
    check_tile_tokens(tokens)


def summed_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, tokens: int) -> Tensor:
    """Return the sum of the losses of this rank's tokens, in at least float32."""
    if not torch.is_grad_enabled():  # ctx.needs_input_grad does not depend on it
        hidden, weight = hidden.detach(), weight.detach()
    try:
        loss: Tensor = _SummedCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), ignore_index, tokens)
    except IndexError as error:  # raised by F.cross_entropy on a CPU; a GPU reports it later, as an assertion of a kernel
        raise InputError(
            f"a target is not in 0 … {len(weight) - 1}, the rows of weight, and not ignore_index={ignore_index} ({error}): "
            "targets that were padded or shifted need ignore_index"
        ) from None
    return loss


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, ignore_index: int, tokens: int) -> Tensor:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dhidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=dtype) if needs_weight else None
        total = torch.zeros((), dtype=dtype, device=hidden_ND.device)
        for start in range(0, len(hidden_ND), tokens):
            tile = slice(start, start + tokens)
            hidden_TD, targets_T = hidden_ND[tile], targets_N[tile]
            logits_TV = (hidden_TD @ weight_VD.T).to(dtype)
            total += F.cross_entropy(logits_TV, targets_T, ignore_index=ignore_index, reduction="sum")
            if dhidden_ND is None and dweight_VD is None:
                continue
            counted_T = targets_T != ignore_index
            dlogits_TV = logits_TV.softmax(-1)
            rows = torch.arange(len(targets_T), device=targets_T.device)
            dlogits_TV[rows, targets_T.where(counted_T, 0)] -= 1
            # Not multiplied by 0: the logits of a token without a label may be NaN.
            dlogits_TV = dlogits_TV.masked_fill_(~counted_T[:, None], 0).to(hidden_ND.dtype)
            if dhidden_ND is not None:
                dhidden_ND[tile] = dlogits_TV @ weight_VD
            if dweight_VD is not None:
                dweight_VD += dlogits_TV.T @ hidden_TD
        ctx.save_for_backward(dhidden_ND, dweight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise InputError("cross_entropy has no second derivatives: use F.cross_entropy")
        (grad,) = grads
        dhidden_ND, dweight_VD = ctx.saved_tensors
        return (
            None if dhidden_ND is None else dhidden_ND * grad.to(dhidden_ND.dtype),
            None if dweight_VD is None else (dweight_VD * grad).to(ctx.weight_dtype),
            None,
            None,
            None,
        )
