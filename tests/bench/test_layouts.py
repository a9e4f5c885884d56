"""Key rows that cross between nodes, counted in the dense mask."""

from __future__ import annotations

import numpy as np

import ringspan as rs
from ringspan.bench.layouts import COMPARED, draw_lengths, layout_rows
from ringspan.layouts import Layout, balanced


def crossing(mask: rs.Mask, layout: Layout, per_node: int) -> int:
    """Each key counts once for every node but its own that has a query which sees it."""
    node = np.zeros(layout.length, dtype=np.int64)
    for rank in range(layout.world):
        node[layout.positions(rank)] = rank // per_node
    seen = np.stack([mask.dense()[node == i].any(axis=0) & (node != i) for i in range(node.max() + 1)])
    return int(seen.sum())


def test_rows_between_nodes() -> None:
    drawn = {"seq_len": [600], "lengths": ["log-normal-1"], "documents": 9, "world": [4, 6], "seed": 3}
    found = list(layout_rows(**drawn, layouts=["zigzag", "balanced"], per_node=4))  # type: ignore[arg-type]
    mask = rs.documents(draw_lengths("log-normal-1", documents=9, tokens=600, seed=3))
    makes = {**COMPARED, "balanced(per_node=4)": lambda mask, world: balanced(mask, world, per_node=4)}
    assert [(row["world"], row["layout"]) for row in found] == [
        (world, name) for world in (4, 6) for name in ("zigzag", "balanced", "balanced(per_node=4)")
    ]
    for row in found:
        assert row["between_nodes"] == crossing(mask, makes[row["layout"]](mask, row["world"]), 4)
        assert row["between_nodes"] == 0 or row["world"] == 6
    assert found[-1]["between_nodes"] < found[-3]["between_nodes"]
    without = list(layout_rows(**drawn, layouts=["balanced"]))  # type: ignore[arg-type]
    assert [row["layout"] for row in without] == ["balanced", "balanced"]
    assert "between_nodes" not in without[0]
