"""Strategies in which other things than keys travel, walked by the engine as it is.

``pass_q``: queries travel to the keys, and what they found comes back. ``HeadSplit``: every rank gets all tokens of some heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import ringspan as rs
from ringspan.layouts import cut
from ringspan.masks.table import HI, K0, K1, LO, Q0, Q1
from ringspan.plans import STRATEGIES, Program, Scene, Slot, Step, Task, Transfer, bytes_moved, register_strategy
from ringspan.plans.data import PHASES
from ringspan.plans.scene import bands_by_group
from ringspan.transports import InProcess
from tests.engine.drivers import AtTheLastMoment, FarAhead
from tests.engine.truth import EXACT, case, worst_error
from tests.plans.dense_walk import assert_exactly_once
from tests.plans.examples import MASKS, all_plans


@dataclass(frozen=True)
class HeadSplit:
    """All tokens of ``heads / world`` heads to each rank, and what they found back to the tokens' owners.

    A rank also sends to itself.
    """

    heads: int
    kv_heads: int

    def __call__(self, scene: Scene) -> Program:
        rank, world = scene.rank, scene.world
        counts = {"q": scene.q_layout.counts, "kv": scene.kv_layout.counts}
        at = {of: np.concatenate([[0], np.cumsum(n)]).tolist() for of, n in counts.items()}
        share = {"q": self.heads // world, "kv": self.kv_heads // world}
        of = {"q": "q", "out": "q", "dq": "q", "kv": "kv", "dkv": "kv"}

        def own(what: Any) -> list[Transfer]:
            """The rank's own rows, those heads that a peer works on."""
            n, h = counts[of[what]][rank], share[of[what]]
            rows = ((0, n),)
            return [Transfer(what=what, peer=p, slot=0, rows=rows, heads=(p * h, p * h + h)) for p in range(world) if n]

        def all_tokens(what: Any) -> list[Transfer]:
            """Everybody's rows, the heads that this rank works on."""
            ends = at[of[what]]
            spans = [((ends[p], ends[p + 1]),) for p in range(world)]
            return [Transfer(what=what, peer=p, slot=1, rows=rows) for p, rows in enumerate(spans) if rows[0][0] < rows[0][1]]

        tiles = cut(scene.mask, scene.q_layout.pieces, scene.kv_layout.pieces)
        dq, dk = np.array(at["q"])[tiles.q_rank][:, None], np.array(at["kv"])[tiles.k_rank][:, None]
        bands = tiles.bands.copy()
        bands[:, [Q0, Q1]] += dq
        bands[:, [K0, K1]] += dk
        bands[:, [LO, HI]] += dk - dq
        joined = bands_by_group(bands, np.zeros(len(bands), dtype=np.int64)).get(0, ())

        def steps(*results: str) -> tuple[Step, ...]:
            return (
                Step(sends=(*own("q"), *own("kv")), recvs=(*all_tokens("q"), *all_tokens("kv"))),
                Step(tasks=(Task(q_slot=1, kv_slot=1, bands=joined),) if joined else ()),
                Step(
                    sends=tuple(t for what in results for t in all_tokens(what)),
                    recvs=tuple(t for what in results for t in own(what)),
                ),
            )

        return Program(
            forward=steps("out"),
            backward=steps("dq", "dkv"),
            q_slots=(Slot(rows=scene.q_rows), Slot(rows=at["q"][-1], heads=share["q"])),
            kv_slots=(Slot(rows=counts["kv"][rank]), Slot(rows=at["kv"][-1], heads=share["kv"])),
            heads=(self.heads, self.kv_heads),
        )


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    register_strategy("test_head_split", HeadSplit)
    yield
    del STRATEGIES["test_head_split"]


DRIVERS = {"in process": lambda world: InProcess(world), "far ahead": lambda _: FarAhead(), "late": lambda _: AtTheLastMoment()}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("strategy", ["pass_q(stages=1)", "pass_q", "pass_q(stages=4)"])
def test_exact(strategy: str, driver: str) -> None:
    for mask in MASKS.values():
        for layout in ("contiguous", "zigzag", "striped"):
            for world in (1, 2, 3, 5):
                plans = all_plans(mask, world, strategy, layout)
                assert worst_error(plans, case(mask), DRIVERS[driver](world).run) <= EXACT


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(4, 4, 4), (3, 3, 3), (8, 4, 4), (8, 4, 2), (2, 1, 1)])
def test_heads_are_split(heads: int, kv_heads: int, world: int, driver: str) -> None:
    for mask in MASKS.values():
        for layout in ("contiguous", "zigzag"):
            plans = all_plans(mask, world, f"test_head_split(heads={heads}, kv_heads={kv_heads})", layout)
            plans[0].verify()
            assert_exactly_once(plans)
            given = case(mask, heads=heads, kv_heads=kv_heads)
            assert worst_error(plans, given, DRIVERS[driver](world).run) <= EXACT


@pytest.mark.parametrize("strategy", ["pass_q", "test_head_split(heads=4, kv_heads=4)"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_bytes_are_those_of_the_plan(strategy: str, dtype: str) -> None:
    """What a rank keeps for itself does not count; a result that comes back is float32 at least."""
    mask = rs.documents([9, 14]) | rs.window(left=3, right=1)
    world = rs.LocalWorld(4)
    plans = all_plans(mask, 4, strategy, "zigzag")
    q, k, v = (x.to(getattr(torch, dtype)).requires_grad_() for x in case(mask, heads=4, kv_heads=4)[:3])
    world.run(plans, q, k, v).out.sum().backward()
    shape = rs.Shape(heads=4, kv_heads=4, head_dim=8, v_dim=6, batch=2, dtype=dtype)
    for plan, moved in zip(plans, world.traffic, strict=True):
        (f_out, f_in), (b_out, b_in) = (bytes_moved(plan, shape, phase) for phase in PHASES)
        assert (moved.sent, moved.received) == (f_out + b_out, f_in + b_in)
        assert moved.sent > 0
