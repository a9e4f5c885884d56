"""Trees of shared prefixes: a token sees itself and the tokens before it on the path from its root.

Nodes are runs of tokens, stored in depth-first order: the tokens of a node, then those of its first child with all that
is below it, then those of the second child. The rows of a node and of all nodes below it are therefore contiguous, and
they are the rows that see the keys of the node. So each node is one band::

    lengths [2, 1, 1, 1], parents [-1, 0, 1, 0]

    node 0   x . . . .
             x x . . .        rows 0-4 (all nodes) see the keys 0-1 of node 0
    node 1   x x x . .        rows 2-3 (nodes 1 and 2) see the key 2 of node 1
    node 2   x x x x .
    node 3   x x . . x        row 4 sees the keys of node 0 and its own
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.errors import MaskError
from ringspan.masks import table as tables
from ringspan.masks.mask import Mask, length
from ringspan.masks.mask import lengths as as_lengths
from ringspan.masks.table import MAX_LENGTH

Ints = NDArray[np.int64]


class TreeNodes(NamedTuple):
    """The nodes of a tree in depth-first order. ``depth`` counts the tokens on the path before a node."""

    start: Ints
    stop: Ints
    subtree_stop: Ints
    depth: Ints
    parent: Ints

    @property
    def tokens(self) -> int:
        return int(self.stop[-1]) if len(self.stop) else 0

    def positions(self) -> Ints:
        """Return the position of each token on the path from its root.

        >>> nodes_of([2, 1, 1, 1], [-1, 0, 1, 0]).positions().tolist()
        [0, 1, 2, 3, 2]
        """
        return np.arange(self.tokens) + np.repeat(self.depth - self.start, self.stop - self.start)

    def predecessors(self) -> Ints:
        """Return the token before each token on its path, or -1 for the first token of a path.

        >>> nodes_of([2, 1, 1, 1], [-1, 0, 1, 0]).predecessors().tolist()
        [-1, 0, 1, 2, 1]
        """
        before = np.arange(self.tokens) - 1
        last = np.full(len(self.start), -1)  # the last token of each node, or of the nearest node above that has any
        for node, (parent, start, stop) in enumerate(
            zip(self.parent.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        ):
            above = last[parent] if parent >= 0 else -1
            last[node] = stop - 1 if stop > start else above
            if stop > start:
                before[start] = above
        return before


def tree(lengths: Any, parents: Any, *, left: int | None = None) -> Mask:
    """Make a mask of a tree of shared prefixes: node ``i`` has ``lengths[i]`` tokens and follows node ``parents[i]``.

    A root has the parent -1, and there may be several. Nodes are in depth-first order: each follows its parent, or a
    node below its parent. ``left`` limits how many earlier tokens of its path a token sees. (``& window(left=…)`` would
    count the tokens of other branches, too.)

    >>> print(tree([2, 1, 1, 1], [-1, 0, 1, 0]).ascii())
    x . . . .
    x x . . .
    x x x . .
    x x x x .
    x x . . x
    """
    nodes = nodes_of(lengths, parents)
    far = np.full_like(nodes.start, MAX_LENGTH)
    if left is None:
        bands = np.stack([nodes.start, nodes.subtree_stop, nodes.start, nodes.stop, -far, far * 0], axis=1)
    else:
        bands = _windows(nodes, length("left", left))
    count = len(nodes.start)
    window = "" if left is None else f", left={left}"
    name = f"tree({count} node{'s' * (count != 1)} over {nodes.tokens} tokens{window})"
    return Mask(tables.coalesce(tables.tighten(bands)), nodes.tokens, nodes.tokens, name=name)


def nodes_of(lengths: Any, parents: Any) -> TreeNodes:
    """Return the nodes of a tree, or raise a :class:`MaskError` if they are not in depth-first order."""
    size = as_lengths("lengths", lengths)
    parent = _parents(parents, len(size))
    stop = np.cumsum(size)
    start = stop - size
    depth, subtree_stop = np.zeros_like(start), stop.copy()
    path: list[int] = []  # the node before, and those above it
    for node, above in enumerate(parent.tolist()):
        while path and path[-1] != above:
            subtree_stop[path.pop()] = start[node]
        if above >= 0 and not path:
            raise MaskError(
                f"parents[{node}] is {above}, but nodes must be in depth-first order: the parent of a node is the node "
                "before it, or one above that"
            )
        if above >= 0:
            depth[node] = depth[above] + size[above]
        path.append(node)
    subtree_stop[path] = stop[-1:]
    return TreeNodes(start, stop, subtree_stop, depth, parent)


def _parents(parents: Any, count: int) -> Ints:
    try:
        values = np.asarray(parents.tolist() if hasattr(parents, "tolist") else parents)
    except ValueError:  # lists of different lengths
        values = np.zeros((0, 0))
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        raise MaskError(f"parents must be a list of node numbers, -1 for a root; got {parents!r}")
    if len(values) != count:
        raise MaskError(f"{count} nodes have lengths but {len(values)} have parents: both need one each")
    wrong = np.flatnonzero((values < -1) | (values >= np.arange(count)))
    if len(wrong):
        node = int(wrong[0])
        raise MaskError(f"parents[{node}] must be -1, for a root, or an earlier node; got {values[node]}")
    return values.astype(np.int64)


def _windows(nodes: TreeNodes, left: int) -> tables.Table:
    """Return a band for each node with itself and with each node above it that ``left`` reaches.

    The distance of two tokens on a path is ``k - q``, less the tokens of other branches between them.
    """
    size, place = nodes.stop - nodes.start, nodes.start - nodes.depth
    bands = []
    for node in range(len(size)):
        above = node
        while above >= 0 and nodes.depth[above] + size[above] >= nodes.depth[node] - left:
            lo = place[above] - place[node] - left
            bands.append((nodes.start[node], nodes.stop[node], nodes.start[above], nodes.stop[above], lo, 0))
            above = int(nodes.parent[above])
    return np.array(bands, dtype=np.int64).reshape(-1, 6)
