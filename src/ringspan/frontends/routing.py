"""Send documents from the ranks that loaded them to the ranks that compute them. A method of ContextParallel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.engine import RowWindow, window_plan, windows_of_ranks
from ringspan.errors import InputError
from ringspan.frontends.labels import document_lengths
from ringspan.frontends.rank_comparison import note_layouts
from ringspan.frontends.reporting import reports_errors
from ringspan.frontends.token_data import TokenData
from ringspan.frontends.validate import check_moved_tensor, check_order_of_documents
from ringspan.layouts import Layout
from ringspan.plans.data import Side
from ringspan.torch_private.dynamo import dynamo_disable
from ringspan.transports import CallPair, ProcessGroupTransport

# The row of the token itself.
ITSELF = RowWindow(0, 0)


class Routing(TokenData):
    """``route`` of the sequence that is split over the ranks of ``group``."""

    group: ProcessGroupTransport

    @reports_errors("cp.route")
    @dynamo_disable
    def route(self, loaded: Tensor | Sequence[Tensor], *, documents: Any, owners: Sequence[int], of: Side = "q") -> Tensor:
        """Send documents from the ranks that loaded them to the ranks that compute their tokens.

        ``documents`` are the lengths of all documents of the sequence, and ``owners`` the rank that loaded each of
        them, the same on every rank. ``loaded`` holds the documents of this rank in the order of the sequence (that of
        ``part.documents`` for a part of :func:`ringspan.pack`, which is not the order of loading): a list of tensors,
        one for each document, with the tokens on dim 0, or all of them concatenated. The lengths of a list are compared
        with ``documents``. A rank that loaded none gives an empty tensor, as ``torch.empty(0, dtype=torch.int64)``, which
        requires a gradient if those of the other ranks do. The result has this rank's tokens on dim 0, in the order of
        :meth:`positions`. Differentiable.
        """
        layout, rank = self._layout(of), self.plan.rank
        note_layouts(layout)
        lengths = document_lengths(documents, layout.length)
        check_order_of_documents(self.plan.mask, lengths, "cp.route")
        loaders = _ranks(owners, len(lengths), self.group.world)
        source = _loaded_layout(lengths.tolist(), loaders, self.group.world)
        own = [(i, n) for i, (n, loader) in enumerate(zip(lengths.tolist(), loaders, strict=True)) if n and loader == rank]
        rows = _concatenated(loaded, own, rank)
        made = window_plan([layout.length], layout, ITSELF, rank, source)
        features = torch.Size(rows.shape[1:]).numel()
        # Part of what the ranks compare: the shape, and whether there will be a backward pass.
        kind = f"cp.route of {list(rows.shape[1:])}{', differentiable' * (rows.requires_grad and torch.is_grad_enabled())}"
        run = partial(self.group.run, device=rows.device, pair=CallPair())
        (routed,) = windows_of_ranks([made], [rows.reshape(len(rows), features)], ITSELF, run, kind)
        return routed.reshape(len(routed), *rows.shape[1:])


def _ranks(owners: Any, documents: int, world: int) -> list[int]:
    """Return owners as a list of one rank for each document, or raise."""
    try:
        given = np.asarray(list(owners))
    except (TypeError, ValueError):  # not a list, or lists of different lengths
        given = np.zeros((0, 0))
    if given.shape != (documents,) or (len(given) and given.dtype.kind not in "iu"):
        raise InputError(f"owners must be one rank for each of the {documents} documents; got {owners!r:.100}")
    if len(given) and not (given.min() >= 0 and given.max() < world):
        raise InputError(f"owners must be ranks 0 … {world - 1} of the group; got {int(given.min())} … {int(given.max())}")
    ranks: list[int] = given.tolist()
    return ranks


def _loaded_layout(lengths: list[int], owners: list[int], world: int) -> Layout:
    """Return the layout in which each rank has the documents that it owns."""
    spans: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for owner, stop, length in zip(owners, accumulate(lengths), lengths, strict=True):
        if length:
            spans[owner].append((stop - length, stop))
    return Layout(spans, name="loaded")


def _concatenated(loaded: Any, own: list[tuple[int, int]], rank: int) -> Tensor:
    """Return all that a rank has loaded. ``own`` are the number and the length of each of its documents."""
    parts = [loaded] if isinstance(loaded, Tensor) else list(loaded) if hasattr(loaded, "__iter__") else []
    for part in parts:
        if isinstance(part, Tensor):
            check_moved_tensor("loaded", part)
    if not parts or not all(isinstance(part, Tensor) and part.ndim for part in parts):
        raise InputError(
            "loaded must be a tensor, or a list of tensors, with tokens on dim 0. A rank that loaded no document gives an "
            "empty tensor of the dtype that the others give, as torch.empty(0, dtype=torch.int64)"
        )
    _check_order([len(part) for part in parts if len(part)], own, rank)
    shapes = {part.shape[1:] for part in parts if part.numel() or part.ndim > 1}  # torch.cat takes any empty tensor of one dim
    if len(shapes) > 1:
        raise InputError(f"all of loaded must have one shape but for dim 0; got {[tuple(part.shape) for part in parts[:6]]}")
    return torch.cat(parts)


def _check_order(sizes: list[int], own: list[tuple[int, int]], rank: int) -> None:
    """Raise unless the sizes are those of the rank's documents, in their order, or one for all of them together."""
    tokens = sum(length for _, length in own)
    if sum(sizes) != tokens:
        raise InputError(
            f"rank {rank} owns documents of {tokens} tokens together, but loaded {sum(sizes)}: owners= has the rank that "
            "loaded each of documents=, in their order, for a part of rs.pack [loader[i] for i in part.documents]"
        )
    if len(sizes) <= 1 or sizes == [length for _, length in own]:
        return
    i = next(i for i, (size, (_, length)) in enumerate(zip(sizes, own, strict=False)) if size != length)
    document, length = own[i]
    raise InputError(
        f"loaded must have the documents that rank {rank} owns in the order of the sequence, one tensor for each: number {i} "
        f"has {sizes[i]} tokens, but documents[{document}] has {length}. For a part of rs.pack: [docs[i] for i in "
        "part.documents], of those that this rank has loaded"
    )
