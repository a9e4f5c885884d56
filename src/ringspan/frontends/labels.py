"""What is per document and not per rank: labels for the next token, positions that start again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.errors import InputError
from ringspan.masks.mask import lengths as as_lengths

IGNORED = -100  # what F.cross_entropy leaves out unless told otherwise


def shift_labels(tokens: Tensor, *, documents: Any = None, dim: int = -1, ignore_index: int = IGNORED) -> Tensor:
    """Each token's label: the token after it, in the same document. The last token of a document predicts nothing.

    To be called on whole sequences, before ``cp.shard``: the next token may live on another rank. ``documents`` are their
    lengths, one after the other (None: the sequence is one document). They are not read off a mask, which may fall apart where
    documents do not (``chunked``).

    >>> shift_labels(torch.tensor([[1, 2, 3, 4, 5, 6]]), documents=[2, 3, 1])
    tensor([[   2, -100,    4,    5, -100, -100]])
    """
    if not isinstance(tokens, Tensor):
        raise InputError(f"tokens must be a tensor, not {type(tokens).__name__}: give torch.tensor(tokens)")
    if tokens.ndim == 0:
        raise InputError("tokens must have a sequence dim; got a single number")
    if not -tokens.ndim <= dim < tokens.ndim:
        raise InputError(f"dim={dim} is not a dim of tokens of shape {tuple(tokens.shape)}: give the sequence dim")
    n = tokens.shape[dim]
    ends = torch.from_numpy(np.cumsum(_lengths(documents, n)))
    labels = tokens.roll(-1, dim)
    last = (ends[ends > 0] - 1).to(tokens.device)
    return labels.index_fill(dim, last, ignore_index)


def positions_in(documents: Any, n: int) -> Tensor:
    """Each token's place in its own document.

    >>> positions_in([2, 0, 3], 5)
    tensor([0, 1, 0, 1, 2])
    """
    lengths = _lengths(documents, n)
    starts = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.arange(n) - np.repeat(starts, lengths))


def _lengths(documents: Any, n: int) -> Any:
    lengths = as_lengths("documents", [n] if documents is None else documents)
    total = int(lengths.sum())
    if total != n:
        astray = f"no document has token {total}" if total < n else f"there is no token {n}"
        raise InputError(
            f"the documents have {total} tokens together, but the sequence has {n} ({astray}): give the length of each "
            "document of the whole sequence, padding included"
        )
    return lengths
