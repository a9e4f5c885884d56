"""The Python code of the pages in docs/ runs unchanged, and gives what the pages say.

A block marked ``python`` runs in a test; one marked ``py`` needs what the tests do not have (a GPU, another package).
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import ringspan as rs
from ringspan.testing.assertions import assert_close
from tests.conftest import Pools
from tests.torchrun import torchrun

DOCS = Path(__file__).parent.parent / "docs"
MIGRATING = ("ring-flash-attention", "yunchang", "deepspeed-ulysses", "transformer-engine")
# Pages whose code runs in another file of tests.
ELSEWHERE = {"migration.md": "tests/compat/test_migration.py", "pitfalls.md": "tests/test_pitfalls.py"}
ONE_PROCESS = ("start.md", "concepts.md", "choosing.md", "attention.md", "benchmarks.md")
HERE = ["training.md", "batches.md", *ONE_PROCESS, *(f"migrating/{name}.md" for name in MIGRATING)]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def run_blocks(page: str, code: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in code:
        exec(compile(block, page, "exec"), names)
    return names


def test_every_page_with_code_is_run() -> None:
    with_code = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if blocks(str(page.relative_to(DOCS)))]
    assert sorted(with_code) == sorted([*HERE, *ELSEWHERE])


# -- training.md: one script for four processes ------------------------------------------------------------------------


def run_training(rank: int, code: list[str]) -> dict[str, Any]:
    torch._dynamo.reset()  # other tests in this process have compiled the forward of nn.Sequential, too
    torch.manual_seed(rank // 2)  # the ranks of a replica need the same sequence and parameters
    names = run_blocks("training.md", code)
    gradients = [p.grad for p in names["model"].parameters()]
    return {
        "loss": names["loss"].item(),
        "out": isinstance(names["out"], DTensor) and tuple(names["out"].shape),
        "gradients": all(isinstance(g, DTensor) and bool(g.to_local().isfinite().all()) for g in gradients),
    }


def test_the_examples_of_training_md_run(pools: Pools) -> None:
    code = blocks("training.md")
    first, *others = pools(4).run(run_training, code)
    assert len(code) == 13
    assert first["out"] == (2, 4, 531, 8)
    assert first["gradients"]
    assert first["loss"] == pytest.approx(5.5, abs=1.5)  # an untrained model of 256 tokens: log(256)
    assert all(other == first for other in others)


# -- batches.md: one script for four processes --------------------------------------------------------------------------


def run_batches(rank: int, code: list[str]) -> dict[str, float]:
    names = run_blocks("batches.md", [block.replace('dist.init_process_group("gloo")', "") for block in code])
    return {name: float(value) for name, value in names.items() if name.endswith("_loss")}


def test_the_examples_of_batches_md_run(pools: Pools) -> None:
    first, *others = pools(4).run(run_batches, blocks("batches.md"))
    assert first.keys() == {"tree_loss", "rows_loss", "roll_loss", "batch_loss"}
    assert all(loss == pytest.approx(5.5, abs=1.5) for loss in first.values())  # an untrained model of 256 tokens: log(256)
    assert all(other == first for other in others)


# -- start.md: code for one process, and a script for torchrun ---------------------------------------------------------


def start_script() -> str:
    (script,) = [block for block in blocks("start.md") if "init_process_group" in block]
    return script


def test_the_script_of_the_start_page_is_equal_to_one_process(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(start_script(), encoding="utf-8")
    printed = torchrun(path, 2)
    assert "2 ranks are equal to one process" in printed
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", printed)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)


def run_script(rank: int, script: str) -> tuple[str, Any, str]:
    """What the script printed, and the cause and text of its result of check_parity."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        parity = run_blocks("start.md", [script])["parity"]
    return printed.getvalue(), parity.cause, str(parity)


def test_the_mistake_of_the_start_page_is_found(pools: Pools) -> None:
    wrong = start_script().replace("cp.positions(documents=LENGTHS)", "torch.arange(mine.shape[1])")
    wrong = re.sub(r"dist\.(init|destroy)_process_group\(.*", "", wrong)  # the workers have a group
    assert wrong.count("torch.arange(mine.shape[1])") == 1
    results = pools(4).run(run_script, wrong)
    for _, cause, found in results:
        assert cause == "positions"
        assert "4 ranks are NOT equal to one process" in found
        assert "probable cause: positions are not sharded" in found
    assert results[0][2] in results[0][0]


def test_the_rest_of_the_start_page_runs() -> None:
    run_blocks("start.md", [block for block in blocks("start.md") if "init_process_group" not in block])


# -- pages for one process ---------------------------------------------------------------------------------------------


def test_the_code_of_the_concepts_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks("concepts.md", blocks("concepts.md"))
    assert "forward" in capsys.readouterr().out


def test_the_code_of_the_page_on_choosing_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks("choosing.md", blocks("choosing.md"))
    assert f"```\n{capsys.readouterr().out}```\n" in (DOCS / "choosing.md").read_text(encoding="utf-8")


CHOSEN = {
    "causal, 131,072 tokens": rs.causal(131_072),
    "causal, 1,048,576 tokens": rs.causal(1_048_576),
    "all pairs, 131,072 tokens": rs.full(131_072),
    "32 packed documents of 4,096 tokens": rs.documents([4_096] * 32),
    "three packed documents of 90,000, 20,000 and 21,072 tokens": rs.documents([90_000, 20_000, 21_072]),
    "sliding window of 4,096, 131,072 tokens": rs.causal(131_072) & rs.window(left=4_096),
    "the last 4,096 queries of 131,072 keys": rs.causal(4_096, 131_072, align="end"),
}


def test_the_choices_of_the_page_on_choosing_are_those_of_best_on() -> None:
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (\d+) \| `(\w+)(?:\(.*\))?` on `(\w+)`", page, flags=re.MULTILINE)
    assert [attention for attention, *_ in rows] == [*CHOSEN]
    shape = rs.Shape(heads=32, kv_heads=8, head_dim=128)
    for attention, ranks, strategy, layout in rows:
        best = rs.best_on(CHOSEN[attention], world=int(ranks), hardware="h200x8", shape=shape).best
        assert (best.strategy.partition("(")[0], best.layout.name) == (strategy, layout), attention


def test_the_saving_of_a_tree_is_what_the_page_on_batches_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks("batches.md") if "ratios" in block]
    run_blocks("batches.md", ["import ringspan as rs", block])
    assert f"# {capsys.readouterr().out}" in block


def test_the_code_of_the_page_on_benchmarks_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks("benchmarks.md", blocks("benchmarks.md"))
    shares = dict(re.findall(r"(\w+) (0\.\d+)", capsys.readouterr().out))
    assert shares.keys() == {"contiguous", "zigzag", "round_robin", "balanced"}
    assert all(0 < float(share) < 1 for share in shares.values())


def test_the_code_of_the_page_on_attention_functions_runs() -> None:
    names = run_blocks("attention.md", [block for block in blocks("attention.md") if 'device="cuda"' not in block])
    assert names["out"].shape == names["q"].shape
    assert names["bias"].grad.isfinite().all()


@pytest.mark.gpu
def test_the_example_for_a_gpu() -> None:
    if "FA4" not in rs.available():
        pytest.skip("FA4 is not installed")
    (block,) = [block for block in blocks("attention.md") if 'device="cuda"' in block]
    names = run_blocks("attention.md", [block])
    assert names["out"].shape == (1, 8, 4096, 128)
    assert rs.current() is None


# -- migrating/: each page ends with the whole result, which one process computes too -------------------------------------


def run_migrated(rank: int, page: str, code: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    names = run_blocks(page, code)
    q, k, v = (names["cp"].unshard(names[x], dim=1).transpose(1, 2).double() for x in "qkv")
    visible = torch.from_numpy(names["mask"].dense())
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(1, 2)
    return names["whole"], expected


@pytest.mark.parametrize("page", MIGRATING)
def test_migrated_code_is_exact(pools: Pools, page: str) -> None:
    for whole, expected in pools(4).run(run_migrated, page, blocks(f"migrating/{page}.md")):
        assert_close(whole, expected.float(), atol=1e-5, rtol=1e-5)
