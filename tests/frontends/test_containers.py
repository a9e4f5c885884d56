"""What cp.shard looks into for tensors, and what it refuses."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.errors import InputError
from ringspan.frontends.containers import map_sequences

N = 5


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    name: str
    length: int = field(init=False, default=7)


Pair = namedtuple("Pair", "a b")


def halves(tree: Any) -> Any:
    return map_sequences(lambda x: x[:2], tree, N)


X = torch.arange(N)
HALF = X[:2]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([X, (X, {"a": X})], [HALF, (HALF, {"a": HALF})]),
        (UserDict({"ids": X, "more": [X]}), UserDict({"ids": HALF, "more": [HALF]})),
        (Batch(X, "one"), Batch(HALF, "one")),
        ({"batches": [Batch(X, "one")]}, {"batches": [Batch(HALF, "one")]}),
        (Pair(X, None), Pair(HALF, None)),
        ({"flag": True, "n": 3, "dtype": torch.bfloat16, "text": "abc"}, None),
        ([1, 2], None),
        ("a" * N, None),
    ],
    ids=["nested", "mapping", "dataclass", "dataclass inside", "named tuple", "plain values", "few numbers", "text"],
)
def test_containers_are_looked_into(given: Any, wanted: Any) -> None:
    found = halves(given)
    assert type(found) is type(given)
    assert repr(found) == repr(given if wanted is None else wanted)


class Columns(MutableMapping[str, Any]):
    """A mapping whose copies by ``copy.copy`` share its dict."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._columns[name] = value

    def __delitem__(self, name: str) -> None:
        del self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


@pytest.mark.parametrize("kind", [UserDict, Columns])
def test_the_container_itself_is_not_changed(kind: Callable[..., Any]) -> None:
    given = kind({"ids": X})
    found = halves(given)
    assert found is not given
    assert torch.equal(found["ids"], HALF)
    assert torch.equal(given["ids"], X)


@dataclass
class WithPositions:
    tokens: Tensor
    positions: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.positions = torch.arange(len(self.tokens)) + 10 * len(self.tokens)


def test_fields_that_init_does_not_take_are_those_of_the_whole_sequence() -> None:
    assert torch.equal(halves(WithPositions(X)).positions, torch.tensor([50, 51]))


def test_arrays_stay_arrays() -> None:
    found = halves({"ids": np.arange(N, dtype=np.int32)})["ids"]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.int32
    assert found.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (list(range(N)), "a list of 5 numbers looks like tokens: make it a tensor"),
        ({"ids": [1.0] * N}, "a list of 5 numbers looks like tokens"),
        ({"ids": {1, 2}}, "set is not a tensor, an array, or a container"),
        (object(), "object is not a tensor"),
        (np.array(["a"] * N), "an array of <U1 cannot be sharded"),
    ],
)
def test_what_could_hold_tokens_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        halves(given)


def test_batch_encoding_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    found = halves(transformers.BatchEncoding({"input_ids": X, "attention_mask": X}))
    assert isinstance(found, transformers.BatchEncoding)
    assert torch.equal(found["input_ids"], HALF)


@pytest.mark.parametrize(
    ("batch", "place"),
    [
        ({"tokens": torch.zeros(1, 8), "labels": torch.zeros(1, 7)}, r"^\['labels'\]: dim 1 of a tensor of shape \(1, 7\)"),
        ([torch.zeros(1, 8), (torch.zeros(1, 7),)], r"^\[1\]\[0\]: dim 1"),
        ({"extra": object()}, r"^\['extra'\]: object is not a tensor"),
        (UserDict(a={"b": torch.zeros(1, 7)}), r"^\['a'\]\['b'\]: dim 1"),
        (torch.zeros(1, 7), r"^dim 1 of a tensor"),
    ],
)
@pytest.mark.usefixtures("world_of_one")
def test_errors_name_the_place_in_the_container(batch: Any, place: str) -> None:
    cp = rs.ContextParallel(None, rs.causal(8))
    with pytest.raises(rs.InputError, match=place):
        cp.shard(batch, dim=1)
