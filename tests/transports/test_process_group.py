"""Processes over gloo: kinds of groups, ranks that disagree, errors of the backend, and peers that hang or die."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.kernels.reference import dense_attention
from ringspan.testing.assertions import largest_difference
from ringspan.testing.workers import Pool, send_message
from ringspan.transports import PostExchange, ProcessGroupTransport, WaitExchange
from tests.conftest import Pools
from tests.meshes import cpu_mesh

pytestmark = pytest.mark.alone

N = 23


def inputs(heads: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(4, 1, heads, N, 4, dtype=dtype).unbind())


def error_on(group: Any) -> tuple[int, float]:
    """This process's rank in the group, and the largest error of attention and gradients against dense attention."""
    q, k, v, grad = inputs()
    mask = rs.causal(N) & rs.window(left=9)
    cp = rs.ContextParallel(group, mask, strategy="ring", layout="zigzag")
    whole = [x.requires_grad_() for x in (q, k, v)]
    expected = dense_attention(*whole, torch.from_numpy(mask.dense())).out
    expected_grads = torch.autograd.grad((expected * grad).sum(), whole)
    local = [x.detach().requires_grad_() for x in cp.shard(q, k, v, dim=2)]
    out = cp.attention(*local)
    grads = torch.autograd.grad((out * cp.shard(grad, dim=2)).sum(), local)
    pairs = zip((out, *grads), cp.shard(expected, *expected_grads, dim=2), strict=True)
    return cp.rank, max(largest_difference(a, b) for a, b in pairs)


# -- groups ------------------------------------------------------------------------------------------------------------


def default_group(rank: int) -> tuple[int, float]:
    return error_on(None)


def sub_groups(rank: int) -> tuple[int, float]:
    """Two groups of two run at the same time: {0, 2} and {1, 3}."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return error_on(groups[rank % 2])


def mesh_axis(rank: int) -> tuple[int, float]:
    mesh = cpu_mesh((2, 2), ("dp", "cp"))
    return error_on(mesh["cp"])


def mesh_in_another_order(rank: int) -> tuple[int, float]:
    """The process group of this mesh numbers the processes 0 1 2 3, the mesh 3 1 0 2. The mesh decides."""
    return error_on(DeviceMesh("cpu", torch.tensor([3, 1, 0, 2])))


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        (default_group, [0, 1, 2, 3]),
        (sub_groups, [0, 0, 1, 1]),
        (mesh_axis, [0, 1, 0, 1]),
        (mesh_in_another_order, [2, 1, 3, 0]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_kinds_of_groups(pools: Pools, job: Callable[..., Any], ranks: list[int]) -> None:
    results = pools(4).run(job)
    assert [rank for rank, _ in results] == ranks
    assert max(error for _, error in results) < 1e-13


def try_invalid_groups(rank: int) -> list[str]:
    messages = []
    whole = cpu_mesh((2, 2), ("dp", "cp"))
    not_mine = dist.new_group([0, 1])
    groups = [whole, not_mine] if rank >= 2 else [whole]
    for group in groups:
        try:
            rs.ContextParallel(group, rs.causal(N))
        except rs.InputError as error:
            messages.append(str(error))
    return messages


def test_invalid_groups_are_refused(pools: Pools) -> None:
    results = pools(4).run(try_invalid_groups)
    assert all("has 'dp' and 'cp': pass mesh[axis], as in mesh['cp']" in messages[0] for messages in results)
    assert all("not a member" in messages[1] for messages in results[2:])


# -- ranks that disagree -----------------------------------------------------------------------------------------------


def disagree(rank: int, how: str) -> str:
    """Rank 1 calls attention with another argument. Returns the message of the PeerMismatch on this rank."""
    differs = rank == 1
    mask = rs.full(N) if differs and how == "mask" else rs.causal(N)
    strategy = "gather" if differs and how == "strategy" else "ring"
    q, k, v, _ = inputs(4 if differs and how == "heads" else 2, torch.float32 if differs and how == "dtype" else torch.float64)
    if how == "one cell":
        mask = rs.mask_mod(lambda b, h, q, k: ((q * k) % 5 < 3) & ((q != 20) | (k != 20) | differs), N)
        assert mask.predicate is not None
    cp = rs.ContextParallel(None, mask, strategy=strategy, layout="zigzag")
    q, k, v = cp.shard(q, k, v, dim=2)
    if differs and how == "length":
        k, v = k[:, :, 1:], v[:, :, 1:]
    score_mods = {"a score_mod": (None, rs.softcap(2)), "a number": (rs.softcap(2), rs.softcap(3))}
    score_mods["code"] = (rs.softcap(2), lambda score, b, h, q, k: score / 2)
    try:
        rs.attention(q, k, v, plan=cp.plan, score_mod=score_mods.get(how, (None, None))[differs])
    except rs.PeerMismatch as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "mask",
            r"on the mask: ranks 0, 2 and 3 have \w+ \(causal\(23\)\), rank 1 has \w+ \(full\(23\)\)\. All",
        ),
        ("strategy", r"on the strategy: ranks 0, 2 and 3 have ring, rank 1 has gather\(stages=1\)\. All"),
        ("heads", "heads 2, rank 1 has heads 4"),
        ("dtype", "rank 1 has"),
        ("length", r"rank 1 has \d+ keys where the plan says \d+"),
        ("one cell", "on the mask: ranks 0, 2 and 3 have .*, rank 1 has .* the same mask"),
        ("a score_mod", "have score_mod None, rank 1 has score_mod [0-9a-f]{16}"),
        ("a number", "have score_mod [0-9a-f]{16}, rank 1 has"),
        ("code", "have score_mod [0-9a-f]{16}, rank 1 has"),
    ],
)
def test_a_disagreement_raises_the_same_error_on_every_rank(pools: Pools, how: str, message: str) -> None:
    messages = pools(4).run(disagree, how)
    assert len(set(messages)) == 1
    assert re.search(message, messages[0])


def invalid_inputs_on_rank_1(rank: int) -> str:
    """The keys of rank 1 have another dtype than its queries."""
    q, k, v, _ = inputs()
    cp = rs.ContextParallel(None, rs.prefix(N, 3))
    q, k, v = cp.shard(q, k, v, dim=2)
    try:
        cp.attention(q, k.float() if rank == 1 else k, v)
    except (rs.InputError, rs.PeerFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_invalid_inputs_on_one_rank_raise_on_all(pools: Pools) -> None:
    messages = pools(4).run(invalid_inputs_on_rank_1)
    assert messages[1].startswith("InputError: q, k and v must have one dtype")
    assert {messages[rank] for rank in (0, 2, 3)} == {
        f"PeerFailed: rank 1 cannot make this call: {messages[1].splitlines()[0]}"
    }


# -- errors of the backend ---------------------------------------------------------------------------------------------

Report = tuple[str, str]  # the type and the message of the error on one rank


def report_of(call: Callable[[], Any]) -> Report:
    try:
        call()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "no error", ""


def exchange_on_an_unsupported_device(rank: int) -> Report:
    message = ((1 - rank, torch.empty(4, device="meta")),)

    def exchange() -> Generator[Any, Any, None]:
        yield WaitExchange((yield PostExchange("forward step 2", message, message)))

    return report_of(lambda: ProcessGroupTransport(None).run([exchange()]))


def test_an_error_of_this_rank_does_not_blame_a_peer(pools: Pools) -> None:
    message = "rank {rank}: forward step 2 failed: No backend type associated with device type meta"
    reports = pools(2).run(exchange_on_an_unsupported_device)
    assert reports == [("TransportError", message.format(rank=rank)) for rank in range(2)]


def gather_an_unsupported_dtype(rank: int) -> list[Report]:
    group = ProcessGroupTransport(None)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Invalid scalar type")

    with patch.object(dist, "batch_isend_irecv", fail):
        return [
            report_of(lambda: group.all_gather_ints([1], torch.device("cpu"), label="step one")),
            report_of(lambda: group.all_gather_rows(torch.zeros(1), [1, 1], label="step two")),
        ]


def test_errors_of_an_all_gather_name_its_label(pools: Pools) -> None:
    for rank, reports in enumerate(pools(2).run(gather_an_unsupported_dtype)):
        assert reports == [
            ("TransportError", f"rank {rank}: {label} failed: Invalid scalar type") for label in ("step one", "step two")
        ]


def run_out_of_memory(rank: int, kind: str) -> Report:
    """The backend runs out of memory, in a collective and in an exchange."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def exchange() -> Generator[Any, Any, None]:
        yield PostExchange("forward step 0", ((1 - rank, torch.zeros(1)),), ())

    transport = ProcessGroupTransport(None)
    with patch.object(dist, "batch_isend_irecv", fail):
        return report_of(
            lambda: transport.run([exchange()]) if kind == "exchange" else transport.all_reduce_sum(torch.zeros(1))
        )


@pytest.mark.parametrize("kind", ["all-reduce", "exchange"])
def test_out_of_memory_passes_unchanged(pools: Pools, kind: str) -> None:
    expected = ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")
    assert pools(2).run(run_out_of_memory, kind) == [expected] * 2


# -- peers that hang or die --------------------------------------------------------------------------------------------


def sum_without_rank_2(rank: int) -> Report:
    if rank == 2:
        time.sleep(4.0)
        return "", ""
    return report_of(lambda: ProcessGroupTransport(None, timeout=1.0).all_reduce_sum(torch.ones(3)))


def test_a_collective_that_times_out_names_its_label() -> None:
    with Pool(3) as pool:
        reports = pool.run(sum_without_rank_2)
    assert {kind for kind, _ in reports[:2]} <= {"PeerTimeout", "PeerLost"}
    assert all("an all-reduce" in message for _, message in reports[:2])


def attend_without_rank_2(rank: int, seconds: float) -> Report:
    """After a first call of all ranks, rank 2 makes no more calls while the others go on."""
    q, k, v, _ = inputs()
    patient, impatient = (
        rs.ContextParallel(ProcessGroupTransport(None, timeout=timeout), rs.full(N), strategy="ring", layout="contiguous")
        for timeout in (None, seconds)
    )
    q, k, v = patient.shard(q, k, v, dim=2)
    patient.attention(q, k, v)  # the first call connects the ranks, which can take longer than the time limit
    if rank == 2:
        time.sleep(4 * seconds)
        return "", ""
    return report_of(lambda: [impatient.attention(q, k, v) for _ in range(1000)])


def test_a_hanging_peer_is_named() -> None:
    with Pool(3) as pool:
        reports = pool.run(attend_without_rank_2, 1.0)
    assert reports[0][0] == "PeerTimeout"
    assert re.match(
        r"rank 0: timed out in forward step .* waiting for rank 2 \(global rank 2\): that rank hangs", reports[0][1]
    )
    assert reports[1][0] in ("PeerTimeout", "PeerLost")


def skip_the_last_layer_on_rank_1(rank: int) -> Report:
    """Two layers of different lengths. Rank 1 does not make the last call."""
    lengths = (N, 2 * N)
    patient, impatient = (
        [rs.ContextParallel(group, rs.full(n), strategy="ring", layout="contiguous") for n in lengths]
        for group in (ProcessGroupTransport(None), ProcessGroupTransport(None, timeout=1.0))
    )
    tensors = [cp.shard(*torch.randn(3, 1, 2, n, 4).unbind(), dim=2) for cp, n in zip(patient, lengths, strict=True)]
    for cp, qkv in zip(patient, tensors, strict=True):
        cp.attention(*qkv)

    def attend() -> None:
        for n, (cp, qkv) in enumerate(zip(impatient, tensors, strict=True)):
            if rank != 1 or n == 0:
                cp.attention(*qkv)
        time.sleep(3.0)  # a rank that is done must not close its connections while others still wait

    return report_of(attend)


def test_a_call_that_one_rank_does_not_make_times_out() -> None:
    """Rank 1 skips the last call. It may be late, so the others wait until the time limit."""
    with Pool(3) as pool:
        reports = pool.run(skip_the_last_layer_on_rank_1)
    waiting = [reports[0], reports[2]]
    assert all(kind in ("PeerTimeout", "PeerLost") and "forward step" in message for kind, message in waiting), reports
    assert any(kind == "PeerTimeout" and "hangs or is in another call" in message for kind, message in waiting)


def attend_until_rank_1_dies(rank: int) -> None:
    cp = rs.ContextParallel(ProcessGroupTransport(None, timeout=20.0), rs.full(N), strategy="ring", layout="contiguous")
    q, k, v, _ = inputs()
    q, k, v = cp.shard(q, k, v, dim=2)
    cp.attention(q, k, v)
    if rank == 1:
        os._exit(1)
    send_message(report_of(lambda: [cp.attention(q, k, v) for _ in range(1000)]))


def test_a_dead_peer_is_named_on_every_survivor() -> None:
    reports: dict[int, Report] = {}

    with Pool(3) as pool, pytest.raises(rs.RingspanError, match="worker 1: ended"):
        pool.run(attend_until_rank_1_dies, on_message=lambda rank, message: reports.__setitem__(rank, message))
    assert set(reports) == {0, 2}
    for kind, message in reports.values():
        assert kind == "PeerLost"
        assert "rank 1" in message
        assert "forward step" in message
