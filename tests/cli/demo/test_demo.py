"""A short run of the whole demo that must pass, one that must fail, and its parts."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ringspan as rs
from ringspan.cli import demo
from ringspan.cli.demo.config import ModelConfig
from ringspan.cli.demo.data import BEGIN, VOCABULARY, Document, Pack, library_documents, packs
from ringspan.cli.demo.model import build
from ringspan.cli.demo.report import TOLERANCE, LossComparison, as_json, failure, rank_table
from ringspan.cli.demo.training import RankReport, Training, dense_mask, token_losses, train_alone
from ringspan.cli.main import main
from ringspan.cli.units import seconds
from ringspan.errors import InputError
from ringspan.layouts import areas
from ringspan.planner import bytes_moved
from ringspan.plans.data import PHASES

WORLD, STEPS, LENGTH, SEED = 3, 3, 331, 5


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])  # type: ignore[no-any-return]


def run(*words: object) -> Ran:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = demo.run(parser.parse_args([str(word) for word in words]))
    return Ran(code, out.getvalue(), err.getvalue())


SHORT = ("--world", WORLD, "--steps", STEPS, "--seq-len", LENGTH, "--seed", SEED, "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "made" / "on the way"


@pytest.fixture(scope="module")
def passed(folder: Path) -> Ran:
    return run(*SHORT, "--out", folder)


@pytest.fixture(scope="module")
def failed() -> Iterator[Ran]:
    """Broken on purpose. Also without matplotlib: everything but the pictures must work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        yield run(*SHORT, "--sabotage")


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(config=ModelConfig(), packs=packs(library_documents(), count=STEPS, length=LENGTH, seed=SEED), seed=SEED)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads that share few cores with other processes mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- a run that passes -------------------------------------------------------------------------------------------------


def test_the_two_curves_agree(passed: Ran) -> None:
    assert passed.code == 0
    found = passed.summary
    assert found["ok"]
    assert found["parted_at_step"] is None
    assert found["max_difference"] < 1e-5 < TOLERANCE
    split, alone = found["losses"]["split"], found["losses"]["alone"]
    assert len(split) == len(alone) == STEPS
    assert max(abs(a - b) for a, b in zip(split, alone, strict=True)) <= found["max_difference"]
    assert split[-1] < split[0]


def test_the_first_loss_is_that_of_separate_documents(passed: Ran, training: Training) -> None:
    """No mask, no packing, no ranks, float64: each document alone, from position 0 (rotary embeddings know only
    distances)."""
    model = build(training.config, SEED).double()
    pack = training.packs[0]
    losses = []
    for document in torch.tensor(pack.tokens).split(pack.lengths):
        seen = torch.ones(len(document), len(document), dtype=torch.bool).tril()
        logits = model(document[None], positions=torch.arange(len(document)), attn_mask=seen)
        losses.append(token_losses(logits[:, :-1], document[None, 1:]).flatten())
    expected = torch.cat(losses).mean().item()
    assert passed.summary["losses"]["split"][0] == pytest.approx(expected, abs=1e-5)


def test_figures_of_the_ranks_are_those_of_the_plans(passed: Ran, training: Training) -> None:
    config, masks = training.config, [rs.documents(pack.lengths) for pack in training.packs]
    shape = rs.Shape(heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype="float32")
    for n, rank in enumerate(passed.summary["ranks"]):
        plans = [rs.plan(mask, world=WORLD, rank=n) for mask in masks]
        moved = [bytes_moved(plan, shape, phase) for plan in plans for phase in PHASES]
        pairs = zip(masks, plans, strict=True)
        assert rank["tokens"] == sum(plan.q_rows for plan in plans)
        assert rank["area"] == sum(plan.area for plan in plans)
        assert (rank["sent"], rank["received"]) == tuple(config.layers * sum(way) for way in zip(*moved, strict=True))
        gathers = [rs.plan(mask, world=WORLD, rank=n, strategy="gather", layout=plan.q_layout) for mask, plan in pairs]
        assert rank["gather_received"] == config.layers * sum(
            bytes_moved(plan, shape, phase)[1] for plan in gathers for phase in PHASES
        )
    assert sum(rank["area"] for rank in passed.summary["ranks"]) == sum(mask.area for mask in masks)
    assert sum(rank["tokens"] for rank in passed.summary["ranks"]) == STEPS * LENGTH
    assert math.isclose(sum(rank["share"] for rank in passed.summary["ranks"]), 1.0)
    assert passed.summary["digest"] == rs.plan(masks[-1], world=WORLD).digest


def test_text_output(passed: Ran, folder: Path) -> None:
    for words in ("331 bytes of Python a step (not a multiple of 3", "largest difference", "gather", "LocalWorld", "explain()"):
        assert words in passed.out
    assert str(folder / "mask.png") in passed.out
    assert "\x1b" not in passed.err + passed.out


def test_naive_sharding_is_far_off(passed: Ran) -> None:
    losses = passed.summary["losses"]
    off = [abs(naive - alone) for naive, alone in zip(losses["naive"], losses["alone"], strict=True)]
    assert len(off) == STEPS
    assert min(off) > 10 * TOLERANCE
    assert "each rank sees only its own keys" in passed.out


def test_memory_of_a_rank_falls_as_ranks_are_added(passed: Ran) -> None:
    memory = {int(world): held for world, held in passed.summary["memory"].items()}
    assert memory.keys() == {1, 2, WORLD}
    for world, held in memory.items():
        assert 1 / world <= held / memory[1] <= 1.3 / world


def test_the_report_is_that_of_a_plan_that_most_steps_used(passed: Ran, folder: Path) -> None:
    page = (folder / "plan.html").read_text(encoding="utf-8")
    choice, _ = Counter(passed.summary["plans"]).most_common(1)[0]
    strategy, layout = choice.split(" on ")
    assert re.search(rf"<title>\s*{strategy}[^<]* on {layout}, {WORLD} ranks", page)
    assert str(folder / "plan.html") in passed.out


def test_unequal_shares_are_explained_with_the_estimates_of_the_cost_model(passed: Ran, training: Training) -> None:
    plans = [rs.plan(rs.documents(pack.lengths), world=WORLD) for pack in training.packs]
    shares = [areas(plan.mask, plan.q_layout).max() / plan.mask.area for plan in plans]
    step = shares.index(max(shares))
    equal = rs.plan(plans[step].mask, world=WORLD, layout="balanced")
    taken, instead = (seconds(plan.cost("h200x8").seconds) for plan in (plans[step], equal))
    text = " ".join(passed.out.split())
    assert f"Step {step + 1}, with {shares[step]:.0%} of the pairs on one rank" in text
    assert f"is estimated to take {taken} a layer, and {instead} with equal shares" in text
    drawn = demo.caption(demo.plans_of(training, WORLD))
    assert drawn.startswith(f"step {shares.index(min(shares)) + 1} of {STEPS}, the one with the most equal shares; ")
    assert f"in step {step + 1} one rank has {shares[step]:.0%}" in drawn


def test_equal_shares_need_no_explanation(training: Training) -> None:
    assert demo.why_uneven(training, 1) == ""
    assert demo.caption(demo.plans_of(training, 1)).endswith("the one with the most equal shares")


@pytest.mark.slow  # the workers import transformers
def test_a_model_of_transformers_trains_alike(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ran = run("--hf", "--world", 2, "--steps", 2, "--seq-len", 101, "--json", "--out", tmp_path)
    assert ran.code == 0, ran.err
    assert ran.summary["max_difference"] < 1e-5


def test_hf_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'ringspan\[hf\]'"):
        run("--hf")


@pytest.mark.parametrize("name", ["mask.png", "losses.png", "memory.png"])
def test_pictures(passed: Ran, folder: Path, name: str) -> None:
    assert str(folder / name) in passed.summary["pictures"]
    image = pytest.importorskip("matplotlib.image").imread(folder / name)
    assert min(image.shape[:2]) > 600
    colours = {tuple(colour) for colour in image[::3, ::3, :3].reshape(-1, 3).tolist()}
    assert len(colours) > 40


# -- a run that fails --------------------------------------------------------------------------------------------------


def test_sabotage_fails_with_the_step(failed: Ran) -> None:
    assert failed.code == 1
    found = failed.summary
    assert not found["ok"]
    assert found["max_difference"] > TOLERANCE
    step = found["parted_at_step"]
    assert f"FAILED: the two curves differ at step {step}:" in failed.err
    assert "the last rank shifted the positions of its tokens by 3" in failed.err
    differences = [abs(a - b) for a, b in zip(found["losses"]["split"], found["losses"]["alone"], strict=True)]
    assert step == 1 + next(n for n, difference in enumerate(differences) if difference > TOLERANCE)


def test_without_matplotlib(failed: Ran) -> None:
    assert "pip install 'ringspan[demo]'" in failed.out
    assert failed.summary["pictures"] == []
    assert len(failed.summary["losses"]["split"]) == STEPS


def test_a_folder_that_cannot_be_made_is_named_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.pictures, "why_not", lambda: None)
    monkeypatch.setattr(demo, "train_all", lambda *_: pytest.fail("the training has begun"))
    file = tmp_path / "notes.txt"
    file.write_text("not a folder")
    assert main(["demo", "--out", str(file)]) == 2
    assert "cannot make this folder, it is a file" in capsys.readouterr().err


def test_one_rank_cannot_be_sabotaged() -> None:
    with pytest.raises(InputError, match="--world 2"):
        run("--world", 1, "--sabotage")


@pytest.mark.parametrize("words", [("--steps", 0), ("--seq-len", 7), ("--world", "two"), ("--sabotage", "everything")])
def test_invalid_arguments(words: tuple[object, ...]) -> None:
    with pytest.raises(SystemExit):
        run(*words)


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_one_process_is_deterministic_and_learns(training: Training) -> None:
    longer = Training(config=ModelConfig(), packs=packs(library_documents(), count=12, length=LENGTH, seed=SEED), seed=SEED)
    first, second = (train_alone(longer, lambda n, loss: True) for _ in range(2))
    assert first == second
    assert first[0] > math.log(VOCABULARY)
    assert sum(first[-3:]) / 3 < first[0] - 1.5
    assert first[:STEPS] == train_alone(training, lambda n, loss: True)
    assert train_alone(training, lambda n, loss: False) == first[:1]


def test_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (build(ModelConfig(), seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])


def test_packs_are_full_uneven_and_new_at_every_step() -> None:
    made = packs(library_documents(), count=20, length=1531, seed=0)
    assert made == packs(library_documents(), count=20, length=1531, seed=0)
    assert all(len(pack.tokens) == sum(pack.lengths) == 1531 and max(pack.lengths) < 1531 for pack in made)
    assert len({pack.lengths for pack in made}) == 20
    for pack in made:
        starts = [0, *torch.tensor(pack.lengths).cumsum(0).tolist()]
        assert all(pack.tokens[start] == BEGIN for start in starts[:-1])
        assert pack.tokens.count(BEGIN) == len(pack.lengths) == len(pack.names)


def test_packs_repeat_lengths_only_if_there_are_no_others() -> None:
    made = packs((Document("a", b"1234"), Document("b", b"12345678")), count=30, length=8, seed=0)
    assert len(made) == 30
    assert len({pack.lengths for pack in made[:2]}) == 2
    assert all(len(pack.tokens) == 8 for pack in made)


def test_labels_are_the_next_tokens_and_end_with_their_document() -> None:
    pack = Pack(names=("a", "b", "c"), lengths=(3, 1, 2), tokens=(256, 7, 8, 256, 256, 9))
    tokens, labels, weights = pack.tensors()
    assert tokens.tolist() == [[256, 7, 8, 256, 256, 9]]
    assert weights.tolist() == [[1, 1, 0, 0, 1, 0]]
    assert labels[weights.bool()].tolist() == [7, 8, 9]
    assert torch.equal(dense_mask(pack), torch.from_numpy(rs.documents([3, 1, 2]).dense()))


def comparison(alone: list[float], *ranks: list[float]) -> LossComparison:
    more: dict[str, Any] = {"tokens": 1, "area": 0, "sent": 0, "received": 0, "gather_received": 0, "choices": (), "digest": ""}
    return LossComparison(alone=tuple(alone), ranks=tuple(RankReport(losses=tuple(losses), **more) for losses in ranks))


@pytest.mark.parametrize(
    ("split", "step"),
    [
        ([[3.0, 2.0], [3.0, 2.0]], None),
        ([[3.00009, 2.0], [3.0, 2.0]], None),
        ([[3.0, 2.0], [3.0, 2.001]], 2),
        ([[3.0, math.nan], [3.0, math.nan]], 2),
        ([[math.nan, 2.0], [3.0, 2.0]], 1),
        ([[3.0, 2.0], [math.inf, 2.0]], 1),
    ],
)
def test_a_difference_of_any_rank_counts(split: list[list[float]], step: int | None) -> None:
    found = comparison([3.0, 2.0], *split)
    assert found.parted_at == step
    summary = json.loads(as_json(found), parse_constant=pytest.fail)
    assert summary["ok"] is (step is None)
    assert rank_table(found).row_count == len(split)
    if step:
        assert found.largest[1] == step
        assert f"differ at step {step}:" in failure(found, None)
        assert "ringspan check" in failure(found, None)
