"""A lower bound of the time of a batch of causal documents on a machine, for any packing and layout, and for strategies
that send the keys, the queries or the heads of a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ringspan.costs.hardware import Hardware
from ringspan.costs.plan_cost import flops_per_pair
from ringspan.plans.data import AS_ACCUMULATED, PHASES, DkvDtype
from ringspan.plans.shape import Shape


def least_seconds(
    lengths: Sequence[int],
    world: int,
    tokens_per_rank: int,
    machine: Hardware,
    shape: Shape,
    *,
    token_s: float = 0.0,
    dkv_dtype: DkvDtype = AS_ACCUMULATED,
) -> float:
    """Return a lower bound of the seconds that the slowest rank takes for all documents, forward and backward.

    A rank has at most ``tokens_per_rank`` tokens at a time, and computes ``token_s`` for each besides attention. The
    bound is the mean over all ranks, and the slowest rank takes at least that long:

    1. Matrix products: an equal share of the tokens.
    2. Attention: an equal share of the pairs, at the best speed of the kernels.
    3. Messages between nodes: an equal share of the bytes that must cross, over one port for each rank. Messages within
       nodes and latency are left out.
    4. Merging: an equal share of the rows whose keys are on several ranks (:func:`merged_rows`). Their results are
       merged, and their gradients added, once in each direction at least. This overlaps with nothing.
    5. Attention and messages overlap as well as the machine allows: the time is ``max(a, m) + (1 - overlap) min(a,
       m)``. This function is convex, so its value for the means is not above the mean of its values for ranks and
       steps. Matrix products do not overlap with messages: no strategy sends during them.

    The rows that must cross depend on the time: in more time a node can compute longer documents alone. So the bound is
    the time T at which these figures, with the rows that must cross within T, are just T. It is found by bisection.
    """
    tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    speeds = {"forward": machine.forward.best, "backward": machine.backward.best}
    pair_s = sum(shape.heads * flops_per_pair(shape, phase) / speeds[phase] for phase in PHASES)
    products, attention = tokens * token_s / world, pairs * pair_s / world
    merged_bytes = shape.message_row_bytes("out", "forward", complete=True)
    merged_bytes += shape.message_row_bytes("dq", "backward", complete=True)

    def needed(seconds: float) -> float:
        most_pairs = machine.per_node * seconds / pair_s
        crossing = crossing_bytes(lengths, machine.per_node * tokens_per_rank, most_pairs, shape, dkv_dtype)
        messages = crossing / (world * machine.between.bytes_per_s) if world > machine.per_node else 0.0
        merged = merged_rows(lengths, tokens_per_rank, seconds / pair_s) * merged_bytes if world > 1 else 0
        merging = merged / (world * machine.copy_bytes_per_s)
        return products + merging + max(attention, messages) + (1 - machine.overlap) * min(attention, messages)

    low = products + attention
    high = needed(low) if low else 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) > middle else (low, middle)
    return low


def merged_rows(lengths: Sequence[int], most_tokens: int, most_pairs: float) -> int:
    """Return a lower bound of the rows whose keys are on several ranks, if each rank holds at most so many tokens of a
    document and computes at most so many pairs.

    The results of a row need no merging only if one rank has the row and all keys before it. These rows are the
    beginning of the document on the rank that has its first key. If queries are sent to the keys, the results of the
    other rows come in messages; if heads are exchanged for tokens, those of all rows do. Merging and unpacking take at
    least a copy of the results in the dtype of the tensors.

    >>> merged_rows([8, 3], 5, 1e9)
    3
    """
    alone = min(most_tokens, int((2 * most_pairs + 0.25) ** 0.5 - 0.5))  # n with n (n + 1) / 2 pairs
    return sum(max(n - alone, 0) for n in lengths)


def crossing_bytes(
    lengths: Sequence[int], most_tokens: int, most_pairs: float, shape: Shape, dkv_dtype: DkvDtype = AS_ACCUMULATED
) -> float:
    """Return a lower bound of the bytes that cross between nodes, forward and backward, if each node holds at most so
    many tokens and computes at most so many pairs.

    Take key x of a document whose keys are sent to the queries. The rows from x to the end of the document have more
    tokens or pairs than one node may have, so several nodes share them. All of these see key x, and all but its owner
    receive it, once, since it may be kept for the backward pass. Its gradient is sent back. The same holds with time
    reversed if queries are sent to the keys, and a query takes at least as many bytes. If heads are exchanged for
    tokens instead, all nodes that share the document receive their heads of all rows.

    >>> crossing_bytes([8], 4, 18, Shape(heads=1, kv_heads=1, head_dim=1), "bfloat16") / (2 * 4)  # keys 0 to 5, once
    6.0
    """
    key = shape.message_row_bytes("kv", "forward") + shape.message_row_bytes("dkv", "backward", dkv_dtype=dkv_dtype)
    head_split = shape.message_row_bytes("kv", "forward")
    head_split += shape.message_row_bytes("dkv", "backward", dkv_dtype=dkv_dtype, complete=True)
    head_split += shape.message_row_bytes("q", "forward") + shape.message_row_bytes("dout", "backward")
    total = 0.0
    counts = Counter(lengths)
    for n in counts:
        if n <= most_tokens and n * (n + 1) / 2 <= most_pairs:
            continue
        x = np.arange(n, dtype=np.float64)
        later = (n * (n + 1) - x * (x + 1)) / 2
        nodes = np.ceil(np.maximum((n - x) / most_tokens, later / most_pairs))
        by_keys = key * float((nodes - 1).sum())
        shared = max(n / most_tokens, n * (n + 1) / 2 / most_pairs)
        total += counts[n] * min(by_keys, head_split * n * (1 - 1 / shared))
    return total
