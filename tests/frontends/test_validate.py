"""What users give, and what is meant by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ringspan as rs
from ringspan.frontends.labels import positions_in
from ringspan.frontends.validate import check_documents, check_scale


@pytest.mark.parametrize(
    ("scale", "head_dim", "meant"),
    [
        (None, 16, 0.25),
        (None, 1, 1.0),
        (None, 0, 1.0),  # refused later, with the tensors
        (0.3, 16, 0.3),
        (-2, 16, -2.0),
        (0, 16, 0.0),
        (np.float32(0.5), 16, 0.5),
        (torch.tensor(0.5), 16, 0.5),
    ],
)
def test_check_scale_returns_the_factor(scale: Any, head_dim: int, meant: float) -> None:
    found = check_scale(scale, head_dim)
    assert (type(found), found) == (float, meant)


@pytest.mark.parametrize("scale", ["x", [1.0], torch.ones(2)])
def test_check_scale_refuses_other_values(scale: Any) -> None:
    with pytest.raises(rs.InputError, match=r"scale must be a number, or None for 1 / √\(head dim\); got"):
        check_scale(scale, 16)


IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([4, 1, 1, 4]))


@pytest.mark.parametrize(
    ("mask", "documents", "start"),
    [
        (rs.documents([4, 6]), [4, 6], None),
        (rs.documents([4, 6]), [10], None),  # the boundaries of a mask need not be those of documents: chunked masks
        (rs.chunked(10, 2), [4, 6], None),
        (rs.documents([4, 6]), [5, 5], 5),
        (rs.causal(10), [4, 6], 4),
        (rs.full(10) & rs.window(left=1, right=0), [4, 6], 4),
        (rs.mask_mod(lambda b, h, q, k: (q * k) % 3 == 0, 10), [4, 6], 4),
        # one band can have several documents of one token: a diagonal
        (rs.mask_mod(lambda b, h, q, k: (IDS[q] == IDS[k]) & (k <= q), 10), [4, 1, 1, 4], None),
        (rs.mask_mod(lambda b, h, q, k: (IDS[q] == IDS[k]) & (k <= q), 10), [4, 1, 2, 3], 7),
        (rs.fold([[1], [2], [3, 4, 5, 6, 7, 8, 9, 10]]).mask(), [1, 1, 8], None),
        (rs.documents([8, 1, 1]) | rs.window(0, 0), [8, 1, 1], None),
        (rs.full(10) & rs.window(0, 0), [1] * 10, None),
        (rs.Mask.from_bands([(0, 4, 0, 4, -9, 0)], 10), [4, 1, 2, 3], None),  # padding that sees nothing
    ],
)
def test_documents_across_which_the_mask_sees_are_refused(mask: rs.Mask, documents: list[int], start: int | None) -> None:
    positions = positions_in(documents, 10)
    if start is None:
        check_documents(mask, positions)
        return
    with pytest.raises(rs.InputError, match=f"a document starts at token {start}, but the mask .* lets tokens see across"):
        check_documents(mask, positions)


# -- tensors of other kinds ----------------------------------------------------------------------------------------------


def nested(*sizes: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(n, 2, 4) for n in sizes], layout=torch.jagged).transpose(1, 2)


@pytest.mark.usefixtures("world_of_one")
def test_nested_tensors_are_refused_by_name() -> None:
    cp, x = rs.ContextParallel(None, rs.causal(8), expect_attention=False), nested(3, 5)
    with pytest.raises(rs.InputError, match=r"q is a nested tensor: .*rs\.documents"):
        cp.attention(x, x, x)
    with pytest.raises(rs.InputError, match="nested tensor cannot be sharded"):
        cp.shard(x, dim=2)
    with cp, pytest.raises(rs.InputError, match="q is a nested tensor"):
        torch.nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.usefixtures("world_of_one")
def test_vmap_is_refused_by_name() -> None:
    cp, x = rs.ContextParallel(None, rs.causal(8), expect_attention=False), torch.randn(3, 1, 2, 8, 4)
    for attend in (lambda x: cp.attention(x, x, x), lambda x: rs.LocalWorld(2).attention(x, x, x, mask=rs.causal(8))):
        with pytest.raises(rs.InputError, match=r"cannot run inside torch\.vmap"):
            torch.vmap(attend)(x)
