"""Random cases against dense float64 attention: two thousand in this process, a hundred on real ones; and that they can
fail.

Cases are drawn in ringspan/testing/fuzz.py and compared in ringspan/testing/comparison.py. A failing chunk prints how
to run a case again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan import planner, plans
from ringspan.cli import check
from ringspan.engine import slots
from ringspan.kernels import accumulators, cpu
from ringspan.layouts import LAYOUTS
from ringspan.masks.expressions import parse_mask
from ringspan.strategies import STRATEGIES
from ringspan.testing import fuzz
from ringspan.testing.check import CaseResult, run_local
from ringspan.testing.comparison import EXACT, Figure, Results, compare, tensors, torch_alone
from ringspan.testing.threads import one_thread
from ringspan.transports import in_process

SEED = 2026
CASES, CHUNK = 2000, 100


def ringspan_check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the JSON of the last line, and the rest."""
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    code = check.run(parser.parse_args([*words, "--json"]))
    *lines, last = capsys.readouterr().out.splitlines()
    return code, json.loads(last), "\n".join(lines)


# -- the cases ---------------------------------------------------------------------------------------------------------


FIRST_CHUNKS = [pytest.param(first, marks=[] if first < 500 else pytest.mark.slow) for first in range(0, CASES, CHUNK)]


@pytest.mark.parametrize("first", FIRST_CHUNKS)
def test_cases(first: int) -> None:
    with one_thread():
        outcomes = [run_local(fuzz.draw(SEED, index)) for index in range(first, first + CHUNK)]
    failed = [
        f"{o.case}: {'; '.join(o.problems)} (ringspan check --seed {SEED} --only {o.case.index})"
        for o in outcomes
        if o.problems
    ]
    assert not failed, "\n".join(failed)
    assert max(o.worst for o in outcomes if o.case.dtype == "float64") <= EXACT


@pytest.mark.parametrize(("world", "cases"), [(3, 60), (4, 40)])
def test_cases_on_processes(capsys: pytest.CaptureFixture[str], world: int, cases: int) -> None:
    words = ("--processes", "--world", str(world), "--cases", str(cases), "--seed", str(SEED))
    code, told, text = ringspan_check(capsys, *words)
    assert (code, told["cases"], told["failed"]) == (0, cases, 0), text
    assert 0 < told["worst_error"] <= EXACT


# -- coverage of the drawn cases ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases() -> list[fuzz.Case]:
    return [fuzz.draw(SEED, index) for index in range(CASES)]


def test_every_kind_of_case_is_among_them(cases: list[fuzz.Case]) -> None:
    kinds: dict[str, set[Any]] = {
        "world": set(range(1, 9)),
        "layout": {*LAYOUTS, "auto", "spans"},
        "kv_layout": {*LAYOUTS, "auto", "spans", None},
        "strategy": {*STRATEGIES, "auto"},
        "dtype": {"float64", "float32", "bfloat16", "float16"},
        "batch": {1, 2},
        "lse": {True, False},
    }
    for field, all_kinds in kinds.items():
        values = [getattr(case, field) for case in cases]
        told = {"spans" if isinstance(v, tuple) else v.partition("(")[0] if isinstance(v, str) else v for v in values}
        assert told == all_kinds, field
    text = "\n".join(case.mask for case in cases)
    for word in ("full(", "causal()", 'align="end"', 'align="start"', "window(left=", "window(right=", "documents([", "ids=["):
        assert word in text
    for word in ("kv_lengths=", "causal=False", "prefix(", "chunked(", "tree(", "from_bands(", ") & (", ") | (", ") - (", "~("):
        assert word in text
    assert {case.heads // case.kv_heads for case in cases} == {1, 2, 3, 4}
    split = [case for case in cases if case.strategy == "ulysses"]
    assert any(case.heads < case.world for case in split)
    assert any(case.heads > case.world and case.heads % case.world for case in split)
    assert any(case.kv_heads < case.world <= case.heads for case in split)
    assert any(case.head_dim != case.v_dim for case in cases)
    assert any(case.scale is not None for case in cases)


def test_the_corners_are_among_them(cases: list[fuzz.Case]) -> None:
    masks = [parse_mask(case.mask) for case in cases]
    lengths = [n for mask in masks for n in mask.lengths]
    assert min(lengths) == 1
    assert 290 < max(lengths) <= 300
    assert sum(mask.lengths[0] != mask.lengths[1] for mask in masks) > CASES // 10
    assert sum(mask.area == 0 for mask in masks) > 10
    empty_rows = sum(mask.area > 0 and not mask.dense().any(1).all() for mask in masks)
    assert empty_rows > CASES // 10
    few_tokens = sum(mask.lengths[0] < case.world for mask, case in zip(masks, cases, strict=True))
    assert few_tokens > CASES // 20


# -- cases can be run again --------------------------------------------------------------------------------------------


def test_a_case_does_not_depend_on_the_others() -> None:
    one = fuzz.draw(7, 31)
    assert one == [fuzz.draw(7, index) for index in range(40)][31]
    assert one != fuzz.draw(8, 31)
    assert fuzz.draw(7, 31, world=5).world == 5


@pytest.mark.parametrize("index", range(0, 200, 10))
def test_a_case_comes_back_from_json(index: int) -> None:
    case = fuzz.draw(SEED, index)
    assert fuzz.Case.from_json(case.to_json()) == case


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layout": "zigzag"}', "nonsense"])
def test_what_is_not_a_case(text: str) -> None:
    with pytest.raises(rs.InputError, match=r"invalid case: .*Expected a JSON object with the fields seed"):
        fuzz.Case.from_json(text)


def test_only_one_case(capsys: pytest.CaptureFixture[str]) -> None:
    code, told, text = ringspan_check(capsys, "--seed", "7", "--only", "31")
    assert (code, told["cases"], told["failures"]) == (0, 1, [])
    case = fuzz.Case.from_json(text.splitlines()[1])
    assert case == fuzz.draw(7, 31)
    code, told, _ = ringspan_check(capsys, "--case", dataclasses.replace(case, world=2, strategy="gather").to_json())
    assert (code, told["cases"]) == (0, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cases", "0"), "--cases must be at least 1"),
        (("--seed", "-1"), "--seed must be at least 0"),
        (("--world", "0"), "--world must be at least 1"),
        (("--only", "-3"), "--only must be at least 0"),
        (("--processes",), "--processes needs --world"),
        (("--case", "{}"), "invalid case: "),
    ],
)
def test_what_check_does_not_take(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    with pytest.raises(rs.InputError, match=message):
        ringspan_check(capsys, *words)


# -- comparison --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_", "should", "error"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5 / 2.5),
        ([0.25, 0.5], [0.25, 0.25], 0.25),
        ([-torch.inf, 1.0], [-torch.inf, 1.0], 0.0),
        ([-torch.inf, 1.0], [0.0, 1.0], torch.inf),
        ([-1e9, 1.0], [-torch.inf, 1.0], torch.inf),
        ([torch.nan, 1.0], [0.0, 1.0], torch.inf),
        ([1.0], [1.0, 1.0], torch.inf),
        ([], [], 0.0),
    ],
)
def test_how_far_off(is_: list[float], should: list[float], error: float) -> None:
    got, truth = (Results(*[torch.tensor(x, dtype=torch.float64)] * 5) for x in (is_, should))
    assert compare(got, truth, dict.fromkeys(Results._fields, 0.0)) == dict.fromkeys(Results._fields, Figure(error, 0.0))


def test_torch_alone_has_no_nan_where_a_query_sees_nothing() -> None:
    case = dataclasses.replace(fuzz.draw(SEED, 0), mask="from_bands([(2, 4, 0, 3, -9, 9)], 6, 5)", dtype="bfloat16", lse=True)
    mask = parse_mask(case.mask)
    alone = torch_alone(tensors(case, mask), torch.from_numpy(mask.dense()), case.scale)
    assert not any(x.isnan().any() for x in alone)
    assert alone.lse.isneginf()[0, 0].tolist() == [True, True, False, False, True, True]


# -- errors are detected -----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    rs.clear_caches()
    yield
    rs.clear_caches()


def without_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    real = planner.plan_rank

    def broken(*args: Any) -> plans.Plan:
        plan = real(*args)
        *steps, last = plan.program.forward
        lazy = dataclasses.replace(plan.program, forward=(*steps, dataclasses.replace(last, tasks=last.tasks[1:])))
        return dataclasses.replace(plan, program=lazy)

    for module in ("plan_function", "plan_class"):
        monkeypatch.setattr(f"ringspan.planner.{module}.plan_rank", broken)


def wrong_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(into: rs.Partial, other: rs.Partial, old: Any = None) -> None:
        into.out.lerp_(other.out.to(into.out.dtype), 0.5)

    monkeypatch.setattr(accumulators, "merge_", broken)


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a small error, in tasks of more than one band."""
    real = cpu.attend
    monkeypatch.setattr(
        cpu, "attend", lambda *args, scale: real(*args, scale=scale * (1 + 1e-9) if len(args[3]) > 1 else scale)
    )


def lost_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returned results overwrite instead of being added."""
    real = slots.Slots._add

    def broken(self: Any, t: Any, message: Any) -> None:
        for start, stop in t.rows:
            self.gradients[t.what][t.slot].clear(start, stop)
        real(self, t, message)

    monkeypatch.setattr(slots.Slots, "_add", broken)


def wrong_empty_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "EMPTY_LSE", -1e30)


def hidden_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    real = in_process.InProcessTransport._deliver

    def broken(self: Any, *args: Any) -> None:
        real(self, *args)
        self.traffic[0].sent += 1

    monkeypatch.setattr(in_process.InProcessTransport, "_deliver", broken)


def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("there is none left")

    monkeypatch.setattr(cpu, "attend", broken)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (without_a_task, "verify: forward: "),
        (wrong_merge, "out is "),
        (wrong_scale, "out is "),
        (lost_gradient, "dk is "),
        (wrong_empty_rows, "lse is off by inf"),
        (hidden_traffic, "its plan says "),
        (out_of_memory, "raised MemoryError: there is none left"),
    ],
)
@pytest.mark.usefixtures("fresh_plans")
def test_a_broken_engine_is_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    break_it: Callable[[pytest.MonkeyPatch], None],
    said: str,
) -> None:
    break_it(monkeypatch)
    code, told, text = ringspan_check(capsys, "--cases", "40", "--seed", "7")
    assert code == 1
    assert told["failed"] == len(told["failures"]) > 0
    assert said in text
    assert f"ringspan check --seed 7 --only {told['failures'][0]}" in text


@pytest.mark.parametrize("where", [(), ("--processes", "--world", "2")])
def test_a_case_that_raises_has_failed(capsys: pytest.CaptureFixture[str], where: tuple[str, ...]) -> None:
    """On processes too, where a rank that raises leaves the others waiting."""
    case = dataclasses.replace(fuzz.draw(7, 0, world=2), strategy="rings")
    code, told, text = ringspan_check(capsys, "--case", case.to_json(), *where)
    assert (code, told["failed"], told["failures"]) == (1, 1, [0])
    assert "PlanError: no strategy is called 'rings'" in text
    assert "again: ringspan check --case" in text


def test_a_case_that_was_never_finished_has_failed() -> None:
    done, lost = fuzz.draw(7, 0), fuzz.draw(7, 1)
    summary = check.summarise([CaseResult(case=done, figures={"out": Figure(1e-15, EXACT)}, problems=())], [done, lost])
    assert (summary["cases"], summary["failed"], summary["failures"]) == (2, 1, [1])
