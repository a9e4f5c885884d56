"""Descriptions of calls in the store, which the ranks compare in debug mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ringspan.transports.calls import Call, CallDescription
from ringspan.transports.records import CallRecord, Records


@pytest.fixture
def records() -> Iterator[Records]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Records(dist.group.WORLD, (0,), 0)
    dist.destroy_process_group()


def test_the_last_two_calls_can_be_read(records: Records) -> None:
    """A rank that begins a call has read the last one of all ranks. Another rank may not have read its own yet."""
    numbers = [1, 2, 4, 5]  # a call that a rank refuses is not written
    for number in numbers:
        records.write_call(Call(number, CallDescription(f"call {number}"), "main"))
    found = {number: records.read_call(number, 0) for number in numbers}
    assert found == {1: None, 2: None, **{n: CallRecord(CallDescription(f"call {n}"), "main") for n in (4, 5)}}
