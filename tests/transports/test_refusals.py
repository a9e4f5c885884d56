"""A rank that refuses a call before it communicates: its peers raise soon, with its name and error."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import ringspan as rs
from ringspan.engine import autograd, executor
from ringspan.transports import ProcessGroupTransport
from tests.conftest import Pools

pytestmark = pytest.mark.alone

WORLD, N = 3, 24
LIMIT = 12.0  # seconds: the time limit of the group
SOON = 4.0  # seconds in which all ranks must have raised, on a loaded machine; one second of them is the watchdog's patience

Report = tuple[str, str, float]


class Layer:
    """An attention layer over a group of its own, that has been called before unless ``is_new``."""

    def __init__(self, *, is_new: bool = False) -> None:
        self.cp = rs.ContextParallel(dist.new_group(), rs.causal(N), strategy="ring", layout="zigzag", timeout=LIMIT)
        torch.manual_seed(0)
        self.q, self.k, self.v = (x.requires_grad_() for x in self.cp.shard(*torch.randn(3, 1, 2, N, 8).unbind(), dim=2))
        if not is_new:
            self.attend().sum().backward()

    def attend(self, **options: object) -> torch.Tensor:
        with self.cp:
            return F.scaled_dot_product_attention(self.q, self.k, self.v, **options)  # type: ignore[arg-type]


def no_memory(*args: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("there is no memory left")


def dropout(layer: Layer, differs: bool) -> None:
    layer.attend(dropout_p=0.5 if differs else 0.0)


def attn_mask(layer: Layer, differs: bool) -> None:
    layer.attend(attn_mask=torch.ones(1) if differs else None)


def unequal_heads(layer: Layer, differs: bool) -> None:
    with layer.cp:
        F.scaled_dot_product_attention(layer.q, layer.k[:, :1] if differs else layer.k, layer.v)


def aux_of_flex(layer: Layer, differs: bool) -> None:
    with layer.cp:
        flex_attention(layer.q, layer.k, layer.v, return_aux=AuxRequest(max_scores=True) if differs else None)


def invalid_scale(layer: Layer, differs: bool) -> None:
    layer.cp.attention(layer.q, layer.k, layer.v, scale="large" if differs else 0.5)  # type: ignore[arg-type]


def plan_of_another_rank(layer: Layer, differs: bool) -> None:
    plan = layer.cp.plan.at(2) if differs else layer.cp.plan
    rs.attention(layer.q, layer.k, layer.v, plan=plan, group=layer.cp.group)


def no_memory_for_keys(layer: Layer, differs: bool) -> None:
    with mock.patch.object(autograd, "pack_kv", no_memory) if differs else mock.MagicMock():
        layer.attend()


def no_memory_for_the_backward_pass(layer: Layer, differs: bool) -> None:
    out = layer.attend()
    with mock.patch.object(executor, "_own_queries", no_memory) if differs else mock.MagicMock():
        out.sum().backward()


def no_memory_for_the_result(layer: Layer, differs: bool) -> None:
    with mock.patch.object(torch.Tensor, "detach", no_memory) if differs else mock.MagicMock():
        layer.attend()
    layer.attend()


def kernel_refuses(layer: Layer, differs: bool) -> None:
    layer.cp.backend = "fa4" if differs else "cpu"
    rs.attention(layer.q, layer.k, layer.v, plan=layer.cp.plan, group=layer.cp.group, backend=layer.cp.backend)


def unshard_of_another_length(layer: Layer, differs: bool) -> None:
    layer.cp.unshard(layer.q[:, :, 1:] if differs else layer.q, dim=2)


def weights_of_another_shape(layer: Layer, differs: bool) -> None:
    layer.cp.mean(torch.ones(4), torch.ones(3) if differs else torch.ones(4))


def gradients_of_no_tensors(layer: Layer, differs: bool) -> None:
    layer.cp.sum_gradients([None] if differs else [layer.q])  # type: ignore[list-item]


CASES: dict[str, tuple[Callable[[Layer, bool], None], str]] = {
    job.__name__: (job, error)
    for job, error in (
        (dropout, "UnplannedAttention"),
        (attn_mask, "UnplannedAttention"),
        (unequal_heads, "InputError"),
        (aux_of_flex, "InputError"),
        (invalid_scale, "InputError"),
        (plan_of_another_rank, "InputError"),
        (no_memory_for_keys, "OutOfMemoryError"),
        (no_memory_for_the_backward_pass, "OutOfMemoryError"),
        (no_memory_for_the_result, "OutOfMemoryError"),
        (kernel_refuses, "KernelError"),
        (unshard_of_another_length, "InputError"),
        (weights_of_another_shape, "InputError"),
        (gradients_of_no_tensors, "InputError"),
    )
}


def refuse_on_rank_1(rank: int, case: str, is_new: bool) -> Report:
    layer, start = Layer(is_new=is_new), time.monotonic()
    try:
        CASES[case][0](layer, rank == 1)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", time.monotonic() - start


@pytest.mark.parametrize("case", [*CASES])
def test_the_peers_learn_of_a_refused_call(pools: Pools, case: str) -> None:
    check(pools(WORLD).run(refuse_on_rank_1, case, False), CASES[case][1])


@pytest.mark.parametrize("case", ["dropout", "no_memory_for_keys", "invalid_scale", "kernel_refuses"])
def test_the_peers_learn_of_a_refused_first_call(pools: Pools, case: str) -> None:
    check(pools(WORLD).run(refuse_on_rank_1, case, True), CASES[case][1])


def check(reports: list[Report], error: str) -> None:
    for rank, (kind, message, seconds) in enumerate(reports):
        assert kind == (error if rank == 1 else "PeerFailed"), reports
        assert rank == 1 or (error in message and "rank 1" in message), reports
        assert seconds < SOON, reports


def refuse_on_all_ranks_and_go_on(rank: int) -> list[str]:
    """Every rank raises the same errors, one rank later than the others, and goes on."""
    layer, errors = Layer(is_new=True), []
    refused = ("dropout", "unequal_heads", "invalid_scale", "unshard_of_another_length", "weights_of_another_shape", "dropout")
    for case in refused:
        time.sleep(1.5 if rank == 1 else 0.0)
        try:
            CASES[case][0](layer, True)
        except rs.RingspanError as error:
            errors.append(type(error).__name__)
        layer.attend().sum().backward()
    layer.cp.mean(torch.ones(2))
    return errors


def test_an_error_on_all_ranks_ends_no_later_call(pools: Pools) -> None:
    errors = ["UnplannedAttention", *["InputError"] * 4, "UnplannedAttention"]
    assert pools(WORLD).run(refuse_on_all_ranks_and_go_on) == [errors] * WORLD


def refuse_on_rank_1_twice(rank: int) -> list[str]:
    """Rank 1 catches its errors. Its second one must not hide the first, which its peers wait for."""
    layer, errors = Layer(), []
    time.sleep(0.0 if rank == 1 else 0.5)
    for _ in range(2):
        try:
            dropout(layer, rank == 1)
        except rs.RingspanError as error:
            errors.append(type(error).__name__)
    return errors


def test_a_second_error_does_not_hide_the_first(pools: Pools) -> None:
    failed = ["PeerFailed", "PeerFailed"]
    assert pools(WORLD).run(refuse_on_rank_1_twice) == [failed, ["UnplannedAttention"] * 2, failed]


def refuse_in_a_group_of_one(rank: int) -> str:
    group = [dist.new_group([r]) for r in range(WORLD)][rank]
    with pytest.raises(rs.UnplannedAttention), rs.ContextParallel(ProcessGroupTransport(group), rs.causal(8)):
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 8).unbind(), dropout_p=0.5)
    return "ok"


def test_a_group_of_one_has_no_peers_to_tell(pools: Pools) -> None:
    assert pools(WORLD).run(refuse_in_a_group_of_one) == ["ok"] * WORLD
