"""The page of ``ringspan plan --html``, in a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ringspan as rs
from ringspan.cli.plan.facts import facts
from ringspan.cli.plan.mask_data import mask_data
from ringspan.cli.plan.page import page
from ringspan.cli.plan.picture import picture
from ringspan.cli.plan.study import study
from ringspan.layouts import named_layout
from tests.cli.plan import browser
from tests.cli.plan.questions import TENSORS, question, told


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
