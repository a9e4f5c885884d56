"""The data of the pictures. The tests of the demo check the pictures themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ringspan as rs
from ringspan.cli import pictures


def test_a_pair_has_the_colour_of_its_query_and_is_pale_when_its_key_travelled() -> None:
    layout = rs.Layout([[(0, 1), (3, 4)], [(1, 3)]])
    owner = pictures.owners(layout)
    assert owner.tolist() == [0, 1, 1, 0]
    a, b = pictures.rank_colours(2)
    picture = pictures.cells(rs.causal(4).dense(), owner, owner, pictures.rank_colours(2))
    paper = np.ones(3)
    expected = [
        [a, paper, paper, paper],
        [pictures.pale(b), b, paper, paper],
        [pictures.pale(b), b, b, paper],
        [a, pictures.pale(a), pictures.pale(a), a],
    ]
    np.testing.assert_allclose(picture, np.array(expected))


@pytest.mark.parametrize("world", [1, 4, 6, 7, 40])
def test_every_rank_has_a_colour_of_its_own(world: int) -> None:
    assert len({tuple(row) for row in pictures.rank_colours(world).tolist()}) == world


@pytest.mark.parametrize(("world", "lengths"), [(1, [8]), (9, [5, 1, 2]), (40, [3000, 1, 1200])])
def test_any_world_and_length_can_be_drawn(world: int, lengths: list[int], tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "mask.png"
    plan = rs.plan(rs.documents(lengths), world=world)
    pictures.draw_mask(path, plan, [f"document {n}" for n in range(len(lengths))], lengths)
    assert image.imread(path)[..., :3].std() > 0.05


@pytest.mark.parametrize(
    ("split", "alone", "naive"),
    [
        ([3.0], [3.0], []),
        ([3.0, float("nan")], [3.0, 2.0], [2.9, float("nan")]),
        ([3.0, 2.0, 1.0], [3.0, 2.5, 1.0], [3.1, 2.4, 1.2]),
        ([3.0, 2.0], [3.0, 2.0], [3.1, 2.0]),
    ],
)
def test_any_curves_can_be_drawn(split: list[float], alone: list[float], naive: list[float], tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    pictures.draw_losses(tmp_path / "losses.png", split, alone, naive, world=4, tolerance=1e-4)
    assert image.imread(tmp_path / "losses.png")[..., :3].std() > 0.05
