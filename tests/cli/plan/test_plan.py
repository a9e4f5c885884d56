"""``ringspan plan``: text, JSON, page and picture have the figures of the cost model; invalid arguments raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringspan as rs
from ringspan.cli.main import main
from ringspan.cli.pictures import COLOURS
from ringspan.cli.plan import drawings, png
from ringspan.cli.plan.picture import picture
from ringspan.cli.plan.study import Study, study
from ringspan.cli.units import seconds, time_unit
from ringspan.layouts import LAYOUTS, named_layout
from ringspan.planner import best_on, bytes_moved, choose
from ringspan.planner.candidates import MAX_RANKS_BALANCED
from ringspan.plans.data import PHASES
from tests.cli.plan.questions import SHAPE, TENSORS, question, told

# -- text and JSON -----------------------------------------------------------------------------------------------------


def test_json_is_what_the_cost_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--mask", "documents([900, 3000, 196]) & window(700)", "--world", "4", *TENSORS)
    mask = rs.documents([900, 3000, 196]) & rs.window(left=700)
    choice = best_on(mask, world=4, hardware="h200x8", shape=SHAPE)
    assert [(c["strategy"], c["layout"], c["rejected"]) for c in found["candidates"]] == [
        (c.strategy, c.layout.name, c.rejected) for c in choice.candidates
    ]
    assert choice.best.cost is not None
    assert found["chosen"]["seconds"] == choice.best.cost.seconds
    assert (found["exact"], found["costed_ranks"]) == (True, [0, 1, 2, 3])
    assert found["mask"]["area"] == mask.area
    assert sum(rank["work"] for rank in found["ranks"]) == pytest.approx(4)
    assert sum(r["sent_bytes"] for r in found["ranks"]) == sum(r["received_bytes"] for r in found["ranks"])


def test_all_has_figures_for_every_candidate_that_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--mask", "causal()", "--seq-len", "16K", "--world", "4", *TENSORS)
    some, every = told(capsys, *words), told(capsys, *words, "--all")
    assert [c["strategy"] for c in every["candidates"]] == [c["strategy"] for c in some["candidates"]]
    assert any(c["seconds"] is None for c in some["candidates"])
    assert all(c["seconds"] is not None for c in every["candidates"])
    assert every["chosen"] == some["chosen"]
    assert min(c["seconds"] for c in every["candidates"]) >= 0.98 * every["chosen"]["seconds"]


def test_speed_is_that_of_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--mask", "causal()", "--seq-len", "1M", "--world", "8", "--layout", "zigzag", "--strategy", "ring")
    chosen = found["chosen"]
    assert found["mask"]["queries"] == 1_048_576
    assert chosen["tokens_per_s"] == pytest.approx(1_048_576 / chosen["seconds"])
    assert chosen["speedup"] == pytest.approx(chosen["one_rank_s"] / chosen["seconds"])
    assert 7 < chosen["speedup"] < 9  # kernels are faster in the rectangles of several ranks than in one triangle
    assert 0.5 < chosen["share_of_kernel_speed"] < 1
    assert chosen["flops_per_s_of_rank"] < max(found["hardware"]["forward"].values())
    assert [fewer["world"] for fewer in found["fewer_ranks"]] == [1, 2, 4]
    assert found["fewer_ranks"][0]["seconds"] == chosen["one_rank_s"]
    for fewer in found["fewer_ranks"]:
        shape = rs.Shape(heads=32, kv_heads=8, head_dim=128)
        choice = best_on(rs.causal(2**20), world=fewer["world"], hardware="h200x8", shape=shape)
        assert choice.best.cost is not None
        assert fewer["seconds"] == choice.best.cost.seconds
        assert fewer["speedup"] == pytest.approx(fewer["seconds"] / chosen["seconds"])


def test_a_sequence_that_fewer_ranks_have_no_memory_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--mask", "causal()", "--seq-len", "16M", "--world", "32", "--layout", "zigzag", "--strategy", "ring")
    found = told(capsys, *words)
    assert found["chosen"]["speedup"] is found["chosen"]["one_rank_s"] is None
    fits = {fewer["world"]: fewer["rejected"] for fewer in found["fewer_ranks"]}
    assert fits == dict.fromkeys((1, 2, 4, 8), "no candidate fits in the memory of h200") | {16: None}
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert "one rank has too little memory" in text
    assert "speed-up of 32" in text


def test_a_number_of_tokens_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--mask", "causal()", "--seq-len", "many", "--world", "2"])
    assert "'many' is not a number of tokens: write 131072, 128K or 1M" in capsys.readouterr().err


CUTS = np.sort(np.random.default_rng(1).choice(np.arange(1, 2**18), 299, replace=False))
ASKED: dict[str, tuple[rs.Mask, int, dict[str, str]]] = {
    "a sample of ranks is compared": (rs.documents(np.diff([0, *CUTS, 2**18]).tolist()), 64, {}),
    "keys of another length": (rs.full(64, 128), 4, {"strategy": "exchange(stages=1)"}),
    "keys of another length, laid out": (rs.full(64, 128), 4, {"layout": "zigzag"}),
    "all is given": (rs.causal(64), 4, {"layout": "striped", "strategy": "pass_q"}),
}


@pytest.mark.parametrize(("mask", "world", "given"), ASKED.values(), ids=ASKED)
def test_the_choice_is_that_of_rs_plan(mask: rs.Mask, world: int, given: dict[str, Any]) -> None:
    found = study(question(mask, world, **given))
    plan = rs.plan(mask, world=world, hardware="h200x8", shape=SHAPE, **given)
    assert found.plans[0].digest == plan.for_heads(SHAPE.heads, SHAPE.kv_heads).digest
    assert found.cost.is_exact
    assert found.cost.seconds == plan.cost("h200x8", SHAPE).seconds


def test_text_tells_the_choice_the_candidates_and_the_steps_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mask", "full(4096) & window(100)", "--world", "4", "--layout", "zigzag", "--rank", "2", *TENSORS]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert " on zigzag: " in text.splitlines()[0]
    assert "exact: all 4 ranks" in text
    candidates, compared = text.split("speed-up of 4")
    assert "contiguous" not in candidates
    assert [line.split()[0] for line in compared.splitlines()[2:4]] == ["1", "2"]
    assert "rank 2 of 4" in text
    assert "peak buffers" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mask", "causal()"], "give it with --seq-len"),
        (["--mask", "causal(8)", "--seq-len", "9"], "leave --seq-len out"),
        (["--mask", "window(4)", "--seq-len", "8"], "Write `causal() & window(4)`, or"),
        (["--mask", "cusal(8)"], "did you mean causal?); there are full, causal, window"),
        (["--mask", "causal(8) & ~causal(8)"], "nothing to plan"),
        (["--mask", "causal(8)", "--rank", "2"], r"--rank must be one of 0 … 1"),
        (["--mask", "causal(8)", "--layout", "zagzig"], "there are contiguous"),
        (["--mask", "causal(8)", "--strategy", "rong"], "there are exchange, ring"),
        (["--mask", "causal(8)", "--hardware", "h300"], "--hardware h300: no hardware is called 'h300'; there are a100"),
        (["--mask", "causal(8)", "--hardware", __file__ + ".json"], "test_plan.py.json: cannot read"),
        (["--mask", "causal(8)", "--heads", "12"], "multiple of the key heads"),
        (["--mask", "causal(8)", "--head-dim", "0"], "--head-dim must be at least 1"),
        (["--mask", "causal(8)", "--html", "/nowhere/report.html"], "no directory /nowhere"),
        (["--mask", "causal(8)", "--html", "."], "it is a directory"),
        (["--mask", "causal(8)", "--cost-ranks", "0"], "--cost-ranks must be at least 1"),
    ],
)
def test_invalid_questions(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world", "2", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["junk", "{}", "[1]"])
def test_a_file_that_is_not_a_hardware_file(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junk = tmp_path / "junk.json"
    junk.write_text(text)
    assert main(["plan", "--world", "2", "--mask", "causal(8)", "--hardware", str(junk)]) == 2
    assert f"--hardware {junk}: this is not a hardware file" in capsys.readouterr().err


def test_long_programs_are_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mask", "causal(4096)", "--world", "64", "--layout", "zigzag", "--strategy", "ring", "--cost-ranks", "2"]
    assert main(["plan", *words, *TENSORS]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split()[1] for line in lines if line.startswith("step ")]
    assert steps == ["0", "1", "2", "3", "4", "5", "6", "7", "62", "63", "0", "1", "2", "3", "4", "5", "6", "7", "63", "64"]
    assert sum(line.startswith("… 54 more steps") for line in lines) == 1
    assert sum(line.startswith("… 55 more steps") for line in lines) == 1


# -- samples -----------------------------------------------------------------------------------------------------------


def test_what_is_sampled_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mask", "causal(4096)", "--world", "32", "--cost-ranks", "6", *TENSORS]
    found = told(capsys, *words)
    assert found["exact"] is False
    assert len(found["costed_ranks"]) == len(found["ranks"]) == 6
    assert main(["plan", *words]) == 0
    assert "sampled: 6 of 32 ranks" in capsys.readouterr().out


DOCUMENTS = "documents([9000, 300, 1200, 4096, 512, 70, 800, 406]) & window(2048)"


@pytest.mark.parametrize(("most_exact", "ranks"), [(64, 64), (51, 32)], ids=["all ranks", "a sample"])
def test_the_choice_has_the_figures_by_which_it_was_compared(
    most_exact: int, ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choose, "MAX_RANKS_EXACT", most_exact)
    words = ["--mask", DOCUMENTS, "--world", "64", *TENSORS]
    found = told(capsys, *words)
    costed = [c for c in found["candidates"] if c["seconds"] is not None]
    assert {c["simulated_ranks"] for c in costed} == {len(found["costed_ranks"])} == {ranks}
    assert {key: found["chosen"][key] for key in costed[0]} == costed[0]
    assert found["chosen"]["seconds"] == min(c["seconds"] for c in costed)
    assert main(["plan", *words]) == 0
    assert "candidates compared" not in capsys.readouterr().out


def test_other_figures_than_those_that_were_compared_are_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--mask", DOCUMENTS, "--world", "64", *TENSORS, "--cost-ranks", "4"]) == 0
    assert "sampled: 4 of 64 ranks were planned and simulated, among them the busiest; candidates compared by 64 ranks" in (
        capsys.readouterr().out
    )


def test_thousands_of_ranks_say_what_was_not_tried() -> None:
    found = study(question(rs.causal(2**16), MAX_RANKS_BALANCED * 2, strategy="exchange(stages=1)", most_ranks=3))
    assert [c.layout.name for c in found.choice.candidates] == ["contiguous", "zigzag"]
    assert "balanced was not tried" in found.notes[0]


# -- drawings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "mask",
    [
        rs.causal(23) & rs.window(left=5),
        rs.documents([9, 1, 13]),
        rs.causal(23) - rs.chunked(23, 4),
        rs.tree([9, 5, 4, 5], [-1, 0, 1, 0]),
    ],
    ids=["window", "documents", "hole", "tree"],
)
def test_a_small_picture_is_the_dense_mask(mask: rs.Mask, layout: str) -> None:
    made, _ = named_layout(layout, mask, 4)
    drawn = picture(mask, made, made)
    assert np.array_equal(drawn.seen(), mask.dense())
    assert all(token in made.positions(rank) for token, rank in zip(drawn.query, drawn.q_owner, strict=True))


def test_a_large_picture_has_every_row_that_its_query_has() -> None:
    mask = rs.documents([5000, 3, 7000, 997]) & rs.window(left=40)
    layout, _ = named_layout("zigzag", mask, 8)
    drawn = picture(mask, layout, layout, most=100)
    dense = mask.dense()[drawn.query]
    in_cells = dense.reshape(100, 100, -1).any(axis=2)
    assert np.array_equal(drawn.seen(), in_cells)


@pytest.mark.parametrize("part", [(0, 300), (990, 1190), (1300, 1301)])
def test_a_part_of_a_mask_is_drawn_as_the_dense_mask(part: tuple[int, int]) -> None:
    mask = rs.documents([1000, 3, 297, 100]) & rs.window(left=40)
    layout, _ = named_layout("zigzag", mask, 8)
    drawn = picture(mask, layout, layout, part=part)
    assert np.array_equal(drawn.seen(), mask.dense()[slice(*part), slice(*part)])
    assert drawn.query.tolist() == drawn.key.tolist() == [*range(*part)]


@pytest.mark.parametrize(
    ("mask", "part"),
    [
        (rs.causal(100_000) & rs.window(left=99), (49_604, 50_396)),
        (rs.causal(100_000), None),
        (rs.full(100_000) & rs.window(left=90_000) - rs.window(left=89_990), None),
        (rs.full(10_000, 100_000) & rs.window(left=99), None),
    ],
    ids=["a line", "a triangle", "far from the diagonal", "keys of another length"],
)
def test_a_mask_that_is_drawn_as_a_line_is_magnified(mask: rs.Mask, part: tuple[int, int] | None) -> None:
    layout, kv_layout = named_layout("contiguous", mask, 4)[0], named_layout("contiguous", mask.transposed, 4)[0]
    assert png.magnified(mask, picture(mask, layout, kv_layout).seen()) == part


@pytest.mark.parametrize(("world", "most"), [(5, None), (96, None), (96, 7)])
def test_traffic_is_what_the_plans_send(world: int, most: int | None) -> None:
    found = study(question(rs.causal(2048), world, layout="zigzag", strategy="exchange(stages=1)", most_ranks=most))
    drawn = drawings.traffic(found)
    sent = sum(bytes_moved(plan, SHAPE, phase)[0] for plan in found.plans for phase in PHASES)
    assert np.sum(drawn["bytes"]) == sent
    assert np.shape(drawn["bytes"]) == (len(drawn["from"]), len(drawn["to"]))
    assert max(np.shape(drawn["bytes"])) <= 64
    assert drawn["to"][0][0] == 0
    assert drawn["to"][-1][1] == world


@pytest.fixture(scope="module")
def ring() -> Study:
    return study(question(rs.causal(2048), 300, layout="zigzag", strategy="ring", most_ranks=80))


def test_a_long_timeline_is_drawn_in_fewer_rows_and_steps_of_the_same_length(ring: Study) -> None:
    drawn = drawings.drawings(ring)["timeline"]
    assert len(drawn["rows"]) == len(drawn["forward"]) == 64
    for name, line in (("forward", ring.cost.forward), ("backward", ring.cost.backward)):
        segments = np.array(drawn[name])
        assert segments.shape[1] == 200
        np.testing.assert_allclose(segments[:, -1, 2], line.end[drawn["rows"], -1])
        computing = (line.computed - line.begin)[drawn["rows"]].sum(axis=1)
        np.testing.assert_allclose((segments[..., 1] - segments[..., 0]).sum(axis=1), computing)
        assert (segments[:, 1:, 0] >= segments[:, :-1, 2] - 1e-12).all()


def test_a_picture_can_be_drawn(ring: Study, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    png.draw(tmp_path / "plan.png", ring)
    assert image.imread(tmp_path / "plan.png")[..., :3].std() > 0.05


def test_the_timeline_of_the_picture_has_no_colour_of_a_rank_and_the_unit_of_the_title(ring: Study) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    png._timeline(axes, ring)
    unit, size = time_unit(ring.cost.seconds)
    assert seconds(ring.cost.seconds).endswith(f" {axes.get_xlabel()}")
    assert axes.get_xlim() == pytest.approx((0, ring.cost.seconds / size)), unit
    slowest = int((ring.cost.forward.end[:, -1] + ring.cost.backward.end[:, -1]).argmax())
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [label for label in labels if "slowest" in label] == [f"slowest: rank {ring.plans[slowest].rank}"]
    assert f"64 of {len(ring.plans)}" in axes.get_title()
    shades = {png.FORWARD, png.BACKWARD, png.EXPOSED, png.IDLE}
    assert len(shades) == len(axes.get_legend().get_texts()) == 4
    assert not shades & set(COLOURS)


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(png, "why_not", lambda: "matplotlib is not installed")
    assert main(["plan", "--mask", "causal(8)", "--world", "2", "--png", "plan.png"]) == 2
    assert "matplotlib is not installed. --html draws without it" in capsys.readouterr().err
