"""``ringspan plan``: text, JSON, page and picture have the figures of the cost model; invalid arguments raise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringspan as rs
from ringspan.cli.main import main
from ringspan.cli.pictures import COLOURS
from ringspan.cli.plan import drawings, png
from ringspan.cli.plan.facts import facts
from ringspan.cli.plan.mask_data import mask_data
from ringspan.cli.plan.page import page
from ringspan.cli.plan.picture import picture
from ringspan.cli.plan.study import Question, Study, study
from ringspan.cli.units import seconds, time_unit
from ringspan.costs import HARDWARE
from ringspan.layouts import LAYOUTS, named_layout
from ringspan.planner import best_on, bytes_moved
from ringspan.planner.candidates import MAX_RANKS_BALANCED
from ringspan.plans.data import PHASES
from tests.cli.plan import browser

SHAPE = rs.Shape(heads=8, kv_heads=2, head_dim=64)
TENSORS = ("--heads", "8", "--kv-heads", "2", "--head-dim", "64")


def question(mask: rs.Mask, world: int, **options: Any) -> Question:
    return Question(mask=mask, world=world, machine=HARDWARE["h200"], shape=SHAPE, **options)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


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
    words = ["--mask", "window(100)", "--seq-len", "4096", "--world", "4", "--layout", "zigzag", "--rank", "2", *TENSORS]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert " on zigzag: " in text.splitlines()[0]
    assert "exact: all 4 ranks" in text
    assert "note      window(left=100) hides no later key" in text
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


def test_candidates_are_compared_by_all_ranks_up_to_256_and_by_some_of_more(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mask", "causal(4096)", "--layout", "zigzag", "--strategy", "exchange(stages=1)", *TENSORS]
    assert [c["exact"] for c in told(capsys, *words, "--world", "32")["candidates"]] == [True]
    assert main(["plan", *words, "--world", "32"]) == 0
    text = capsys.readouterr().out
    assert "exact: all 32 ranks were planned and simulated" in text
    assert "candidates compared" not in text
    assert [c["exact"] for c in told(capsys, *words, "--world", "300", "--cost-ranks", "4")["candidates"]] == [False]
    assert main(["plan", *words, "--world", "300", "--cost-ranks", "4"]) == 0
    assert "candidates compared by 16" in capsys.readouterr().out


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
    shades = {png.FORWARD, png.BACKWARD, png.EXPOSED, png.IDLE}
    assert len(shades) == len(axes.get_legend().get_texts()) == 4
    assert not shades & set(COLOURS)


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(png, "why_not", lambda: "matplotlib is not installed")
    assert main(["plan", "--mask", "causal(8)", "--world", "2", "--png", "plan.png"]) == 2
    assert "matplotlib is not installed. --html draws without it" in capsys.readouterr().err


# -- the page, in a browser --------------------------------------------------------------------------------------------


@pytest.mark.skipif(browser.find() is None, reason="needs Chromium (apt-get install chromium) to open the page")
@pytest.mark.parametrize("world", [2, 300], ids=["exact", "sampled"])
def test_a_browser_shows_the_report_and_its_console_is_silent(
    world: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.html"
    words = ["--mask", "causal(640) & window(99)", "--world", str(world), "--layout", "contiguous", "--cost-ranks", "9"]
    found = told(capsys, *words, *TENSORS, "--html", str(report))
    dom, console = browser.shown(report, tmp_path / "profile")
    assert console == []
    assert f"{found['chosen']['strategy']} on contiguous</h1>" in dom
    assert ("all 2 ranks were planned" if world == 2 else "sampled: 9 of 300 ranks") in dom
    body = dom.partition('id="candidates"')[2].partition("</table>")[0]
    assert body.count("<tr") == len(found["candidates"]) + 1
    assert body.count('class="rejected"') == sum(c["rejected"] is not None for c in found["candidates"])
    # 640 tokens are as many cells, so that what was painted is the area of the mask.
    assert int(browser.attribute(dom, "mask", "data-drawn")) == found["mask"]["area"]
    assert int(browser.attribute(dom, "traffic", "data-drawn")) > 0
    assert int(browser.attribute(dom, "load", "data-drawn")) == len(found["ranks"])
    assert int(browser.attribute(dom, "timeline", "data-drawn")) >= 2 * len(found["ranks"])


ZOOM = """<script>
const seen = [];
const note = () => seen.push([...view, Number(byId("mask").dataset.drawn)].join(" "));
const press = (key) => { byId("mask").dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true })); note(); };
location.hash = "#mask=100000,100040,99990,100030";
addEventListener("hashchange", () => {
  note();
  press("-");
  press("ArrowRight");
  byId("zoom-in").click();
  note();
  press("0");
  const box = byId("mask").getBoundingClientRect();
  const at = { clientX: box.left + MASK_LEFT + 1, clientY: box.bottom - 20, ctrlKey: true, deltaY: -1, cancelable: true };
  byId("mask").dispatchEvent(new WheelEvent("wheel", at));
  note();
  byId("view").dataset.seen = seen.join(", ");
});
</script>"""


@pytest.mark.skipif(browser.find() is None, reason="needs Chromium (apt-get install chromium) to open the page")
def test_the_page_zooms_into_the_mask(tmp_path: Path) -> None:
    """Views from a link, keys, buttons and the wheel; what is painted is the area of the mask in the view."""
    mask = rs.documents([100_020, 2**20 - 100_020]) & rs.window(left=30)
    text = page(found := study(question(mask, 4, compare_fewer=True)), facts(found))
    (tmp_path / "zoom.html").write_text(text.replace("</body>", ZOOM + "</body>"), encoding="utf-8")
    dom, console = browser.shown(tmp_path / "zoom.html", tmp_path / "profile")
    assert console == []
    views = [[int(n) for n in shown.split()] for shown in browser.attribute(dom, "view", "data-seen").split(", ")]
    assert [view[:4] for view in views[:5]] == [
        [100_000, 100_040, 99_990, 100_030],
        [99_980, 100_060, 99_970, 100_050],
        [99_980, 100_060, 99_990, 100_070],
        [100_000, 100_040, 100_010, 100_050],
        [0, 2**20, 0, 2**20],
    ]
    for q0, q1, k0, k1, painted in views[:4]:
        query, key = np.arange(q0, q1)[:, None], np.arange(k0, k1)
        assert painted == ((key <= query) & (key >= query - 30) & ((key < 100_020) == (query < 100_020))).sum()
    q0, q1, k0, k1, _ = views[5]  # the lower left corner stays where the pointer is
    assert k0 < 1000
    assert q1 > 2**20 - 30_000
    assert q1 - q0 == pytest.approx(2**19.5, abs=1)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "balanced"])
def test_a_mask_of_many_bands_is_drawn_in_cells(layout: str) -> None:
    mask = rs.documents([700] * 9 + [5, 95])
    made, _ = named_layout(layout, mask, 4)
    drawn, data = picture(mask, made, made), mask_data(mask, made, made, most=3)
    assert "11 bands" in data["note"]
    seen = np.zeros(mask.lengths, dtype=bool)
    for q0, q1, k0, k1, *_ in data["bands"]:
        seen[q0:q1, k0:k1] = True
    assert np.array_equal(seen[drawn.query][:, drawn.key], drawn.seen())
    pieces = {start: owner for owner, start, *_ in data["k_pieces"]}
    assert [pieces[max(s for s in pieces if s <= key)] for key in drawn.key] == drawn.k_owner.tolist()
    assert mask_data(mask, made, made)["note"] == ""


def test_what_a_name_holds_cannot_leave_its_place(tmp_path: Path) -> None:
    found = study(question(rs.causal(64), 2))
    evil = "</script><script>alert(1)</script>&<b>"
    text = page(found, {**facts(found), "notes": [evil], "chosen": {**facts(found)["chosen"], "layout": evil}})
    assert "alert(1)</script>" not in text
    assert "<b>" not in text
    assert text.count("<script") == 2
    assert "http://" not in text
    assert "https://" not in text
    if browser.find() is not None:
        (tmp_path / "evil.html").write_text(text, encoding="utf-8")
        dom, console = browser.shown(tmp_path / "evil.html", tmp_path / "profile")
        assert console == []
        assert "&lt;/script&gt;&lt;script&gt;alert(1)" in dom
