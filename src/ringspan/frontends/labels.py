"""Labels and positions within documents and trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspan.errors import InputError
from ringspan.frontends.rank_comparison import is_shard
from ringspan.frontends.tries import Targets, Trie, targets_of
from ringspan.masks.mask import lengths as as_lengths

IGNORED = -100  # the default ignore_index of F.cross_entropy


@overload
def shift_labels(tokens: Tensor, *, documents: Any = None, dim: int = -1, ignore_index: int = IGNORED) -> Tensor: ...


@overload
def shift_labels(*, tree: Trie, weights: Sequence[Any] | None = None) -> Targets: ...


def shift_labels(
    tokens: Tensor | None = None,
    *,
    documents: Any = None,
    dim: int = -1,
    ignore_index: int = IGNORED,
    tree: Trie | None = None,
    weights: Sequence[Any] | None = None,
) -> Tensor | Targets:
    """Return the label of each token: the next token of the same document, or ``ignore_index`` for the last token of a
    document.

    Call it on whole sequences, before ``cp.shard``: the next token may be on another rank. ``documents`` are the
    lengths of the documents in order (None: the sequence is one document), or a list of them for each row of dim 0.
    They are not taken from a mask, since masks have other boundaries, too (``chunked``).

    >>> shift_labels(torch.tensor([[1, 2, 3, 4, 5, 6]]), documents=[2, 3, 1])
    tensor([[   2, -100,    4,    5, -100, -100]])

    In a ``tree`` of shared prefixes (:func:`ringspan.fold`) a token can have several next tokens, so the result is
    :class:`ringspan.Targets`: pairs of a token and a target, with a weight. The weight is the number of rows that
    contain the pair or, given ``weights`` for the tokens of each row, the sum of the weights that these rows give to
    the target. ``cp.targets`` selects those of a rank.

    >>> from ringspan import fold
    >>> shift_labels(tree=fold([[7, 8, 1], [7, 8, 5], [7, 8, 1]]))
    Targets(token=tensor([0, 1, 1]), target=tensor([8, 1, 5]), weight=tensor([3., 2., 1.]))
    """
    if tree is not None:
        if tokens is not None or documents is not None:
            raise InputError("shift_labels(tree=…) takes its tokens from the tree: give neither tokens nor documents")
        return targets_of(tree, weights)
    if weights is not None:
        raise InputError("weights are for shift_labels(tree=…): multiply the losses of plain sequences by theirs")
    if not isinstance(tokens, Tensor):
        raise InputError(f"tokens must be a tensor, not {type(tokens).__name__}: give torch.tensor(tokens)")
    if is_shard(tokens):
        raise InputError(
            "these tokens are sharded, and the label of the last token of a span is on another rank: call rs.shift_labels on "
            "the whole sequence, then cp.shard(tokens, labels, dim=...)"
        )
    if tokens.ndim == 0:
        raise InputError("tokens must have a sequence dim; got a single number")
    if not -tokens.ndim <= dim < tokens.ndim:
        raise InputError(f"dim={dim} is not a dim of tokens of shape {tuple(tokens.shape)}: give the sequence dim")
    if isinstance(documents, list | tuple) and documents and all(isinstance(row, list | tuple) for row in documents):
        if dim % tokens.ndim == 0:
            raise InputError("documents of each row need a batch dim: dim 0 is the rows, dim the tokens")
        pairs = zip(tokens, check_rows(documents, len(tokens)), strict=True)
        inner = dim if dim < 0 else dim - 1
        return torch.stack([shift_labels(row, documents=of, dim=inner, ignore_index=ignore_index) for row, of in pairs])
    n = tokens.shape[dim]
    ends = torch.from_numpy(np.cumsum(document_lengths(documents, n)))
    labels = tokens.roll(-1, dim)
    last = (ends[ends > 0] - 1).to(tokens.device)
    return labels.index_fill(dim, last, ignore_index)


def check_rows(documents: Any, rows: int) -> Any:
    """Return the documents of each row of a batch, or raise if there is not one list for each row."""
    if not isinstance(documents, list | tuple) or not all(isinstance(row, list | tuple) for row in documents):
        raise InputError(f"the mask is for a batch of {rows} rows: give a list of lengths for each row, not {documents!r}")
    if len(documents) != rows:
        raise InputError(f"the batch has {rows} rows, but there are documents of {len(documents)}")
    return documents


def positions_in(documents: Any, n: int) -> Tensor:
    """Return the position of each token in its own document.

    >>> positions_in([2, 0, 3], 5)
    tensor([0, 1, 0, 1, 2])
    """
    lengths = document_lengths(documents, n)
    starts = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.arange(n) - np.repeat(starts, lengths))


def document_lengths(documents: Any, n: int) -> NDArray[np.int64]:
    """Return the lengths of the documents of a sequence of ``n`` tokens; None is one document."""
    lengths = as_lengths("documents", [n] if documents is None else documents)
    total = int(lengths.sum())
    if total != n:
        extra = f"token {total} is in no document" if total < n else f"there is no token {n}"
        raise InputError(
            f"the documents have {total} tokens together, but the sequence has {n} ({extra}): give the length of each "
            "document of the whole sequence, padding included"
        )
    return lengths
