"""Whether a mask_mod reads the index of the batch or the head, whichever way it reads it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ringspan as rs
from ringspan.torch_private.function_modes import disable_torch_function
from ringspan.user_functions.index_reads import inputs_read

IDS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])


def secretly(x: torch.Tensor) -> int:
    """The value, read from memory without asking PyTorch."""
    with disable_torch_function():
        address = x.data_ptr()
    return ctypes.c_int64.from_address(address).value


def same_document(member: Any, q: Any, k: Any) -> Any:
    return IDS[member, q] == IDS[member, k]


READS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda i: i,
    "data": lambda i: i.data,
    "T": lambda i: i.T,
    "mT": lambda i: i[None, None].mT[0, 0],
    "H": lambda i: i[None, None].H[0, 0],
    "real": lambda i: i.real,
    "detach": lambda i: i.detach(),
    "view": lambda i: i.view(1)[0],
    "view_as": lambda i: i.view_as(torch.tensor(0)),
    "as_subclass": lambda i: i.as_subclass(torch.Tensor),
    "clone": lambda i: i.clone(),
    "item": lambda i: i.item(),
    "int": lambda i: int(i),
    "tolist": lambda i: i.tolist(),
    "numpy": lambda i: int(i.numpy()),
    "asarray": lambda i: int(np.asarray(i)),
    "dlpack": lambda i: torch.from_dlpack(i),
    "torch.ops": lambda i: torch.ops.aten.add.Tensor(i, 0),
    "torch.ops packet": lambda i: torch.ops.aten.add(i, 0),
    "new_full": lambda i: i.new_full((), i),
    "new_tensor": lambda i: i.new_tensor(i),
    "stack": lambda i: torch.stack([i, i])[0],
    "set_": lambda i: torch.zeros((), dtype=torch.int64).copy_(i),
    "type_as": lambda i: i.type_as(torch.tensor(0)),
    "storage": lambda i: i.untyped_storage()[0],
    "memory": secretly,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_way_to_read_the_batch_counts(read: Callable[[Any], Any]) -> None:
    function = lambda b, h, q, k: same_document(read(b), q, k)  # noqa: E731
    assert inputs_read(function, (6, 6))[:2] == (True, False)
    with pytest.raises(rs.MaskError, match="reads the index of batch"):
        rs.mask_mod(function, 6)
    mask = rs.mask_mod(function, 6, batch=2)
    for b in range(2):
        assert (mask.dense(b=b) == (IDS[b][:, None] == IDS[b][None]).numpy()).all()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_way_to_read_the_head_counts(read: Callable[[Any], Any]) -> None:
    assert inputs_read(lambda b, h, q, k: same_document(read(h), q, k), (6, 6))[:2] == (False, True)


VALUELESS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda i: torch.ones(i.shape, dtype=torch.bool),
    "dtype": lambda i: torch.tensor(1, dtype=i.dtype) > 0,
    "device": lambda i: torch.tensor(True, device=i.device),
    "new_ones": lambda i: i.new_ones((), dtype=torch.bool),
    "ones_like": lambda i: torch.ones_like(i, dtype=torch.bool),
    "dim": lambda i: torch.tensor(i.dim() == 0),
}


@pytest.mark.parametrize("use", VALUELESS.values(), ids=VALUELESS)
def test_uses_that_cannot_reveal_the_value_do_not_count(use: Callable[[Any], Any]) -> None:
    assert inputs_read(lambda b, h, q, k: (k <= q) & use(b) & use(h), (6, 6))[:2] == (False, False)


def test_a_read_that_raises_for_other_indices_counts() -> None:
    one_member = IDS[:1]
    assert inputs_read(lambda b, h, q, k: one_member[secretly(b), q] == one_member[secretly(b), k], (6, 6)).batch
