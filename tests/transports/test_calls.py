"""Numbered calls: tags, threads and records."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from weakref import ref

import pytest
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.transports import CallDescription
from ringspan.transports.calls import Call, Failure, GroupCalls
from ringspan.transports.diagnosis import diagnose
from ringspan.transports.records import RankRecord, record_of
from ringspan.transports.watchdog import WatchedGroup

FORWARD = CallDescription("forward", "9f2c00000000001a", 0.125, "bfloat16", (1, 8, 2, 64, 64))


def calls(*descriptions: CallDescription) -> GroupCalls:
    made = GroupCalls()
    for description in descriptions:
        made.begin(description)
        made.end()
    return made


@pytest.mark.parametrize(
    "other",
    [
        Call(8, FORWARD, ""),
        Call(7, FORWARD, "worker"),
        *(
            Call(7, FORWARD._replace(**{field: value}), "")
            for field, value in [
                ("kind", "backward"),
                ("plan", "9f2c00000000001b"),
                ("scale", 0.25),
                ("dtype", "float16"),
                ("shape", (1, 8, 2, 64, 32)),
                ("options", "layout 9f2c"),
                ("score_mod", "9f2c00000000001d"),
                ("forward_call", 3),
                ("values", "9f2c00000000001c"),
            ]
        ),
    ],
    ids=["number", "thread", *CallDescription._fields],
)
def test_messages_of_different_calls_have_different_tags(other: Call) -> None:
    call = Call(7, FORWARD, "")
    assert call.tag("forward step 1", 4096) == Call(7, FORWARD, "").tag("forward step 1", 4096)
    assert call.tag("forward step 1", 4096) != other.tag("forward step 1", 4096)


def test_messages_of_different_steps_and_sizes_have_different_tags() -> None:
    call = Call(7, FORWARD, "")
    tags = {call.tag(f"forward step {n}", nbytes) for n in range(100) for nbytes in (0, 8, 4096, 2**40)}
    assert len(tags) == 400
    assert all(0 <= tag < 2**31 for tag in tags)


def test_names_of_threads_are_the_same_on_all_ranks() -> None:
    """The first thread that uses a group has no name; the numbers that Python gives to the others do not count."""
    made, names = GroupCalls(), []

    def work() -> None:
        names.append(made.begin(FORWARD).thread)
        made.end()

    for n in (3, 17, 4):
        thread = threading.Thread(target=work, name=f"Thread-{n} (train)")
        thread.start()
        thread.join()
    assert names == ["", *["Thread (train)"] * 2]


def in_thread(name: str, work: Callable[[], None], until: threading.Event) -> threading.Thread:
    """Do the work in a thread that lives on until the event."""
    done = threading.Event()

    def run() -> None:
        work()
        done.set()
        until.wait()

    thread = threading.Thread(target=run, name=name)
    thread.start()
    done.wait()
    return thread


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        (("loader-1", "loader-2"), ["loader-1", "loader-2"]),
        (("Thread-1 (a)", "Thread-2 (b)"), ["Thread (a)", "Thread (b)"]),
        (("Thread-1 (a)", "Thread-2 (a)"), ["Thread (a)", "thread Thread-2 (a) begins forward"]),
        (("ThreadPoolExecutor-0_0", "ThreadPoolExecutor-0_1"), ["ThreadPoolExecutor", "thread ThreadPoolExecutor-0_1 begins"]),
        (("asyncio_0", "asyncio_1"), ["asyncio", "thread asyncio_1 begins forward"]),
        (("loader", "loader"), ["loader", "thread loader begins forward"]),
    ],
)
def test_threads_that_other_ranks_cannot_tell_apart_are_refused(names: tuple[str, str], seen: list[str]) -> None:
    made, found, until = calls(FORWARD), [], threading.Event()

    def work() -> None:
        try:
            found.append(made.begin(FORWARD).thread)
            made.end()
        except rs.InputError as error:
            found.append(str(error))

    threads = [in_thread(name, work, until) for name in names]
    until.set()
    for thread in threads:
        thread.join()
    assert all(actual.startswith(expected) for actual, expected in zip(found, seen, strict=True)), found


def test_a_numbered_thread_that_lived_when_another_made_its_call_is_refused() -> None:
    """The other has ended since, but on another rank it could have been the later one."""
    made, may_begin, errors = calls(FORWARD), threading.Event(), []

    def first() -> None:
        made.begin(FORWARD)
        made.end()

    def second() -> None:
        may_begin.wait()
        with pytest.raises(rs.InputError, match="Thread-1 has used the same process group") as found:
            made.begin(FORWARD)
        errors.append(found)

    waiting = threading.Thread(target=second, name="Thread-2")
    waiting.start()
    done = threading.Thread(target=first, name="Thread-1")
    done.start()
    done.join()
    may_begin.set()
    waiting.join()
    assert errors


def test_the_first_thread_of_a_group_can_be_a_numbered_one() -> None:
    """It has no name for other ranks, but another thread could have been the first there."""
    made, found, until = GroupCalls(), [], threading.Event()

    def work() -> None:
        try:
            found.append(made.begin(FORWARD).thread)
            made.end()
        except rs.InputError as error:
            found.append(str(error))

    threads = [in_thread(f"Thread-{n} (work)", work, until) for n in (1, 2)]
    until.set()
    for thread in threads:
        thread.join()
    assert found[0] == ""
    assert found[1].startswith("thread Thread-2 (work) begins forward")


def test_a_thread_that_has_ended_is_not_kept() -> None:
    """It can hold tensors, as attributes."""
    made = calls(FORWARD)

    def work() -> None:
        made.begin(FORWARD)
        made.end()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ended = ref(thread)
    del thread
    assert ended() is None


def test_threads_one_after_the_other_have_one_name() -> None:
    """Whatever numbers the system gives them again."""
    made, names = GroupCalls(), []

    def work() -> None:
        names.append(made.begin(FORWARD).thread)
        made.end()

    for _ in range(4):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        del thread
    assert names == ["", *["Thread (work)"] * 3]


def test_two_threads_in_a_call_at_once_are_refused() -> None:
    made = GroupCalls()
    made.begin(FORWARD)
    with pytest.raises(rs.InputError, match=r"while another thread is in forward of plan 9f2c.* Give each thread a group"):
        made.begin(FORWARD)
    made.end()
    with pytest.raises(rs.TransportError, match="This group cannot be used any more"):
        made.begin(FORWARD)


# -- records and their diagnosis ---------------------------------------------------------------------------------------


def test_a_record_survives_json() -> None:
    made = calls(FORWARD, FORWARD._replace(scale=None))
    made.fail(made.recent[-1], ValueError("no\nsuch"))
    record = record_of(made, written=3, generation=2)
    assert RankRecord.from_json(record.to_json()) == record
    assert record.where() == "raised ValueError in call 2: no"


def test_a_peer_that_is_behind_is_no_error() -> None:
    own, behind = calls(FORWARD, FORWARD, FORWARD), calls(FORWARD)
    assert diagnose(0, record_of(own), {1: record_of(behind)}) is None
    assert diagnose(0, record_of(own), {}) is None


def test_the_first_call_that_differs_is_named() -> None:
    own = calls(FORWARD, FORWARD, FORWARD._replace(kind="backward"))
    other = calls(FORWARD, FORWARD._replace(scale=0.5), FORWARD)
    errors = [
        diagnose(0, record_of(own), {2: record_of(other)}),
        diagnose(2, record_of(other), {0: record_of(own)}),
    ]
    assert [type(error) for error in errors] == [rs.PeerMismatch] * 2
    assert str(errors[0]) == str(errors[1])
    assert "call 2 is forward of plan 9f2c00000000001a (scale 0.125, bfloat16, batch 1, 8 heads, " in str(errors[0])
    assert "they differ in scale" in str(errors[0])


@pytest.mark.parametrize(("forward_call", "is_unknown"), [(0, True), (2, False)])
def test_a_backward_pass_that_does_not_know_its_forward_call_is_explained(forward_call: int, is_unknown: bool) -> None:
    backward = FORWARD._replace(kind="backward", forward_call=1)
    own, other = calls(FORWARD, backward), calls(FORWARD, backward._replace(forward_call=forward_call))
    error = str(diagnose(0, record_of(own), {1: record_of(other)}))
    assert "they differ in the forward call." in error
    assert ("FlopCounterMode" in error) == is_unknown


def test_a_peer_that_raised_in_this_call_is_named() -> None:
    own, other = calls(FORWARD), calls(CallDescription("forward"))
    other.fail(other.recent[-1], rs.InputError("q has 3 heads"))
    error = diagnose(0, record_of(own), {1: record_of(other)})
    assert type(error) is rs.PeerFailed
    assert str(error) == "rank 1 raised InputError in call 1 (forward): q has 3 heads"


def test_an_error_in_an_earlier_call_is_past() -> None:
    """The peer raised in call 1, which this rank has completed. The peer has not yet begun call 2, and may only be late."""
    own, other = calls(FORWARD), calls(FORWARD)
    other.fail(other.recent[-1], rs.InputError("q has 3 heads"))
    own.begin(FORWARD)
    assert diagnose(0, record_of(own), {1: record_of(other)}) is None


def test_an_error_of_a_later_call_does_not_end_this_one() -> None:
    own, other = calls(FORWARD), calls(FORWARD)
    other.failure = Failure(2, "InputError", "two threads", is_final=True)
    assert diagnose(0, record_of(own), {1: record_of(other)}) is None
    own.begin(FORWARD)
    assert diagnose(0, record_of(own), {1: record_of(other)}) is not None


def test_a_refused_call_is_not_compared() -> None:
    own, other = calls(CallDescription("forward"), FORWARD), calls(FORWARD, FORWARD)
    own.fail(own.recent[0], rs.InputError("q has 3 heads"))
    assert diagnose(0, record_of(own), {1: record_of(other)}) is None


def test_the_cause_is_passed_on() -> None:
    own, other = calls(FORWARD), calls(FORWARD)
    other.failure = Failure(1, "PeerLost", "rank 1: lost the connection to rank 2", is_final=True)
    error = diagnose(0, record_of(own), {1: record_of(other)})
    assert type(error) is rs.PeerLost
    assert str(error) == "rank 1: lost the connection to rank 2"


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_time_limit_of_a_context(one_process: None) -> None:
    cp = rs.ContextParallel(None, rs.causal(6), timeout=2.5)
    assert cp.group.timeout == cp.with_mask(rs.full(6)).group.timeout == timedelta(seconds=2.5)
    assert rs.ContextParallel(cp.group, rs.causal(6), timeout=4).group.timeout == timedelta(seconds=4)
    assert cp.group.timeout == timedelta(seconds=2.5)
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(rs.InputError, match="timeout must be a positive number of seconds"):
            rs.ContextParallel(None, rs.causal(6), timeout=bad)


def test_a_destroyed_group_is_refused(one_process: None) -> None:
    group = dist.new_group([0])
    dist.destroy_process_group(group)
    with pytest.raises(rs.InputError, match="the process group was destroyed"):
        rs.ContextParallel(group, rs.causal(6))


def test_a_destroyed_group_is_named(one_process: None) -> None:
    cp = rs.ContextParallel(None, rs.causal(6))
    kept = dist.group.WORLD
    dist.destroy_process_group()
    assert cp.group.is_destroyed
    with pytest.raises(rs.InputError, match="the process group was destroyed"):
        cp.attention(*torch.ones(3, 1, 1, 6, 4))
    del kept
    with pytest.raises(rs.InputError, match="the process group was destroyed"):
        cp.unshard(torch.ones(1, 6), dim=1)


class GroupWithRecords(WatchedGroup):
    """A group whose records are given: those of the first read, of the second, …"""

    def __init__(self, calls: GroupCalls, *records: dict[int, RankRecord]) -> None:
        self.calls, self.rank, self._given = calls, 0, list(records)

    def _read(self, peers: tuple[int, ...]) -> dict[int, RankRecord]:
        return self._given.pop(0) if len(self._given) > 1 else self._given[0]


def test_the_error_of_a_peer_that_closed_its_connections_is_awaited() -> None:
    own, peer = calls(FORWARD), calls(FORWARD)
    waits = record_of(peer)._replace(label="forward step 0", waits_for=(2,))
    failed = waits._replace(waits_for=(), failure=Failure(1, "PeerTimeout", "rank 1: timed out waiting for rank 2", True))
    for reads in (2, 3, 4):
        error = GroupWithRecords(own, *[{1: waits}] * reads, {1: failed}).await_failure((1,))
        assert isinstance(error, rs.PeerTimeout)
        assert "rank 2" in str(error)


def test_the_last_call_of_a_lost_peer_is_described() -> None:
    own = calls(FORWARD, FORWARD, FORWARD)
    one_fewer, long_ago = record_of(calls(FORWARD, FORWARD)), record_of(calls(FORWARD))
    group = GroupWithRecords(own, {1: one_fewer._replace(label=""), 2: long_ago})
    group.store_answers = True
    described = f"  rank 1 is in no call; its last was call 2, {FORWARD} (in its last record; this rank is in call 3)"
    assert group.describe_lost((1, 2)) == described
    group.store_answers = False
    assert "the store of the process group does not answer either" in group.describe_lost((1, 2))


def test_a_peer_that_wrote_no_record_is_not_awaited() -> None:
    start = time.monotonic()
    assert GroupWithRecords(calls(FORWARD), {}).await_failure((1,)) is None
    assert time.monotonic() - start < 0.5
