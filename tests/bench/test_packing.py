"""The schedules that `ringspan bench pack` compares hold every document once, within the capacity of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringspan.bench.packing import LENGTHS, SHAPE, WAYS, draw_lengths, packing_rows
from ringspan.bench.rows import ignore_progress
from ringspan.cli.bench.pack import DESCRIPTION
from ringspan.costs.hardware import hardware
from ringspan.costs.layer import layer_cost

LAYER = layer_cost(hardware("h200x8"), SHAPE)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("way", WAYS)
def test_every_document_is_computed_once_within_the_capacity_of_its_ranks(way: str, name: str) -> None:
    world, capacity = 32, 512
    lengths = draw_lengths(name, tokens=world * capacity * 3, longest=16 * capacity, seed=1)
    assert sum(lengths) == world * capacity * 3
    schedule = WAYS[way](lengths, world, capacity, "h200x8", LAYER)
    assert sorted(n for groups in schedule for group in groups for n in group.lengths) == sorted(lengths)
    for groups in schedule:
        assert sum(group.ranks for group in groups) <= world
        assert all(sum(group.lengths) <= group.ranks * capacity for group in groups)


def test_powers_of_two() -> None:
    """The longest document needs 4 ranks, the next 2; the short ones share the rest."""
    (groups,) = WAYS["powers of 2"]([40, 7, 20, 6], 8, 10, "h200x8", LAYER)
    assert [(group.ranks, group.lengths) for group in groups] == [(4, [40]), (2, [20]), (1, [7]), (1, [6])]


def test_the_ideal_is_a_bound_where_nothing_is_split() -> None:
    """On one rank nothing is sent: the ideal is reached but for launches and the diagonal's tiles."""
    rows = packing_rows(
        lengths=["web"],
        world=[1],
        tokens_per_rank=65536,
        longest=65536,
        rounds=1,
        machine="h200x8",
        seed=0,
        on_progress=ignore_progress,
    )
    assert {row["way"]: 1 <= row["over_ideal"] < 1.2 for row in rows} == dict.fromkeys(WAYS, True)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_described(way: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "benchmarks.md"
    assert f"\n| {way} | " in page.read_text(encoding="utf-8")
    assert f"\n  {way} " in DESCRIPTION
