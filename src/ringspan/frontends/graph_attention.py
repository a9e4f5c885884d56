"""Find attention that no block has intercepted in the autograd graph of a loss, in strict mode.

A block sees the calls of its own thread that are made while it is open. The graph shows the others: attention outside
of the block, in another thread, or in compiled extensions. Attention inside ``local_attention()`` is meant to be local,
so its nodes are marked.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from ringspan.errors import UnplannedAttention
from ringspan.frontends.handwritten_attention import tensors_in
from ringspan.torch_private.autograd_nodes import metadata_of, output_shapes

# Names of nodes: fused attention of PyTorch and other packages, the softmax of SDPA without a fused kernel, the softmax
# of attention that is written by hand, and the matrix product of its scores.
FUSED = re.compile(r"ScaledDotProduct|SafeSoftmax|attn|attention|fmha", re.IGNORECASE)
SOFTMAX = "SoftmaxBackward0"
PRODUCT = "BmmBackward0"
# How many nodes (a scale, a bias, a mask, reshapes) may be between a softmax and the product of its scores.
MAX_DISTANCE = 12
# The key in the metadata of nodes that are meant to be local.
LOCAL = "ringspan_local_attention"


def check_graph(x: Tensor, local_shape: tuple[int, int], advice: str) -> None:
    """Raise if x was computed from attention over this rank's keys. ``local_shape`` has the numbers of queries and keys
    of this rank. ``advice`` ends the message."""
    if min(local_shape) < 2:
        return
    for node in _nodes([x.grad_fn]):
        if _is_local_attention(node, local_shape):
            raise UnplannedAttention(
                f"the graph of this tensor has attention that no block has intercepted ({node.name()}, of a result of shape "
                f"{output_shapes(node)[0]}): it has seen only the keys of this rank. It was called outside of the block, in "
                "another thread than the one that entered the block, or by code that the block cannot see. Call "
                f"F.scaled_dot_product_attention in the block, {advice}"
            )


def _is_local_attention(node: Node, local_shape: tuple[int, int]) -> bool:
    name = node.name()
    if FUSED.search(name):
        found = any(local_shape[0] in shape for shape in output_shapes(node))
    elif name == SOFTMAX:
        found = output_shapes(node)[0][-2:] == local_shape and any(n.name() == PRODUCT for n in _nodes([node], MAX_DISTANCE))
    else:
        found = False
    return found and LOCAL not in metadata_of(node)


def _nodes(starts: Iterable[Node | None], limit: int | None = None) -> Iterator[Node]:
    """Yield the nodes of a graph, the nearest first, at most ``limit`` of them."""
    queue = deque(node for node in starts if node is not None)
    seen = set(queue)
    count = 0
    while queue and (limit is None or count < limit):
        node = queue.popleft()
        count += 1
        yield node
        unseen = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= unseen
        queue.extend(unseen)


class MarkLocal(TorchFunctionMode):
    """Marks the nodes of all functions that are called while it is open as meant to be local."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_dynamo_compiling():
            outside = {x.grad_fn for x in tensors_in((args, kwargs or {}))} | {None}
            made = [x.grad_fn for x in tensors_in(result)]
            while made:
                node = made.pop()
                if node is not None and node not in outside:
                    outside.add(node)
                    metadata_of(node)[LOCAL] = True
                    made += [source for source, _ in node.next_functions]
        return result
