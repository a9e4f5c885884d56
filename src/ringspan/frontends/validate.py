"""Checks of the arguments that users give to front ends. A check returns the argument as it is used inside, or
raises."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.errors import InputError, MaskError
from ringspan.masks import Mask
from ringspan.masks import table as tables
from ringspan.masks.tree import TreeNodes, tree


def check_mask(mask: Any) -> Mask:
    if not isinstance(mask, Mask):
        raise MaskError(
            f"the mask must be a Mask: rs.causal(n), or rs.full(n) if every query sees every key; got {_kind(mask)}. "
            "A function of indices becomes a mask with rs.mask_mod, a BlockMask with rs.block_mask"
        )
    return mask


def check_scale(scale: Any, head_dim: int) -> float:
    """Return the factor of the scores; None is 1 / √(head dim)."""
    if scale is None:
        return max(1, head_dim) ** -0.5  # a head dim of 0 is refused with the tensors, in a better message
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise InputError(f"scale must be a number, or None for 1 / √(head dim); got {scale!r}") from None


def unequal_heads(query_heads: int, key_heads: int) -> InputError:
    """Return the error of a call whose queries and keys have different numbers of heads, without ``enable_gqa``."""
    return InputError(f"{query_heads} query heads and {key_heads} key heads: pass enable_gqa=True to share key heads")


def check_weights(weights: Any, x: Tensor) -> Tensor:
    """Return one weight for each of the values ``x``."""
    if not isinstance(weights, Tensor):
        raise InputError(f"weights must be a tensor of the shape of the values, {tuple(x.shape)}; got {_kind(weights)}")
    try:
        return weights.detach().to(x.dtype).expand_as(x)
    except RuntimeError:
        raise InputError(
            f"weights of shape {tuple(weights.shape)} do not fit values of shape {tuple(x.shape)}: give one for each value of "
            "this rank, sharded as the values are"
        ) from None


def check_parameters(parameters: Any) -> list[Tensor]:
    """Return parameters as a list, each once: tied weights may be given for both of their modules. Refuses a single
    tensor, although it can be iterated over."""
    if isinstance(parameters, torch.nn.Module):
        raise InputError("sum_gradients takes parameters, not a module: pass module.parameters()")
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise InputError(f"sum_gradients takes a list of parameters, as module.parameters(); got {_kind(parameters)}")
    found = list(parameters)
    for p in found:
        if not isinstance(p, Tensor):
            raise InputError(f"sum_gradients takes parameters, as module.parameters() gives them; among these is {_kind(p)}")
    return [*{id(p): p for p in found}.values()]


def check_tile_tokens(tokens: Any) -> None:
    """Raise unless ``tokens``, the most tokens of a tile, is a positive integer."""
    if not isinstance(tokens, int) or tokens < 1:
        raise InputError(f"tokens must be a positive number, the most tokens of a tile; not {tokens!r}")


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def check_documents(mask: Mask, positions: Tensor) -> None:
    """Raise if the mask lets a token see across the start of a document. ``positions`` are those in the documents."""
    if mask.predicate is not None or mask.q_len != mask.k_len:
        return
    starts = torch.nonzero(positions == 0).flatten().numpy()
    inside = np.setdiff1d(starts, mask.documents())
    if len(inside):
        raise InputError(
            f"positions(documents=…): a document starts at token {inside[0]}, but the mask {mask.name} lets tokens see across "
            "that place. Give the documents of the mask, or a mask with these documents"
        )


def check_tree(mask: Mask, nodes: TreeNodes, tokens: int) -> None:
    """Raise unless the tree has this many tokens and the mask lets a token see only tokens of its own path."""
    if nodes.tokens != tokens:
        raise InputError(f"the tree has {nodes.tokens} tokens, but the plan's sequence has {tokens}: give the tree of the mask")
    if mask.predicate is not None or mask.q_len != mask.k_len:
        return
    allowed = tree(nodes.stop - nodes.start, nodes.parent)
    if int(tables.area(tables.intersect(mask.table, allowed.table)).sum()) != mask.area:
        raise InputError(
            f"positions(tree=…): the mask {mask.name} lets tokens see other branches of this tree, or later tokens. Give the "
            "tree of the mask, or the mask of this tree: rs.tree(lengths, parents)"
        )
