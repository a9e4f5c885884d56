"""Send documents from the ranks that loaded them to the ranks that compute them. A method of ContextParallel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
        them, the same on every rank. ``loaded`` holds the documents of this rank in the order of the sequence: a list
        of tensors with the tokens on dim 0, or all of them concatenated. A rank that loaded none gives an empty tensor,
        as ``torch.empty(0, dtype=torch.int64)``, which requires a gradient if those of the other ranks do. The result
        has this rank's tokens on dim 0, in the order of :meth:`positions`. Differentiable.
        """
        layout = self._layout(of)
        note_layouts(layout)
        source = loaded_layout(document_lengths(documents, layout.length), owners, self.group.world)
        rows = _concatenated(loaded, source.counts[self.plan.rank], self.plan.rank)
        made = window_plan([layout.length], layout, ITSELF, self.plan.rank, source)
        features = torch.Size(rows.shape[1:]).numel()
        # Part of what the ranks compare: the shape, and whether there will be a backward pass.
        kind = f"cp.route of {list(rows.shape[1:])}{', differentiable' * (rows.requires_grad and torch.is_grad_enabled())}"
        run = partial(self.group.run, device=rows.device, pair=CallPair())
        (routed,) = windows_of_ranks([made], [rows.reshape(len(rows), features)], ITSELF, run, kind)
        return routed.reshape(len(routed), *rows.shape[1:])


def loaded_layout(lengths: Any, owners: Sequence[int], world: int) -> Layout:
    """Return the layout in which each rank has the documents that it owns."""
    try:
        given = np.asarray(list(owners))
    except (TypeError, ValueError):  # not a list, or lists of different lengths
        given = np.zeros((0, 0))
    if given.shape != (len(lengths),) or (len(given) and given.dtype.kind not in "iu"):
        raise InputError(f"owners must be one rank for each of the {len(lengths)} documents; got {owners!r:.100}")
    if len(given) and not (given.min() >= 0 and given.max() < world):
        raise InputError(f"owners must be ranks 0 … {world - 1} of the group; got {int(given.min())} … {int(given.max())}")
    stops = np.cumsum(lengths)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for owner, stop, length in zip(given.tolist(), stops.tolist(), lengths.tolist(), strict=True):
        if length:
            spans[owner].append((stop - length, stop))
    return Layout(spans, name="loaded")


def _concatenated(loaded: Any, tokens: int, rank: int) -> Tensor:
    parts = [loaded] if isinstance(loaded, Tensor) else list(loaded) if hasattr(loaded, "__iter__") else []
    if not parts or not all(isinstance(part, Tensor) and part.ndim for part in parts):
        raise InputError(
            "loaded must be a tensor, or a list of tensors, with tokens on dim 0. A rank that loaded no document gives an "
            "empty tensor of the dtype that the others give, as torch.empty(0, dtype=torch.int64)"
        )
    rows = torch.cat(parts)
    if len(rows) != tokens:
        raise InputError(f"rank {rank} owns documents of {tokens} tokens together, but loaded {len(rows)}")
    return rows
