"""Labels and positions by document, against a loop over the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.frontends.labels import positions_in

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@given(LENGTHS, st.sampled_from([0, 1, -1]))
def test_labels_stay_within_their_document(lengths: list[int], dim: int) -> None:
    n = sum(lengths)
    want = [-1] * n
    start = 0
    for length in lengths:
        for i in range(start, start + length - 1):
            want[i] = 100 + i + 1
        start += length
    tokens = torch.arange(100, 100 + n)
    whole = tokens.unsqueeze(1 if dim == 0 else 0).expand(*((n, 3) if dim == 0 else (3, n)))
    labels = rs.shift_labels(whole, documents=lengths, dim=dim, ignore_index=-1)
    assert labels.shape == whole.shape
    for row in labels.unbind(1 if dim == 0 else 0):
        assert row.tolist() == want
    assert torch.equal(whole, tokens.unsqueeze(1 if dim == 0 else 0).expand_as(whole)), "changed in place"


def test_the_default_is_one_document() -> None:
    assert rs.shift_labels(torch.arange(4)).tolist() == [1, 2, 3, -100]


@given(LENGTHS)
def test_positions_start_again_with_every_document(lengths: list[int]) -> None:
    assert positions_in(lengths, sum(lengths)).tolist() == [i for length in lengths for i in range(length)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rs.shift_labels(torch.arange(5), documents=[2, 2]), r"but the sequence has 5 \(token 4 is in no document\)"),
        (lambda: rs.shift_labels(torch.arange(5), documents=[2, 4]), r"6 tokens together.*\(there is no token 5\)"),
        (lambda: rs.shift_labels([1, 2, 3]), "tokens must be a tensor, not list"),  # type: ignore[arg-type]
        (lambda: rs.shift_labels(torch.arange(5), dim=2), r"dim=2 is not a dim of tokens of shape \(5,\)"),
        (lambda: rs.shift_labels(torch.arange(5), documents=[6, -1]), r"documents\[1\] must be between 0 and"),
        (lambda: rs.shift_labels(torch.tensor(5)), "tokens must have a sequence dim"),
        (lambda: positions_in([3], 5), "3 tokens together, but the sequence has 5"),
    ],
)
def test_lengths_that_do_not_add_up_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(rs.RingspanError, match=message):
        call()
