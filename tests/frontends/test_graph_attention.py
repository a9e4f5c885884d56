"""In strict mode, attention that no block has intercepted is found in the autograd graph of a loss."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from tests.conftest import Pools

N = 12


def in_a_thread(call: Callable[[], Tensor]) -> Tensor:
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def sdpa(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def by_hand(x: Tensor) -> Tensor:
    return ((x @ x.mT) * 0.3 + 1).softmax(-1) @ x


def without_fused_kernel(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(x)


def local(x: Tensor) -> Tensor:
    with rs.local_attention():
        return without_fused_kernel(sdpa(x)) + by_hand(x)


# What is computed beside an intercepted call.
HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "another thread": lambda x: in_a_thread(lambda: sdpa(x)),
    "a checkpoint in another thread": lambda x: in_a_thread(lambda: checkpoint(sdpa, x, use_reentrant=False)),
    "another thread, no fused kernel": lambda x: in_a_thread(lambda: without_fused_kernel(x)),
    "another thread, by hand": lambda x: in_a_thread(lambda: by_hand(x)),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "intercepted": sdpa,
    "another thread, local": lambda x: in_a_thread(lambda: local(x)),
    "local": local,
    "router": lambda x: (x @ torch.randn(4, 5)).softmax(-1) @ torch.randn(5, 4),
    "another length": lambda x: in_a_thread(lambda: sdpa(x[:, :, 1:])).sum() + x,
    "preprocessing in another thread": lambda x: in_a_thread(lambda: (x @ x.mT) @ x.relu()),
}


def losses(rank: int, names: list[str]) -> list[str]:
    return [loss_of((HIDDEN | RIGHT)[name]) for name in names]


def loss_of(beside: Callable[[Tensor], Tensor], use: Callable[..., Any] = rs.ContextParallel.mean) -> str:
    torch.manual_seed(0)
    cp = rs.ContextParallel(None, rs.causal(N), layout="contiguous", strategy="ring")
    x = cp.shard(torch.randn(1, 2, N, 4), dim=2).requires_grad_()
    with rs.strict():
        with cp:
            y = sdpa(x.relu()) + beside(x.relu())
        try:
            use(cp, y).backward()
        except rs.UnplannedAttention as error:
            return str(error)
    return "no error"


def outside_of_the_block(rank: int) -> list[str]:
    cp = rs.ContextParallel(None, rs.causal(N), layout="contiguous", strategy="ring")
    x = cp.shard(torch.randn(1, 2, N, 4), dim=2).requires_grad_()
    weight = torch.randn(7, 4)
    targets = torch.zeros(1, 2, N // 2, dtype=torch.int64)
    uses: list[Callable[[Tensor], Any]] = [
        cp.mean,
        cp.sum,
        lambda y: cp.cross_entropy(y, weight, targets),
        lambda y: cp.unshard(y, dim=2),
    ]
    with ThreadPoolExecutor(1) as executor, rs.strict():
        executor.submit(int).result()  # a thread that was started before the block
        with cp:
            y = sdpa(x) + executor.submit(sdpa, x).result()
        return [message(use, y) for use in uses] + [message(use, sdpa(x)) for use in uses]


def message(use: Callable[[Tensor], Any], y: Tensor) -> str:
    try:
        use(y)
    except rs.UnplannedAttention as error:
        return str(error)
    return "no error"


def test_hidden_attention_is_found_by_the_loss(pools: Pools) -> None:
    for of_rank in pools(2).run(losses, [*HIDDEN]):
        for name, printed in zip(HIDDEN, of_rank, strict=True):
            assert "attention that no block has intercepted" in printed, name
            assert "Backward0, of a result of shape (" in printed, name


def test_what_is_right_or_meant_to_be_local_is_allowed(pools: Pools) -> None:
    for of_rank in pools(2).run(losses, [*RIGHT]):
        assert dict(zip(RIGHT, of_rank, strict=True)) == dict.fromkeys(RIGHT, "no error")


def test_every_loss_and_unshard_look_at_the_graph(pools: Pools) -> None:
    for of_rank in pools(2).run(outside_of_the_block):
        assert len(of_rank) == 8
        assert all("another thread than the one that entered the block" in printed for printed in of_rank)


@pytest.mark.usefixtures("world_of_one")
def test_one_rank_has_all_keys() -> None:
    assert loss_of(HIDDEN["another thread"]) == "no error"
