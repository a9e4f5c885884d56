"""The balance of each layout for common masks, as numbers, and the layout that ``auto`` chooses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import ringspan as rs
from ringspan.layouts import LAYOUTS, areas, auto, balance
from ringspan.layouts.auto import GOOD_ENOUGH
from tests import dense_masks
from tests.dense_masks import Dense
from tests.hypothesis_strategies import Drawn, masks

N, WORLD = 4096, 8

FEW = [1500, 300, 1200, 96, 1000]
PACKED = [700, 150, 90, 1100, 60, 60, 340, 800, 16, 780]
EVEN = [64] * 64

MASKS = {
    "full": rs.full(N),
    "causal": rs.causal(N),
    "window": rs.causal(N) & rs.window(left=511),
    "prefix": rs.prefix(N, 1024),
    "few documents": rs.documents(FEW),
    "packed documents": rs.documents(PACKED),
    "even documents": rs.documents(EVEN),
    "packed + window": rs.documents(PACKED) & rs.window(left=127),
}

# The largest rank's area over the mean, at 4096 tokens and 8 ranks: 1.000 is perfect, 8.000 is one rank with all the
# work.
BALANCE = """
                    contiguous  zigzag  striped  per_document  round_robin  balanced   auto takes
  full                   1.000   1.000    1.000         1.000        1.000     1.000   contiguous
  causal                 1.875   1.000    1.002         1.000        1.000     1.000   zigzag
  window                 1.067   1.067    1.001         1.067        1.000     1.012   contiguous
  prefix                 1.765   1.147    1.001         1.147        1.000     1.012   balanced
  few documents          2.008   1.783    1.003         1.002        1.009     1.012   balanced
  packed documents       2.203   1.320    1.004         1.001        1.014     1.013   balanced
  even documents         1.000   1.000    1.108         1.000        1.000     1.000   contiguous
  packed + window        1.154   1.154    1.003         1.089        1.001     1.011   balanced
"""


@cache
def work_of_rows(name: str) -> NDArray[np.int64]:
    """The number of keys that each query sees, counted in the dense mask."""
    dense: dict[str, Callable[[], Dense]] = {
        "full": lambda: dense_masks.full(N, N),
        "causal": lambda: dense_masks.causal(N, N),
        "window": lambda: dense_masks.window(N, N, 511, 0),
        "prefix": lambda: dense_masks.prefix(N, 1024),
        "few documents": lambda: dense_masks.documents(FEW, FEW),
        "packed documents": lambda: dense_masks.documents(PACKED, PACKED),
        "even documents": lambda: dense_masks.documents(EVEN, EVEN),
        "packed + window": lambda: dense_masks.documents(PACKED, PACKED) & dense_masks.window(N, N, 127, None),
    }
    return dense[name]().sum(axis=1)


@pytest.mark.parametrize("name", MASKS)
def test_the_table(name: str) -> None:
    (row,) = (line for line in BALANCE.splitlines() if line.startswith(f"  {name}  "))
    *figures, taken = row.removeprefix(f"  {name}").split()
    header = BALANCE.partition("auto takes")[0].split()
    assert header == list(LAYOUTS)
    for layout_name, figure in zip(header, figures, strict=True):
        layout = LAYOUTS[layout_name](MASKS[name], WORLD)
        counted = [int(work_of_rows(name)[layout.positions(rank)].sum()) for rank in range(WORLD)]
        assert areas(MASKS[name], layout).tolist() == counted
        assert f"{max(counted) * WORLD / sum(counted):.3f}" == figure, layout_name
        assert f"{balance(MASKS[name], layout):.3f}" == figure, layout_name
    assert auto(MASKS[name], WORLD)[0].name == taken


# The worst balance of a layout over many lengths and worlds, for the mask it suits.
PROMISES = [
    ("zigzag", rs.causal, 1.005),
    ("contiguous", rs.full, 1.002),
    ("striped", rs.causal, 1.004),
    ("round_robin", rs.causal, 1.012),
    ("per_document", lambda n: rs.documents([n // 4, n - n // 4]), 1.002),
    ("balanced", lambda n: rs.documents([n // 4, n - n // 4]), 1.02),
    ("balanced", lambda n: rs.prefix(n, n // 5), 1.02),
    ("balanced", lambda n: rs.chunked(n, n // 3) | rs.causal(n) & rs.window(left=n // 9), 1.02),
]


@pytest.mark.parametrize(("name", "mask_of", "at_most"), PROMISES, ids=[name for name, *_ in PROMISES])
def test_balance_is_no_worse_at_other_sizes(name: str, mask_of: Callable[[int], rs.Mask], at_most: float) -> None:
    for n in (4096, 5000, 65536, 100_003):
        for world in (2, 3, 8, 16):
            mask = mask_of(n)
            assert balance(mask, LAYOUTS[name](mask, world)) <= at_most, (n, world)


@given(masks(40, square=True, leaves=3), st.integers(1, 9))
def test_auto_takes_the_first_that_is_good_enough_else_the_best(drawn: Drawn, world: int) -> None:
    candidates = [LAYOUTS[name](drawn.mask, world) for name in ("contiguous", "zigzag", "balanced")]
    figures = [balance(drawn.mask, layout) for layout in candidates]
    good = [layout for layout, figure in zip(candidates, figures, strict=True) if figure <= GOOD_ENOUGH]
    expected = good[0] if good else candidates[int(np.argmin(figures))]
    chosen, why = auto(drawn.mask, world)
    assert (chosen, chosen.name) == (expected, expected.name)
    assert why.startswith(f"layout {chosen.name}: first with balance <= 1.1, else the best (balance: contiguous ")


def test_auto_notes_the_balance_of_each_candidate() -> None:
    _, why = auto(MASKS["prefix"], WORLD)
    assert why == (
        "layout balanced: first with balance <= 1.1, else the best (balance: contiguous 1.76, zigzag 1.15, balanced 1.01)"
    )


def test_an_empty_mask_is_balanced() -> None:
    nothing = rs.Mask.from_bands([], 10)
    assert balance(nothing, LAYOUTS["contiguous"](nothing, 3)) == 1.0
    assert auto(nothing, 3)[0].name == "contiguous"
