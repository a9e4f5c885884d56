"""Compare what must be equal on all ranks: sharded tokens, parameters, and layouts.

Comparisons between ranks are made with ``RINGSPAN_DEBUG=1`` only; :func:`check_layout` is local and always made. The
digests of sharded tokens are compared when the next block is entered, which all ranks do, and not in ``cp.shard``,
which a rank may call in another thread.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from ringspan.debugging.settings import settings
from ringspan.errors import InputError, PeerMismatch
from ringspan.frontends.dtensor import is_dtensor
from ringspan.layouts import Layout
from ringspan.planner import Plan
from ringspan.transports import ProcessGroupTransport
from ringspan.user_functions.values import values_digest

# Attributes of the results of cp.shard: the digest of their layout, and its number of ranks. They are plain values, so that
# torch.load(weights_only=True) can read a shard that was saved.
LAYOUT = "_ringspan_layout"
RANKS = "_ringspan_ranks"

# Names of autograd nodes: that of attention, which keeps its plans, and those of functions whose results do not have the
# tokens of their inputs in the same order (cp.unshard, cp.roll and cp.halo, cp.mean and cp.sum).
ATTENTION_NODE = "AttendBackward"
REORDERING = frozenset({"UnshardBackward", "_WindowsBackward", "_SumOfSharesBackward"})
MAX_NODES = 500  # that are searched for attention


# With RINGSPAN_DEBUG=1, the digests of the layouts of cp.shard, cp.positions, cp.route and of the blocks that were entered.
layouts_in_use: set[str] = set()


class TokensOfRanks:
    """The digests of the tokens that a rank has sharded since the last comparison."""

    def __init__(self) -> None:
        self._digests: list[str] = []

    def note(self, x: Tensor) -> None:
        """Note a whole sequence. Only integers count: the others may have been computed with rounding errors."""
        if not x.is_floating_point() and not x.is_complex() and not is_dtensor(x):
            self._digests.append(values_digest([], [x]))

    def compare(self, group: ProcessGroupTransport) -> None:
        """Raise if the ranks have sharded different tokens since the last comparison. A collective call."""
        digests, self._digests = self._digests, []
        if group.world == 1:
            return
        _compare_digests(
            "".join(digests),
            group,
            group.device,
            "the tokens or labels that were sharded differ between ranks {ranks}: all ranks of a sequence need the same whole "
            "batch. Use the same seed, or broadcast it",
        )


def compare_parameters(parameters: Iterable[Tensor], group: ProcessGroupTransport) -> None:
    """Raise if parameters differ between ranks. Those that are DTensors are left out: FSDP shards them."""
    plain = [p for p in parameters if not is_dtensor(p)]
    if plain and group.world > 1:
        digest = "".join([values_digest([], [p.detach()]) for p in plain])
        _compare_digests(
            digest,
            group,
            plain[0].device,
            "parameters differ between ranks {ranks}: all ranks of a sequence need the same ones. Use the same seed when the "
            "model is made, or broadcast them",
        )


def compare_layouts(layout: Layout, group: ProcessGroupTransport, device: torch.device) -> None:
    """Raise if ranks unshard with different layouts."""
    if group.world > 1:
        message = "the ranks {ranks} call unshard with different layouts: use the same cp on all ranks"
        _compare_digests(layout.digest, group, device, message)


def note_layouts(*layouts: Layout) -> None:
    """With RINGSPAN_DEBUG=1, note that this process has tensors of these layouts."""
    if settings.debug:
        layouts_in_use.update([layout.digest for layout in layouts])


def check_in_use(layout: Layout) -> None:
    """Raise if nothing was sharded by a layout: a tensor that is to be unsharded must have come from another one."""
    if layout.digest not in layouts_in_use:
        raise InputError(
            f"nothing was sharded by this layout ({layout.name}) and no block with it was entered, so this tensor has another "
            "one: unshard with the cp that has sharded it, or make both with the same layout="
        )


def mark_layout(shard: Tensor, layout: Layout) -> Tensor:
    """Note on a shard by which layout it was made. Compiled code does not."""
    if not torch.compiler.is_dynamo_compiling():
        setattr(shard, LAYOUT, layout.digest)
        setattr(shard, RANKS, layout.world)
        note_layouts(layout)
    return shard


def is_shard(x: Tensor) -> bool:
    """Return whether x is the result of ``cp.shard`` over several ranks."""
    return getattr(x, RANKS, 1) > 1


def check_layout(x: Tensor, layout: Layout, *, in_graph: bool = False) -> None:
    """Raise if x comes from ``cp.shard`` of a ContextParallel with another layout.

    With ``in_graph``, raise also if x was computed from attention on another layout of a sequence of this length. This
    is read from the autograd graph of x, if it has one.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    if getattr(x, LAYOUT, layout.digest) != layout.digest:
        raise InputError(
            "this tensor was sharded by a ContextParallel with another layout, so unshard would give its tokens in a wrong "
            f"order (this one has {layout.name}): unshard with the cp that has sharded it, or make both with the same layout="
        )
    plan = _nearest_attention(x) if in_graph else None
    if plan is not None and plan.q_layout.length == layout.length and plan.q_layout.digest != layout.digest:
        raise InputError(
            f"this tensor was computed from attention on another layout ({plan.q_layout.name}), so unshard would give its "
            f"tokens in a wrong order (this one has {layout.name}): unshard with the cp whose block the model ran in"
        )


def check_sharded_by(x: Tensor, layouts: tuple[Layout, Layout], local_shape: tuple[int, int]) -> None:
    """Raise if x has this rank's tokens and comes from ``cp.shard`` with a layout other than those of a block.

    ``layouts`` and ``local_shape`` are those of queries and keys.
    """
    digest = getattr(x, LAYOUT, None)
    if digest is None or digest in (layouts[0].digest, layouts[1].digest) or {*local_shape}.isdisjoint(x.shape):
        return
    raise InputError(
        "this tensor was sharded by a ContextParallel with another layout than that of the block, so attention would take its "
        f"tokens for others (the block has {layouts[0].name}): shard with the cp whose block the model runs in"
    )


def _nearest_attention(x: Tensor) -> Plan | None:
    """Return the plan of the attention that is the fewest nodes away in the graph of x, if it is near."""
    queue = deque([x.grad_fn])
    seen = {x.grad_fn}
    while queue and len(seen) < MAX_NODES:
        node = queue.popleft()
        if node is None or node.name() in REORDERING:
            continue
        # A function of the user may have the same name.
        plans = getattr(node, "plans", None) if node.name() == ATTENTION_NODE else None
        if plans and isinstance(plans[0], Plan):
            return plans[0]
        unseen = [source for source, _ in node.next_functions if source not in seen]
        seen.update(unseen)
        queue.extend(unseen)
    return None


def follow_layout(given: Iterable[Tensor], results: Iterable[Tensor], local_shape: tuple[int, int]) -> None:
    """Mark the results of a function with the layout of its inputs, if a dim has the size of ``local_shape``: the
    numbers of queries and keys of this rank."""
    digests = {getattr(x, LAYOUT, None) for x in given} - {None}
    if len(digests) == 1:
        (digest,) = digests
        for x in results:
            if not hasattr(x, LAYOUT) and not {*local_shape}.isdisjoint(x.shape):
                setattr(x, LAYOUT, digest)


def _compare_digests(text: str, group: ProcessGroupTransport, device: torch.device, message: str) -> None:
    number = hash_to_int(text)
    numbers = [n for (n,) in group.all_gather_ints([number], device, label="RINGSPAN_DEBUG=1")]
    differ = [rank for rank, n in enumerate(numbers) if n != numbers[0]]
    if differ:
        raise PeerMismatch(f"rank {group.rank}: " + message.format(ranks=f"0 and {', '.join(map(str, differ))}"))


def hash_to_int(text: str) -> int:
    """Return 62 bits of a digest.

    >>> hash_to_int("a") == hash_to_int("a") != hash_to_int("b")
    True
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2
