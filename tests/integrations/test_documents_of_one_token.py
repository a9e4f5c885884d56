"""Documents of one token that are adjacent: one band of the block's mask, a diagonal, and no neighbours of each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringspan as rs

pytest.importorskip("transformers")

from ringspan.integrations.transformers.convolutions import document_lengths
from ringspan.integrations.transformers.packing import check_positions, check_restarts, refuse_documents

LENGTHS = [4, 1, 1, 1, 3]
IDS = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))
MASK = rs.mask_mod(lambda b, h, q, k: (IDS[q] == IDS[k]) & (k <= q), 10)
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 0, 0, 0, 1, 2]])


def test_convolutions_do_not_cross_them() -> None:
    block: Any = SimpleNamespace(mask=MASK, plan=rs.plan(MASK, world=1))
    assert document_lengths(block, None) == LENGTHS


def test_calls_may_name_them() -> None:
    tokens = torch.arange(10).numpy()
    refuse_documents(torch.tensor([0, 4, 5, 6, 7, 10]), MASK, "a convolution")
    check_restarts(IDS[None], tokens, MASK)
    check_positions(POSITIONS, tokens, MASK, None)
    padding = rs.Mask.from_bands([(0, 4, 0, 4, -10, 0), (4, 10, 4, 10, 0, 0)], 10)  # each token of it sees itself
    for restarts in ([0] * 6, list(range(6))):
        check_positions(torch.tensor([[0, 1, 2, 3, *restarts]]), tokens, padding, None)
