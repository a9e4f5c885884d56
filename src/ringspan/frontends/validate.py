"""Checks of the arguments that users give to front ends. A check returns the argument as it is used inside, or
raises."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspan.errors import InputError, MaskError
from ringspan.frontends.dtensor import is_dtensor
from ringspan.masks import Mask
from ringspan.masks import table as tables
from ringspan.masks.cuts import is_crossed
from ringspan.masks.table import K0, K1, Q0, Q1
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
    starts = torch.nonzero(positions == 0).flatten().numpy()
    inside = _starts_inside(mask, starts)
    if len(inside):
        raise InputError(
            f"cp.positions(documents=…): a document starts at token {inside[0]}, but the mask {mask.name} lets tokens see "
            "across that place. Give the documents of the mask, or a mask with these documents"
        )


def check_moved_documents(mask: Mask, lengths: NDArray[np.int64], what: str) -> None:
    """Raise if documents contradict those of the mask: some are cut where it has no boundary, and others cross a
    boundary that it has.

    Documents within those of the mask are allowed, since attention may see across documents (a causal mask over several),
    and so are documents of several of the mask's, since masks have other boundaries, too (``chunked``).
    """
    stops = np.cumsum(lengths)
    inside = _starts_inside(mask, stops[:-1])
    if not len(inside):
        return
    crosses = np.setdiff1d(mask.documents(), np.append(0, stops))
    crosses = crosses[~(_is_padding(mask, crosses - 1) | _is_padding(mask, crosses))]
    if len(crosses):
        raise InputError(
            f"{what}(documents=…): a document starts at token {inside[0]}, where the mask {mask.name} has no boundary, and "
            f"another crosses the boundary of the mask at token {crosses[0]}. Give the documents of the mask, in its order, or "
            "a mask with these documents"
        )


def check_order_of_documents(mask: Mask, lengths: NDArray[np.int64], what: str) -> None:
    """Raise if documents are those of the mask in another order."""
    if mask.predicate is not None or mask.q_len != mask.k_len:
        return
    of_mask = np.diff(mask.documents())
    if not np.array_equal(of_mask, lengths) and np.array_equal(np.sort(of_mask), np.sort(lengths)):
        raise InputError(
            f"{what}(documents=…) has the documents of the mask {mask.name} in another order (rs.pack orders them by length): "
            f"give documents={_shown(of_mask)}, for a part of rs.pack part.lengths"
        )


def _shown(lengths: NDArray[np.int64]) -> str:
    listed = ", ".join(map(str, lengths[:6].tolist()))
    return f"[{listed}{', …' * (len(lengths) > 6)}]"


def _is_padding(mask: Mask, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether these tokens see nothing, and no token sees them."""
    covered = np.zeros(len(tokens), dtype=np.int64)
    for start, stop in ((Q0, Q1), (K0, K1)):
        starts, stops = np.sort(mask.table[:, start]), np.sort(mask.table[:, stop])
        covered += starts.searchsorted(tokens, side="right") - stops.searchsorted(tokens, side="right")
    is_padding: NDArray[np.bool_] = covered == 0
    return is_padding


def _starts_inside(mask: Mask, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of the starts of documents across which the mask lets a token see; none if that is not known."""
    if mask.predicate is not None or mask.q_len != mask.k_len:
        return starts[:0]
    return starts[is_crossed(mask.table, starts)]


def check_moved_tensor(name: str, x: Tensor) -> None:
    """Raise for a tensor whose rows cannot be sent to other ranks as they are."""
    if x.is_nested:
        raise InputError(f"{name} is a nested tensor: give x.values(), and the lengths of its parts as documents=")
    if is_dtensor(x):
        raise InputError(f"{name} is a DTensor: give x.to_local(), and make a DTensor of the result by DTensor.from_local")
    if x.layout != torch.strided:
        raise InputError(f"{name} has the layout {x.layout}: give x.to_dense()")
    if x.is_complex() and x.requires_grad:
        raise InputError(f"gradients of complex tensors are not supported: pass torch.view_as_real({name})")


def check_index(what: str, value: Any) -> int:
    """Return an integer, or raise."""
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{what} must be an integer, not {value!r}") from None


def check_tree(mask: Mask, nodes: TreeNodes, tokens: int) -> None:
    """Raise unless the tree has this many tokens and the mask lets a token see only tokens of its own path."""
    if nodes.tokens != tokens:
        raise InputError(f"the tree has {nodes.tokens} tokens, but the plan's sequence has {tokens}: give the tree of the mask")
    if mask.predicate is not None or mask.q_len != mask.k_len:
        return
    allowed = tree(nodes.stop - nodes.start, nodes.parent)
    if int(tables.area(tables.intersect(mask.table, allowed.table)).sum()) != mask.area:
        raise InputError(
            f"cp.positions(tree=…): the mask {mask.name} lets tokens see other branches of this tree, or later tokens. Give "
            "the tree of the mask, or the mask of this tree: rs.tree(lengths, parents)"
        )
