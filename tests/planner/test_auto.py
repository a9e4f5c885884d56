"""``"auto"`` is the best candidate on the given machine, or on an assumed one, which the notes name."""

from __future__ import annotations

import numpy as np
import pytest

import ringspan as rs
from ringspan.planner import best_on, choose

SHAPE = rs.Shape(heads=32, kv_heads=8, head_dim=128)
DOCUMENTS = rs.documents([900, 3000, 100, 96])


def test_plan_takes_the_best_candidate_and_notes_the_others() -> None:
    plan = rs.plan(DOCUMENTS, world=4, rank=2, hardware="h200x8", shape=SHAPE)
    choice = best_on(DOCUMENTS, world=4, hardware="h200x8", shape=SHAPE)
    assert (plan.q_layout, plan.strategy, plan.rank) == (choice.best.layout, choice.best.strategy, 2)
    assert plan.notes[1:] == choice.table()
    assert plan.notes[0].startswith(
        f"{plan.strategy} on {plan.q_layout.name}: the best of {len(choice.candidates)} candidates on h200, nodes of 8"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "name yours with hardware= and shape="),
        ({"hardware": "h200x8"}, "name yours with shape="),
        ({"shape": SHAPE}, "name yours with hardware="),
    ],
    ids=["nothing", "hardware", "shape"],
)
def test_assumptions_are_noted(given: dict[str, object], said: str) -> None:
    plan = rs.plan(DOCUMENTS, world=4, **given)  # type: ignore[arg-type]
    assert plan.notes[1].startswith("assumed where not given: ")
    assert plan.notes[1].endswith(said)
    assert plan.strategy == rs.plan(DOCUMENTS, world=4, hardware="h200x8", shape=SHAPE).strategy


@pytest.mark.parametrize(
    ("given", "chosen"),
    [({"layout": "zigzag"}, ("zigzag", None)), ({"strategy": "ring"}, (None, "ring")), ({}, (None, None))],
    ids=["a layout", "a strategy", "nothing"],
)
def test_given_layouts_and_strategies_are_kept(given: dict[str, str], chosen: tuple[str | None, str | None]) -> None:
    plan = rs.plan(DOCUMENTS, world=4, **given)  # type: ignore[arg-type]
    assert plan.q_layout.name == chosen[0] or chosen[0] is None
    assert plan.strategy == chosen[1] or chosen[1] is None
    assert [note for note in plan.notes if note.endswith(": as given")] == [f"{k} {v}: as given" for k, v in given.items()]


def test_heads_of_unknown_number_are_not_split() -> None:
    """Over a slow link splitting heads is best, if their number or the strategy is given."""
    mask = rs.full(4096)
    slow_link = rs.costs.named_hardware("h200x1")
    known = rs.plan(mask, world=16, hardware=slow_link, shape=SHAPE)
    assert known.program.heads == (32, 8)
    unknown = rs.plan(mask, world=16, hardware=slow_link)
    assert unknown.program.heads is None
    assert any("needs the number of heads: pass shape=" in note for note in unknown.notes)
    assert rs.plan(mask, world=16, hardware=slow_link, strategy="ulysses").strategy.startswith("ulysses")


def test_without_a_machine_no_plan_is_refused_for_memory() -> None:
    """Keys of a hundred million tokens are more than any device has; the plan that takes the least memory is made."""
    mask = rs.causal(400_000_000)
    with pytest.raises(rs.PlanError, match="no candidate fits in the memory of h200"):
        best_on(mask, world=4, hardware="h200x8", shape=SHAPE)
    plan = rs.plan(mask, world=4)
    assert plan.strategy == "ring"
    planned = sum("GiB for buffers and the kernel" in note for note in plan.notes)
    assert plan.notes[0].startswith(
        f"ring on zigzag: takes the least memory of {planned} candidates that were planned, none of which fits, on h200"
    )


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    "mask", [rs.full(0), rs.full(1), rs.causal(6) & ~rs.causal(6), rs.full(3, 7), rs.documents([1, 0, 2])], ids=lambda m: m.name
)
def test_tiny_masks(mask: rs.Mask, world: int) -> None:
    rs.plan(mask, world=world).verify()


def test_all_ranks_choose_alike_with_any_caches() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        mask = rs.documents(rng.integers(1, 400, size=12).tolist())
        digests = set()
        for rank in range(8):  # each a process of its own, and every other one with a past
            rs.clear_caches()
            if rank % 2:
                rs.plan(mask, world=8, strategy="ring")
                rs.plan(mask, world=4)
            digests.add(rs.plan(mask, world=8, rank=rank).digest)
        assert len(digests) == 1


def test_a_repeated_choice_is_looked_up() -> None:
    first = best_on(DOCUMENTS, world=4, hardware="h200x8", shape=SHAPE)
    assert best_on(DOCUMENTS, world=4, hardware="h200x8", shape=SHAPE) is first
    rs.clear_caches()
    again = best_on(DOCUMENTS, world=4, hardware="h200x8", shape=SHAPE)
    assert again is not first
    assert again.table() == first.table()


@pytest.mark.parametrize(("world", "is_said"), [(8, False), (64, True)])
def test_sampled_costs_are_noted(world: int, is_said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MAX_RANKS_EXACT", 51)
    rs.clear_caches()
    plan = rs.plan(rs.causal(2048), world=world, strategy="exchange(stages=1)")
    rs.clear_caches()
    assert (f"sampled: 32 of {world} ranks were planned" in plan.explain()) is is_said


def test_many_documents_over_nodes() -> None:
    """Not slower by the model than any strategy on the layout that knows the nodes."""
    share = np.random.default_rng(0).lognormal(size=1000)
    cuts = np.round(np.cumsum(share) / share.sum() * 2**20).astype(int)
    mask = rs.documents(np.diff(np.concatenate([[0], cuts])))
    chosen = best_on(mask, world=64, hardware="h200x8", shape=SHAPE).best
    with_nodes = best_on(mask, world=64, hardware="h200x8", shape=SHAPE, layout="balanced").best
    assert with_nodes.layout.name == "balanced(per_node=8)"
    assert chosen.cost is not None
    assert with_nodes.cost is not None
    assert chosen.cost.seconds <= with_nodes.cost.seconds
