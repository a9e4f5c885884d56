"""Real processes over gloo: groups of all kinds, disagreement, and peers that go away."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringspan as rs
from ringspan.kernels.reference import dense_attention
from ringspan.testing.assertions import largest_difference
from ringspan.testing.workers import Pool
from ringspan.transports import ProcessGroupTransport
from tests.conftest import Pools

N = 23


def inputs(heads: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(4, 1, heads, N, 4, dtype=dtype).unbind())


def error_on(group: Any) -> tuple[int, float]:
    """This process's rank in the group, and how far its attention and gradients are from dense attention."""
    q, k, v, grad = inputs()
    mask = rs.causal(N) & rs.window(left=9)
    cp = rs.ContextParallel(group, mask, strategy="ring", layout="zigzag")
    whole = [x.requires_grad_() for x in (q, k, v)]
    want = dense_attention(*whole, torch.from_numpy(mask.dense())).out
    want_grads = torch.autograd.grad((want * grad).sum(), whole)
    mine = [x.detach().requires_grad_() for x in cp.shard(q, k, v, dim=2)]
    out = cp.attention(*mine)
    grads = torch.autograd.grad((out * cp.shard(grad, dim=2)).sum(), mine)
    pairs = zip((out, *grads), cp.shard(want, *want_grads, dim=2), strict=True)
    return cp.rank, max(largest_difference(a, b) for a, b in pairs)


# -- groups ------------------------------------------------------------------------------------------------------------


def default_group(rank: int) -> tuple[int, float]:
    return error_on(None)


def sub_groups(rank: int) -> tuple[int, float]:
    """Two groups of two, {0, 2} and {1, 3}, at the same time."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return error_on(groups[rank % 2])


def mesh_axis(rank: int) -> tuple[int, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return error_on(mesh["cp"])


def mesh_in_another_order(rank: int) -> tuple[int, float]:
    """The process group of this mesh counts its ranks 0 1 2 3; the mesh counts them 3 1 0 2, and so must we."""
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
def test_groups_of_all_kinds(pools: Pools, job: Callable[..., Any], ranks: list[int]) -> None:
    results = pools(4).run(job)
    assert [rank for rank, _ in results] == ranks
    assert max(error for _, error in results) < 1e-13


def wrong_groups(rank: int) -> list[str]:
    said = []
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    others = dist.new_group([0, 1])
    groups = [whole, others] if rank >= 2 else [whole]
    for group in groups:
        try:
            rs.ContextParallel(group, rs.causal(N))
        except rs.InputError as error:
            said.append(str(error))
    return said


def test_groups_that_cannot_be(pools: Pools) -> None:
    results = pools(4).run(wrong_groups)
    assert all("mesh['cp']" in said[0] for said in results)
    assert all("not a member" in said[1] for said in results[2:])


# -- disagreement ------------------------------------------------------------------------------------------------------


def disagree(rank: int, how: str) -> str:
    """Rank 1 comes with something else. What does each rank hear?"""
    differs = rank == 1
    mask = rs.full(N) if differs and how == "mask" else rs.causal(N)
    strategy = "gather" if differs and how == "strategy" else "ring"
    q, k, v, _ = inputs(4 if differs and how == "heads" else 2, torch.float32 if differs and how == "dtype" else torch.float64)
    if how == "one cell":
        mask = rs.mask_mod(lambda b, h, q, k: ((q * k) % 5 < 3) & ((q != 20) | (k != 20) | differs), N)
        assert mask.settler is not None
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
    ("how", "said"),
    [
        ("mask", "rank 1 has"),
        ("strategy", "rank 1 has"),
        ("heads", "heads 2, rank 1 has 4"),
        ("dtype", "rank 1 has"),
        ("length", r"rank 1 has \d+ keys where the plan says \d+"),
        ("one cell", "has plan .*, rank 1 has"),
        ("a score_mod", "has score_mod None, rank 1 has [0-9a-f]{16}"),
        ("a number", "has score_mod [0-9a-f]{16}, rank 1 has"),
        ("code", "has score_mod [0-9a-f]{16}, rank 1 has"),
    ],
)
def test_every_rank_hears_the_same(pools: Pools, how: str, said: str) -> None:
    heard = pools(4).run(disagree, how)
    assert len(set(heard)) == 1
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(heard[0])


def one_is_wrong(rank: int) -> str:
    """Rank 1's tensors do not even go together. It says so itself, and the others hear of it."""
    q, k, v, _ = inputs()
    cp = rs.ContextParallel(None, rs.prefix(N, 3))
    q, k, v = cp.shard(q, k, v, dim=2)
    try:
        cp.attention(q, k.float() if rank == 1 else k, v)
    except (rs.InputError, rs.PeerMismatch) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_with_bad_tensors_leaves_nobody_waiting(pools: Pools) -> None:
    heard = pools(4).run(one_is_wrong)
    assert heard[1].startswith("InputError: q, k and v must have one dtype")
    assert {heard[rank] for rank in (0, 2, 3)} == {
        "PeerMismatch: rank 1 was called with invalid q, k and v; see the error it raised itself"
    }


def sum_alone(rank: int) -> tuple[str, str]:
    """Rank 2 does not take part in a sum."""
    if rank == 2:
        time.sleep(4.0)
        return "", ""
    try:
        ProcessGroupTransport(None, timeout=1.0).all_reduce_sum(torch.ones(3))
    except rs.TransportError as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_sums_name_their_peers_too() -> None:
    with Pool(3) as pool:
        heard = pool.run(sum_alone)
    assert {kind for kind, _ in heard[:2]} <= {"PeerTimeout", "PeerLost"}
    assert all("a sum over all ranks" in text for _, text in heard[:2])


# -- peers that go away ------------------------------------------------------------------------------------------------


def attend_until_alone(rank: int, seconds: float) -> tuple[str, str]:
    """Attend over and over; rank 2 stops taking part after the first time. What do the others hear?"""
    group = ProcessGroupTransport(None, timeout=seconds)
    cp = rs.ContextParallel(group, rs.full(N), strategy="ring", layout="contiguous")
    q, k, v, _ = inputs()
    q, k, v = cp.shard(q, k, v, dim=2)
    cp.attention(q, k, v)
    if rank == 2:
        time.sleep(4 * seconds)
        return "", ""
    try:
        while True:
            cp.attention(q, k, v)
    except rs.TransportError as error:
        return type(error).__name__, str(error)


def test_a_stalled_peer_is_named() -> None:
    with Pool(3) as pool:
        heard = pool.run(attend_until_alone, 1.0)
    assert heard[0][0] == "PeerTimeout"
    assert "rank 2" in heard[0][1]
    assert "forward step" in heard[0][1]
    assert heard[1][0] in ("PeerTimeout", "PeerLost")


def one_call_fewer(rank: int, skipped: int) -> tuple[str, str]:
    """Two layers of other lengths, of which rank 1 leaves out one: its messages do not fit where the others wait for theirs."""
    group = ProcessGroupTransport(None, timeout=1.0)
    layers = [rs.ContextParallel(group, rs.full(n), strategy="ring", layout="contiguous") for n in (N, 2 * N)]
    tensors = [cp.shard(*torch.randn(3, 1, 2, n, 4).unbind(), dim=2) for cp, n in zip(layers, (N, 2 * N), strict=True)]
    for cp, qkv in zip(layers, tensors, strict=True):
        cp.attention(*qkv)
    try:
        for n, (cp, qkv) in enumerate(zip(layers, tensors, strict=True)):
            if rank != 1 or n != skipped:
                cp.attention(*qkv)
        time.sleep(3.0)  # so that nobody is lost who was only done
    except rs.TransportError as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_call_fewer_on_one_rank_is_an_error_with_a_name(skipped: int) -> None:
    with Pool(3) as pool:
        heard = pool.run(one_call_fewer, skipped)
    waiting = [heard[0], heard[2]]
    assert all(kind in ("PeerTimeout", "PeerLost") and "forward step" in text for kind, text in waiting), heard
    assert any(kind == "PeerTimeout" and "stuck, or in another call" in text for kind, text in waiting)


def attend_or_die(rank: int) -> tuple[str, str]:
    """Rank 1 dies in the middle. What do the others hear?"""
    cp = rs.ContextParallel(ProcessGroupTransport(None, timeout=20.0), rs.full(N), strategy="ring", layout="contiguous")
    q, k, v, _ = inputs()
    q, k, v = cp.shard(q, k, v, dim=2)
    cp.attention(q, k, v)
    if rank == 1:
        import os

        os._exit(1)
    try:
        while True:
            cp.attention(q, k, v)
    except rs.TransportError as error:
        return type(error).__name__, str(error)


def test_a_lost_peer_is_named_on_every_survivor() -> None:
    heard: dict[int, tuple[str, str]] = {}

    with Pool(3) as pool, pytest.raises(rs.RingspanError, match="worker 1: went away"):
        pool.run(_report_or_die, on_message=lambda rank, message: heard.__setitem__(rank, message))
    assert set(heard) == {0, 2}
    for kind, text in heard.values():
        assert kind == "PeerLost"
        assert "rank 1" in text
        assert "forward step" in text


def _report_or_die(rank: int) -> None:
    from ringspan.testing.workers import tell

    tell(attend_or_die(rank))
