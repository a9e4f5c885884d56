"""Position ids and targets of this rank's tokens. Methods of ContextParallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.errors import InputError
from ringspan.frontends.batch_rows import refuse_rows, row_positions, rows_of
from ringspan.frontends.labels import check_rows, positions_in
from ringspan.frontends.rank_comparison import note_layouts
from ringspan.frontends.tries import Targets, tree_nodes
from ringspan.frontends.validate import check_documents, check_tree
from ringspan.layouts import Layout
from ringspan.planner import Plan
from ringspan.plans.data import Side


class TokenData:
    """Positions and targets of the tokens of one rank."""

    plan: Plan

    def positions(
        self, of: Side = "q", *, documents: Any = None, tree: Any = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Return the position ids of this rank's tokens, as for rotary embeddings.

        They are positions in the whole sequence or, given a list of the lengths of all ``documents``, in the token's
        own document or, given a ``tree`` (``rs.fold(rows)``, or a pair of lengths and parents), on the path from the
        token's root. If the rows of the batch have masks of their own, the result is (B, tokens), positions are those
        in the row, and ``documents`` is a list for each row. The result is on the CPU unless ``device`` is given.
        """
        layout = self._layout(of)
        note_layouts(layout)
        rows = rows_of(self.plan.mask)
        mine = torch.from_numpy(layout.positions(self.plan.rank))
        if documents is not None and tree is not None:
            raise InputError("positions() takes documents= or tree=, not both: a tree with several roots has several documents")
        if documents is not None:
            of_rows = [documents] if rows is None else check_rows(documents, rows)
            in_documents = torch.cat([positions_in(row, layout.length // (rows or 1)) for row in of_rows])
            check_documents(self.plan.mask, in_documents)
            mine = in_documents[mine]
        elif tree is not None:
            nodes = tree_nodes(tree)
            check_tree(self.plan.mask, nodes, layout.length)
            mine = torch.from_numpy(nodes.positions())[mine]
        elif rows is not None:
            mine = torch.from_numpy(row_positions(layout, self.plan.rank, rows))
        return (mine if rows is None else mine.reshape(rows, -1)).to(device or "cpu")

    def targets(self, targets: Targets, *, of: Side = "q", device: torch.device | str | None = None) -> Targets:
        """Select the targets that this rank's tokens predict. ``token`` then counts this rank's tokens."""
        if not isinstance(targets, Targets):
            raise InputError(f"targets must be those of rs.shift_labels(tree=…); got {type(targets).__name__}")
        refuse_rows("cp.targets", self.plan.mask)
        layout = self._layout(of)
        row = np.full(layout.length, -1)
        mine = layout.positions(self.plan.rank)
        row[mine] = np.arange(len(mine))
        _check_targets(targets)
        token = targets.token.cpu()
        wrong = token[(token < 0) | (token >= layout.length)]
        if len(wrong):
            raise InputError(f"the targets are of token {int(wrong[0])}, but the plan's sequence has {layout.length} tokens")
        local = torch.from_numpy(row)[token]
        chosen = torch.nonzero(local >= 0).flatten()
        parts = (local, targets.target, targets.weight)
        return Targets(*(x[chosen.to(x.device)].to(device or x.device) for x in parts))

    def _layout(self, of: Side) -> Layout:
        if of not in ("q", "kv"):
            raise InputError(f'of must be "q" or "kv", not {of!r}')
        return self.plan.q_layout if of == "q" else self.plan.kv_layout


def _check_targets(targets: Targets) -> None:
    """Raise unless all parts are tensors of one length."""
    if not all(isinstance(part, Tensor) and part.ndim == 1 and len(part) == len(targets.token) for part in targets):
        found = ", ".join(f"{tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__ for part in targets)
        raise InputError(f"token, target and weight of targets must be tensors of one dim and one length; got {found}")
    if targets.token.is_floating_point() or targets.token.is_complex() or targets.token.dtype == torch.bool:
        raise InputError(f"token of targets must be integers, the numbers of tokens; got {targets.token.dtype}")
