"""Checksums of the calls, by which ranks on a backend without tags find calls that differed."""

from __future__ import annotations

import time

import torch.distributed as dist

import ringspan as rs
from ringspan.transports import CallDescription, ProcessGroupTransport
from ringspan.transports.calls import CHECKSUM_CALLS, GroupCalls
from tests.conftest import Pools

FORWARD, BACKWARD = CallDescription("forward", "plan"), CallDescription("backward", "plan")


def calls_of(*descriptions: CallDescription) -> GroupCalls:
    calls = GroupCalls()
    calls.keep_checksums()
    for description in descriptions:
        calls.begin(description)
        calls.end()
    return calls


def test_checksums_depend_on_every_call_and_on_their_order() -> None:
    kinds = [FORWARD] * (CHECKSUM_CALLS - 1)
    found = [
        calls_of(*kinds, BACKWARD).checksums,
        calls_of(*kinds, FORWARD).checksums,
        calls_of(BACKWARD, *kinds).checksums,
        calls_of(*kinds, FORWARD._replace(scale=2.0)).checksums,
    ]
    assert all(x is not None and [number for number, _ in x] == [CHECKSUM_CALLS] for x in found)
    assert len({tuple(x or ()) for x in found}) == len(found)
    assert calls_of(*kinds, BACKWARD).checksums == found[0]


def test_a_failed_call_does_not_count() -> None:
    """Each rank may describe a call that all of them refuse in another way."""
    checksums = []
    for description in (FORWARD, BACKWARD):
        calls = calls_of()
        calls.fail(calls.begin(description), ValueError("refused"))
        calls.end()
        for _ in range(CHECKSUM_CALLS):
            calls.begin(FORWARD)
            calls.end()
        checksums.append(calls.checksums)
    assert checksums[0] == checksums[1]
    assert checksums[0]


def test_groups_with_tags_keep_none() -> None:
    assert GroupCalls().checksums is None


def count_without_messages(rank: int, differs: bool, seconds: float) -> str:
    """Count calls as over NCCL, where messages of different calls match, until one raises. Returns the error."""
    group = ProcessGroupTransport(dist.new_group())
    state, n, deadline = group._state, 0, time.monotonic() + seconds
    state._has_tags = False
    state.calls.keep_checksums()
    try:
        while time.monotonic() < deadline:
            swapped = differs and rank == 1 and n // 2 == CHECKSUM_CALLS
            state.calls.begin(FORWARD if (n % 2 == 0) != swapped else BACKWARD)
            state.calls.end()
            n += 1
            time.sleep(0.01)
    except rs.PeerMismatch as error:
        return str(error)
    return ""


def test_calls_that_differed_raise_later(pools: Pools) -> None:
    for text in pools(2).run(count_without_messages, True, 15.0):
        assert f"different calls after call {2 * CHECKSUM_CALLS}, and before call {3 * CHECKSUM_CALLS + 1}" in text
        assert "rank 0 and rank 1" in text


def test_equal_calls_raise_nothing(pools: Pools) -> None:
    assert pools(2).run(count_without_messages, False, 4.0) == [""] * 2
