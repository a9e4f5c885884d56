"""Layers that treat every token alone, computed tile by tile: the memory of one tile instead of that of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringspan.errors import InputError
from ringspan.frontends.validate import check_tile_tokens


def tiled(function: Callable[..., Any], *tensors: Tensor, tokens: int, dim: int = 1) -> Any:
    """Return ``function(*tensors)``, computed for at most ``tokens`` tokens at a time and computed again in the
    backward pass.

    For functions that treat every token alone: MLPs, norms, projections. ``dim`` is the sequence dim of all tensors and
    of the result, which is a tensor or a tuple of tensors. Of a tile only its inputs are kept, so an MLP needs the
    memory of its hidden units for one tile::

        x   | tile | tile | tile |            forward: each tile in turn, its activations are freed
        mlp(x) on all: 4 × x                  backward: each tile again, with its activations
        mlp(x) tiled:  4 × one tile

    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    >>> x = torch.randn(2, 10, 4)
    >>> torch.allclose(tiled(mlp, x, tokens=4), mlp(x), atol=1e-6)
    True
    """
    if not tensors or not all(isinstance(x, Tensor) and -x.ndim <= dim < x.ndim for x in tensors):
        raise InputError(f"tiled(function, *tensors, tokens=…, dim=…) needs tensors that have dim {dim}")
    lengths = {x.shape[dim] for x in tensors}
    if len(lengths) > 1:
        raise InputError(f"all tensors must have the same number of tokens on dim {dim}; got {sorted(lengths)}")
    check_tile_tokens(tokens)
    results = [
        checkpoint(function, *tile, use_reentrant=False) for tile in zip(*(x.split(tokens, dim) for x in tensors), strict=True)
    ]
    for tile, result in zip(tensors[0].split(tokens, dim), results, strict=True):
        for x in result if isinstance(result, tuple) else (result,):
            if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != tile.shape[dim]:
                raise InputError(f"the function must return a tensor, or a tuple of them, with its tokens on dim {dim}")
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts, dim) for parts in zip(*results, strict=True))
    return torch.cat(results, dim)
