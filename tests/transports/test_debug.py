"""``RINGSPAN_DEBUG=1``, the flight recorder and the log."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.debugging.settings import Settings, settings
from ringspan.transports import ProcessGroupTransport
from tests.conftest import Pools

pytestmark = pytest.mark.alone

WORLD, N = 3, 24
LIMIT = 20.0
SOON = 4.0
SLOPE = 1.0  # globals of a score_mod
TABLE = {"slopes": [1.0]}

Report = tuple[str, str, float]


def a_layer() -> tuple[rs.ContextParallel, list[torch.Tensor]]:
    cp = rs.ContextParallel(dist.new_group(), rs.causal(N), strategy="ring", layout="zigzag", timeout=LIMIT)
    torch.manual_seed(0)
    return cp, [x.requires_grad_() for x in cp.shard(*torch.randn(3, 1, 2, N, 8).unbind(), dim=2)]


def by_global(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return score * SLOPE


def by_table(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return score * TABLE["slopes"][0]


def other_captured_tensor(differs: bool) -> None:
    cp, qkv = a_layer()
    slopes = rs.alibi_slopes(2)
    for step in range(2):
        if step == 1 and differs:
            slopes.mul_(2.0)
        cp.flex_attention(*qkv, rs.alibi(slopes))


def other_global(differs: bool) -> None:
    cp, qkv = a_layer()
    by_global.__globals__["SLOPE"] = 2.0 if differs else 1.0
    cp.flex_attention(*qkv, by_global)


def other_element_of_a_global(differs: bool) -> None:
    cp, qkv = a_layer()
    by_table.__globals__["TABLE"] = {"slopes": [2.0 if differs else 1.0]}
    cp.flex_attention(*qkv, by_table)


def other_order(differs: bool) -> None:
    cp, qkv = a_layer()
    cp.attention(*qkv)
    for _ in range(2):
        cp.mean(torch.ones(2)) if differs else cp.attention(*qkv)


def non_finite_input(differs: bool) -> None:
    cp, (q, k, v) = a_layer()
    if differs:
        k = k.detach().index_fill(2, torch.tensor([3]), float("nan"))
    cp.attention(q, k, v)


def non_finite_gradient(differs: bool) -> None:
    cp, qkv = a_layer()
    out = cp.attention(*qkv)
    out.backward(torch.full_like(out, float("inf") if differs else 1.0))


def non_finite_result(differs: bool) -> None:
    cp, (q, k, v) = a_layer()
    huge = 1e30 if differs else 1.0
    cp.attention(q * huge, k * huge, v)


JOBS: dict[str, tuple[Callable[[bool], None], str, str]] = {
    job.__name__: (job, error, text)
    for job, error, text in (
        (other_captured_tensor, "PeerMismatch", "they differ in values"),
        (other_global, "PeerMismatch", "they differ in values"),
        (other_element_of_a_global, "PeerMismatch", "they differ in values"),
        (other_order, "PeerMismatch", "they differ in kind"),
        (
            non_finite_input,
            "InputError",
            "rank 1, forward: k has 16 NaN and 0 infinities, the first in row 3, which is token 7",
        ),
        (non_finite_gradient, "InputError", "rank 1, backward: dout has "),
        (non_finite_result, "KernelError", " of query slot 0. It computed query slot 0 with key slot"),
    )
}


def differ_on_rank_1(rank: int, name: str) -> Report:
    settings.debug, start = True, time.monotonic()
    try:
        JOBS[name][0](rank == 1)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        settings.debug = False
        by_global.__globals__.update(SLOPE=1.0, TABLE={"slopes": [1.0]})
    return "no error", "", time.monotonic() - start


@pytest.mark.parametrize("name", [*JOBS])
def test_debug_mode_finds_what_differs(pools: Pools, name: str) -> None:
    reports, (_, error, text) = pools(WORLD).run(differ_on_rank_1, name), JOBS[name]
    for rank, (kind, message, seconds) in enumerate(reports):
        assert kind == (error if error == "PeerMismatch" or rank == 1 else "PeerFailed"), reports
        assert text in message, reports
        assert "rank 1" in message, reports
        assert seconds < 2 * SOON, reports


def attend_in_debug_mode(rank: int) -> float:
    cp, qkv = a_layer()
    expected = cp.flex_attention(*qkv, rs.alibi(rs.alibi_slopes(2)))
    settings.debug = True
    try:
        for _ in range(3):
            out = cp.flex_attention(*qkv, rs.alibi(rs.alibi_slopes(2)))
            out.sum().backward()
            cp.mean(torch.ones(2))
        whole = cp.unshard(cp.attention(*qkv), dim=2)
    finally:
        settings.debug = False
    assert whole.shape[2] == N
    return (out - expected).abs().max().item()


def test_debug_mode_changes_no_result(pools: Pools) -> None:
    assert pools(WORLD).run(attend_in_debug_mode) == [0.0] * WORLD


def test_settings_are_off_unless_set() -> None:
    assert not Settings({}).debug
    assert not Settings({"RINGSPAN_DEBUG": "0"}).debug
    assert Settings({"RINGSPAN_DEBUG": "1"}).debug
    assert Settings({"RINGSPAN_FLIGHT_RECORD": "here"}).flight_record == "here"


def calls_without_tags(rank: int) -> list[str]:
    """As with NCCL: no rank waits in a call, and the messages of other calls match. The watchdog compares past
    calls."""
    group = ProcessGroupTransport(dist.new_group(), timeout=LIMIT)
    group._state._has_tags = False
    cp = rs.ContextParallel(group, rs.documents([8] * 3), strategy="exchange", layout="contiguous")
    qkv = cp.shard(*torch.randn(3, 1, 2, N, 8).unbind(), dim=2)
    cp.attention(*qkv)
    cp.attention(*qkv, scale=0.25 if rank == 1 else 0.5)  # no messages: no rank waits
    time.sleep(3.5)
    try:
        cp.attention(*qkv)
    except rs.RingspanError as error:
        return [type(error).__name__, str(error)]
    return []


def test_past_calls_are_compared_where_messages_have_no_tags(pools: Pools) -> None:
    for kind, text in pools(WORLD).run(calls_without_tags):
        assert kind == "PeerMismatch"
        assert "they differ in scale" in text


def fail_and_record(rank: int, folder: str) -> tuple[list[str], dict[str, Any], str]:
    cp, qkv = a_layer()
    settings.flight_record = f"{folder}/flight"
    notes = []
    try:
        cp.attention(*qkv)
        cp.attention(*qkv, scale=0.125 if rank == 1 else 0.75)
    except rs.PeerMismatch as error:
        notes = error.__notes__
    finally:
        settings.flight_record = None
    groups = json.loads(rs.flight_record().to_json())["groups"]
    (own,) = [g for g in groups if g["error"] is not None and "scale 0.125" in g["error"]]
    return notes, own, str(rs.flight_record())


def test_the_last_exchanges_are_kept_and_printed_with_the_error(pools: Pools, tmp_path: Path) -> None:
    for rank, ((note,), group, text) in enumerate(pools(WORLD).run(fail_and_record, str(tmp_path))):
        assert f"the last exchanges of rank {rank} of the group of global ranks 0, 1, 2:" in note
        assert "call 3, forward step 0" in note
        assert "not ended after" in note
        assert "call 3, forward step 0" in text
        assert group["rank"] == rank
        done = [x for x in group["exchanges"] if x["done"]]
        assert {x["number"] for x in done} >= {1, 2}  # the handshake and the first call
        assert all(x["done"] >= x["posted"] for x in done)
        assert group["calls"][-1]["scale"] == (0.125 if rank == 1 else 0.75)
        written = json.loads((tmp_path / f"flight.{rank}.json").read_text())
        assert any(g["calls"] == group["calls"] for g in written["groups"])


def log_of_a_failure(rank: int) -> list[str]:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(f"{record.name} {record.levelname} {record.getMessage()}")

    log, handler = logging.getLogger("ringspan"), Keep()
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        cp, qkv = a_layer()
        cp.attention(*qkv, scale=0.3)  # no other test has this scale: the kernel of a call is chosen, and logged, once
        with pytest.raises(rs.RingspanError):
            rs.attention(*qkv, plan=cp.plan, group=cp.group, backend="fa4" if rank == 1 else "cpu")
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return records


def test_the_log_has_plans_kernels_handshakes_and_failures(pools: Pools) -> None:
    for rank, records in enumerate(pools(WORLD).run(log_of_a_failure)):
        starts = ["ringspan.planner DEBUG made <Plan", f"ringspan.transports INFO rank {rank}: the ranks agree on plan "]
        starts += [f"ringspan.engine INFO rank {rank}: kernel cpu for torch.float32 on cpu"]
        starts += [
            "ringspan.transports WARNING rank 1 refuses forward of plan"
            if rank == 1
            else f"ringspan.transports ERROR rank {rank}: PeerFailed: rank 1 raised KernelError"
        ]
        for start in starts:
            assert any(x.startswith(start) for x in records), (start, records)


def test_torch_logs_configures_the_log() -> None:
    code = "import ringspan as rs; rs.plan(rs.causal(8), world=2)"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TORCH_LOGS": "+ringspan"}, capture_output=True, text=True, check=True
    )
    assert "made <Plan" in result.stderr


def test_nothing_is_logged_unless_asked_for() -> None:
    code = "import ringspan as rs, logging; rs.plan(rs.causal(8), world=2); logging.getLogger('ringspan.x').warning('no')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == ""
