"""Wrong arguments of trees, tries, packing, routing and windows: errors that name the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ringspan as rs

BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "tree, ragged parents": (lambda: rs.tree([1, 2], [[-1], [0, 1]]), rs.MaskError, "parents must be a list of node numbers"),
    "fold of a number": (lambda: rs.fold(5), rs.InputError, "rows must be a list with the token ids of each row; got int"),  # type: ignore[arg-type]
    "fold of nothing": (
        lambda: rs.fold(None),
        rs.InputError,
        "rows must be a list with the token ids of each row; got NoneType",
    ),  # type: ignore[arg-type]
    "fold, ragged row": (lambda: rs.fold([[3], [1, [2]]]), rs.InputError, "rows[1] must be a list of token ids; got [1, [2]]"),
    "fold, large ids": (
        lambda: rs.fold([np.array([1, 2**63 + 5], dtype=np.uint64)]),
        rs.InputError,
        "rows[0] has token ids that do not fit into 64 bits with a sign: 9223372036854775813",
    ),
    "fold, only large ids": (
        lambda: rs.fold([np.array([2**63 + 5], dtype=np.uint64)]),
        rs.InputError,
        "rows[0] has token ids that do not fit into 64 bits with a sign: 9223372036854775813",
    ),
    "kv_lengths of rows": (
        lambda: rs.documents([[3, 5], [8]], kv_lengths=3),
        rs.MaskError,
        "lengths are those of 2 rows, so kv_lengths must be a list for each; got 3",
    ),
    "pack, no mask": (
        lambda: rs.pack([3, 4], 2, tokens_per_rank=8, mask=None),  # type: ignore[arg-type]
        rs.InputError,
        "mask must be a function that makes a mask from a list of lengths, as rs.documents; got None",
    ),
    "pack, mask of another type": (
        lambda: rs.pack([3, 4], 2, tokens_per_rank=8, mask=lambda lengths: 3),  # type: ignore[arg-type, return-value]
        rs.InputError,
        "mask() must make a mask from the lengths of documents, but gave int",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_named(name: str) -> None:
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_token_ids_without_a_sign_are_folded() -> None:
    assert rs.fold([torch.tensor([1, 2], dtype=torch.uint64)]).tokens.tolist() == [1, 2]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("owners", [None, 3, [[0], [0, 0]], [0], ["a", "b"]])
def test_wrong_owners_are_named(owners: Any) -> None:
    cp = rs.ContextParallel(None, rs.documents([3, 5]))
    with pytest.raises(rs.InputError, match="owners must be one rank for each of the 2 documents"):
        cp.route(torch.arange(8), documents=[3, 5], owners=owners)


@pytest.mark.usefixtures("world_of_one")
def test_what_is_not_a_tensor_is_not_routed() -> None:
    cp = rs.ContextParallel(None, rs.documents([3, 5]))
    with pytest.raises(rs.InputError, match="loaded must be a tensor, or a list of tensors"):
        cp.route(5, documents=[3, 5], owners=[0, 0])  # type: ignore[arg-type]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("fill", "dtype"),
    [
        *((300, torch.uint8), (-1, torch.uint8), (0.5, torch.int64), (float("nan"), torch.int64), (float("inf"), torch.int32)),
        *((2, torch.bool), ("a", torch.float32), (None, torch.int64), (1j, torch.float32)),
        *((1e5, torch.float16), (-1e39, torch.float32), (10**400, torch.float64), (1e39j, torch.complex64)),
        *((np.int64(300), torch.uint8), (np.float32(0.5), torch.int64), (torch.tensor(1), torch.int64)),
    ],
)
def test_a_fill_value_that_the_dtype_cannot_hold_is_refused(fill: Any, dtype: torch.dtype) -> None:
    cp = rs.ContextParallel(None, rs.documents([3, 5]))
    x = torch.zeros(1, 8).to(dtype)
    for call in (cp.roll, rs.LocalWorld(2).roll):
        with pytest.raises(rs.InputError, match=f"is not a value of {dtype}"):
            call(x, -1, fill=fill)
    with pytest.raises(rs.InputError, match=f"is not a value of {dtype}"):
        cp.halo(x, before=1, fill=fill)


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [
        *((-100, torch.int64), (255.0, torch.uint8), (True, torch.bool), (0.5, torch.float16)),
        *((-65504, torch.float16), (float("-inf"), torch.bfloat16), (2.0**127, torch.bfloat16), (1 + 2j, torch.complex64)),
        *((np.int64(-100), torch.int64), (np.float32("-inf"), torch.float32), (np.float32(2), torch.int64)),
    ],
)
def test_a_fill_value_that_the_dtype_holds_is_taken(fill: Any, dtype: torch.dtype) -> None:
    rolled = rs.LocalWorld(2).roll(torch.zeros(1, 8).to(dtype), -1, fill=fill)
    assert rolled[0, -1].item() == fill
