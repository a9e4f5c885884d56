"""Machines by name and from files, and invalid machines."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

import ringspan as rs
from ringspan.costs import HARDWARE, Hardware, named_hardware

H200 = HARDWARE["h200"]

NAN = float("nan")
# Invalid values of each field.
WRONG: dict[str, list[Any]] = {
    "name": [None, 8],
    "source": [None],
    "per_node": [0, -8, 8.0, NAN, "8", True],
    "launch_s": [-1e-6, NAN, float("inf"), "30 us", None],
    "tile": [-1, 0.5, NAN, "128"],
    "memory": [0, -1, 1.5, NAN, "141 GB"],
    "overlap": [-0.1, 1.1, NAN, "most"],
    "copy_bytes_per_s": [0, -1.0, NAN, "fast"],
    "copy_launch_s": [-1e-6, NAN, float("inf"), "4 us"],
    "query_passes": [-1, NAN, float("inf"), None],
    "key_passes": [-0.5, NAN, "two"],
    "within.latency_s": [-1e-6, NAN, float("inf"), "5 us"],
    "within.bytes_per_s": [0, -1.0, NAN, "900 GB/s"],
    "between.latency_s": [-1e-6],
    "between.bytes_per_s": [0],
    "forward.full": [0, -1.0, NAN, "fast"],
    "forward.causal": [0],
    "backward.window": [0, None],
}
CASES = [(field, value) for field, values in WRONG.items() for value in values]


def test_every_field_has_a_case() -> None:
    assert {field.partition(".")[0] for field in WRONG} == set(asdict(H200))


@pytest.mark.parametrize(("field", "value"), CASES)
def test_an_impossible_number_is_refused_by_name(field: str, value: Any) -> None:
    outer, _, inner = field.partition(".")
    with pytest.raises(rs.PlanError, match=rf"\.{inner or outer} must be an? .*, not "):
        replace(H200, **{outer: replace(getattr(H200, outer), **{inner: value}) if inner else value})


@pytest.mark.parametrize(("field", "value"), CASES)
def test_an_impossible_number_in_a_file_is_refused_by_name(field: str, value: Any) -> None:
    outer, _, inner = field.partition(".")
    given = asdict(H200)
    (given[outer] if inner else given)[inner or outer] = value
    named = rf"{outer}: .*\.{inner} must be" if inner else rf"Hardware\.{outer} must be"
    with pytest.raises(rs.PlanError, match=f"not a hardware file .*: {named}"):
        Hardware.from_json(json.dumps(given))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("kv_heads", "expected"), [(8, "ulysses"), (1, "exchange")])
def test_on_cpus_heads_are_split_where_keys_would_be_more_bytes(world: int, kv_heads: int, expected: str) -> None:
    shape = rs.Shape(heads=8, kv_heads=kv_heads, head_dim=64, dtype="float32")
    strategy = rs.plan(rs.causal(8192), world=world, hardware="cpu", shape=shape).strategy
    assert strategy.startswith(expected), strategy


@pytest.mark.parametrize("field", ["within", "forward"])
def test_fields_of_a_wrong_type_are_refused(field: str) -> None:
    with pytest.raises(rs.PlanError, match=rf"Hardware\.{field} must be a (Link|Speed), not 'fast'"):
        replace(H200, **{field: "fast"})


@pytest.mark.parametrize("field", ["within", "forward", "memory"])
def test_a_missing_field_of_a_file_is_named(field: str) -> None:
    given = asdict(H200)
    del given[field]
    with pytest.raises(rs.PlanError, match=rf"not a hardware file .*{field}"):
        Hardware.from_json(json.dumps(given))


def test_the_error_for_a_wrong_file_names_it(tmp_path: Any) -> None:
    path = tmp_path / "here.json"
    path.write_text('{"name": "x"}')
    with pytest.raises(rs.PlanError, match=r"this is not a hardware file .*: within is missing \(in .*here\.json\)"):
        named_hardware(str(path))


@pytest.mark.parametrize("machine", [*HARDWARE.values(), replace(H200, copy_bytes_per_s=float("inf"))], ids=lambda m: m.name)
def test_round_trip_of_a_machine(machine: Hardware, tmp_path: Any) -> None:
    (tmp_path / "here.json").write_text(machine.to_json())
    assert named_hardware(str(tmp_path / "here.json")) == machine


def test_a_file_from_before_copies_had_launches_has_none() -> None:
    given = asdict(H200)
    for name in ("copy_launch_s", "query_passes", "key_passes"):
        del given[name]
    read = Hardware.from_json(json.dumps(given))
    assert (read.copy_launch_s, read.query_passes, read.key_passes) == (0, 0, 0)
    assert read == replace(H200, copy_launch_s=0.0, query_passes=0.0, key_passes=0.0)


def test_machines_by_name() -> None:
    assert named_hardware("h200x4") == replace(H200, per_node=4)
    for wrong in ("h300", "h200x0", "nowhere.json", "h200x"):
        with pytest.raises(rs.PlanError, match=r"calibrate"):
            named_hardware(wrong)


@pytest.mark.parametrize("text", ['{"name": ' + "1" * 5000 + "}", "[" * 20_000])
def test_numbers_of_many_digits_and_deep_nesting_are_plan_errors(text: str) -> None:
    with pytest.raises(rs.PlanError, match="not a hardware file"):
        Hardware.from_json(text)
