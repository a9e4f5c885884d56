"""Rows that share prefixes, as one sequence: every shared prefix is stored and computed once.

::

    rows  [7, 8, 1, 2]                     7 8 ─┬─ 1 2
          [7, 8, 5]            fold             └─ 5          tokens 7 8 1 2 5, lengths [2, 2, 1], parents [-1, 0, 0]
          [7, 8, 1, 2]        ─────►
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspan.errors import InputError
from ringspan.frontends.validate import check_index
from ringspan.masks import Mask
from ringspan.masks.tree import TreeNodes, nodes_of, tree

Ints = NDArray[np.int64]


class Targets(NamedTuple):
    """What to predict: ``target[i]`` from the output at ``token[i]``, with ``weight[i]``.

    A token after which branches begin occurs once for each of them. The loss of all rows is
    ``(weight * F.cross_entropy(logits[token], target, reduction="none")).sum() / weight.sum()``. Weights with signs, such
    as advantages, can sum to 0: divide the sum by a count that does not depend on them, ``cp.sum(losses * weight) / count``.
    """

    token: Tensor
    target: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trie:
    """The tree of shared prefixes of some rows, as :func:`fold` makes it: ``rs.tree(trie.lengths, trie.parents)``."""

    tokens: Tensor
    """The tokens of all nodes, in depth-first order."""
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    row_spans: tuple[tuple[tuple[int, int], ...], ...]
    """For each row, the spans of ``tokens`` that it consists of, in order."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def __repr__(self) -> str:
        count = sum(stop - start for spans in self.row_spans for start, stop in spans)
        return f"<Trie: {len(self.row_spans)} rows of {count} tokens as {len(self.lengths)} nodes of {len(self)} tokens>"

    def mask(self, *, left: int | None = None) -> Mask:
        """Return the mask of the tree; see :func:`ringspan.tree`."""
        return tree(self.lengths, self.parents, left=left)

    def positions(self) -> Tensor:
        """Return the position of each token on its path, that is, in each row that has it."""
        return torch.from_numpy(nodes_of(self.lengths, self.parents).positions())

    def index(self, row: int) -> Tensor:
        """Return where the tokens of a row are: ``trie.tokens[trie.index(i)]`` is row ``i``."""
        rows = len(self.row_spans)
        if not -rows <= check_index("row", row) < rows:
            raise InputError(f"row must be a number of one of the {rows} rows that were folded, from 0; got {row!r}")
        return torch.from_numpy(_index(self.row_spans[row]))

    def unfold(self, x: Tensor, *, dim: int) -> list[Tensor]:
        """Return the values of each row, from values of all tokens of the tree. Differentiable."""
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != len(self):
            raise InputError(
                f"a tensor of shape {tuple(x.shape)} does not have the {len(self)} tokens of the tree on dim {dim}"
            )
        return [x.index_select(dim, self.index(row).to(x.device)) for row in range(len(self.row_spans))]


def fold(rows: Sequence[Any]) -> Trie:
    """Return the tree of the prefixes that rows of tokens share. Rows are lists, arrays or tensors of token ids.

    Branches are in the order in which the rows first need them.

    >>> trie = fold([[7, 8, 1, 2], [7, 8, 5], [7, 8, 1, 2]])
    >>> trie.tokens.tolist(), trie.lengths, trie.parents
    ([7, 8, 1, 2, 5], (2, 2, 1), (-1, 0, 0))
    >>> trie.index(1).tolist()
    [0, 1, 4]
    """
    root = _Node(np.zeros(0, dtype=np.int64))
    if not hasattr(rows, "__iter__"):
        raise InputError(f"rows must be a list with the token ids of each row; got {type(rows).__name__}")
    checked = [_checked(i, row) for i, row in enumerate(rows)]
    for row in checked:
        root.insert(row)
    nodes, parents = _depth_first(root)
    lengths = [len(node.tokens) for node in nodes]
    for node, start in zip(nodes, np.cumsum([0, *lengths]).tolist(), strict=False):
        node.start = start
    return Trie(
        tokens=torch.from_numpy(np.concatenate([root.tokens, *(node.tokens for node in nodes)])),
        lengths=tuple(lengths),
        parents=tuple(parents),
        row_spans=tuple(tuple(root.spans(row)) for row in checked),
    )


def targets_of(trie: Any, weights: Sequence[Any] | None) -> Targets:
    """Return the targets of all tokens of a tree. See :func:`ringspan.shift_labels`."""
    if not isinstance(trie, Trie):
        raise InputError(f"tree must be a Trie, as rs.fold(rows) makes it; got {type(trie).__name__}")
    before = nodes_of(trie.lengths, trie.parents).predecessors()
    weight = _row_counts(trie) if weights is None else _summed(trie, weights)
    token = torch.from_numpy(np.flatnonzero(before >= 0))
    return Targets(torch.from_numpy(before)[token], trie.tokens[token], weight[token])


def tree_nodes(given: Any) -> TreeNodes:
    """Return the nodes of a ``tree=`` argument: a :class:`Trie`, or a pair of lengths and parents."""
    if isinstance(given, Trie):
        return nodes_of(given.lengths, given.parents)
    if isinstance(given, tuple | list) and len(given) == 2:
        return nodes_of(*given)
    raise InputError(f"tree must be a Trie, as rs.fold(rows) makes it, or a pair (lengths, parents); got {given!r}")


@dataclass(slots=True, eq=False)
class _Node:
    tokens: Ints
    children: dict[int, _Node] = field(default_factory=dict)  # by their first token, in the order of insertion
    start: int = 0

    def insert(self, row: Ints) -> None:
        """Add a row below this node. A node that it leaves in the middle is split there."""
        node, at = self, 0
        while at < len(row):
            child = node.children.get(int(row[at]))
            if child is None:
                node.children[int(row[at])] = _Node(row[at:])
                return
            differs = np.flatnonzero(child.tokens[: len(row) - at] != row[at : at + len(child.tokens)])
            at += int(differs[0]) if len(differs) else len(child.tokens)
            if len(differs):
                child.split(int(differs[0]))
            node = child

    def split(self, at: int) -> None:
        rest = _Node(self.tokens[at:], self.children)
        self.tokens, self.children = self.tokens[:at], {int(rest.tokens[0]): rest}

    def spans(self, row: Ints) -> Iterator[tuple[int, int]]:
        """Yield the spans of the tokens of a row that was inserted before."""
        node, at = self, 0
        while at < len(row):
            node = node.children[int(row[at])]
            count = min(len(node.tokens), len(row) - at)
            yield node.start, node.start + count
            at += count


def _depth_first(root: _Node) -> tuple[list[_Node], list[int]]:
    """Return the nodes below the root, and the index of the parent of each."""
    nodes: list[_Node] = []
    parents: list[int] = []
    waiting = [(child, -1) for child in reversed(root.children.values())]
    while waiting:
        node, parent = waiting.pop()
        waiting += [(child, len(nodes)) for child in reversed(node.children.values())]
        nodes.append(node)
        parents.append(parent)
    return nodes, parents


def _checked(i: int, row: Any) -> Ints:
    values = row.tolist() if hasattr(row, "tolist") else row
    try:
        tokens = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise InputError(f"rows[{i}] must be a list of token ids; got {row!r:.100}") from None
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        if tokens.ndim == 1 and all(type(value) is int for value in values):
            raise InputError(f"rows[{i}] has token ids that do not fit into 64 bits with a sign: {max(values)}")
        raise InputError(f"rows[{i}] must be a list of token ids; got {tokens.dtype} of shape {tokens.shape}")
    if tokens.dtype.kind == "u" and len(tokens) and tokens.max() > np.iinfo(np.int64).max:
        raise InputError(f"rows[{i}] has token ids that do not fit into 64 bits with a sign: {tokens.max()}")
    return tokens.astype(np.int64)


def _index(spans: Sequence[tuple[int, int]]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(*span) for span in spans)])


def _row_counts(trie: Trie) -> Tensor:
    """Return how many rows each token is in."""
    change = torch.zeros(len(trie) + 1)
    for spans in trie.row_spans:
        for start, stop in spans:
            change[start] += 1
            change[stop] -= 1
    return change.cumsum(0)[:-1]


def _summed(trie: Trie, weights: Sequence[Any]) -> Tensor:
    """Return the sum of the weights that the rows give to each token."""
    if not hasattr(weights, "__iter__"):
        raise InputError(f"weights must be a list with the weights of each row; got {type(weights).__name__}")
    given = [_weights_of_row(i, w) for i, w in enumerate(weights)]
    counts = [sum(stop - start for start, stop in spans) for spans in trie.row_spans]
    if [tuple(w.shape) for w in given] != [(n,) for n in counts]:
        raise InputError(
            f"weights must have one number for each token of each row: {len(counts)} rows of {counts[:6]} tokens; got "
            f"{len(given)} of shapes {[tuple(w.shape) for w in given[:6]]}"
        )
    dtype = reduce(torch.promote_types, (w.dtype for w in given), torch.float32)
    total = torch.zeros(len(trie), dtype=dtype)
    for row, w in enumerate(given):
        total.index_add_(0, trie.index(row), w.to("cpu", dtype))
    return total


def _weights_of_row(i: int, given: Any) -> Tensor:
    try:
        weights = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"weights[{i}] must be a number for each token of row {i}; got {given!r:.100}") from None
    if weights.requires_grad:
        raise InputError(f"weights[{i}] requires a gradient, but weights are constants of the loss: give weights.detach()")
    return weights
