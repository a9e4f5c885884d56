"""Compare what must be equal on all ranks: sharded tokens, parameters, and layouts.

Comparisons between ranks are made with ``RINGSPAN_DEBUG=1`` only; :func:`check_layout` is local and always made. The
digests of sharded tokens are compared when the next block is entered, which all ranks do, and not in ``cp.shard``,
which a rank may call in another thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from ringspan.errors import InputError, PeerMismatch
from ringspan.frontends.dtensor import is_dtensor
from ringspan.layouts import Layout
from ringspan.transports import ProcessGroupTransport
from ringspan.user_functions.values import values_digest

# An attribute of the results of cp.shard: the digest of their layout.
LAYOUT = "_ringspan_layout"


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


def mark_layout(shard: Tensor, layout: Layout) -> Tensor:
    """Note on a shard by which layout it was made. Compiled code does not."""
    if not torch.compiler.is_dynamo_compiling():
        setattr(shard, LAYOUT, layout.digest)
    return shard


def check_layout(x: Tensor, layout: Layout) -> None:
    """Raise if x comes from ``cp.shard`` of a ContextParallel with another layout."""
    if not torch.compiler.is_dynamo_compiling() and getattr(x, LAYOUT, layout.digest) != layout.digest:
        raise InputError(
            "this tensor was sharded by a ContextParallel with another layout, so unshard would give its tokens in a wrong "
            f"order (this one has {layout.name}): unshard with the cp that has sharded it, or make both with the same layout="
        )


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
