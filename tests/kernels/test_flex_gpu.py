"""The flex kernel on a CUDA device against dense float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.kernels import Inputs, availability, flex
from ringspan.kernels.reference import dense_attention
from tests.kernels.compare import MASKS, compared, error

pytestmark = pytest.mark.gpu


def skip_if_unavailable(dtype: torch.dtype, head_dim: int, v_dim: int) -> None:
    reason = dict(availability(Inputs(device=torch.device("cuda"), dtype=dtype, head_dim=head_dim, v_dim=v_dim)))["flex"]
    if reason:
        pytest.skip(f"flex {reason}")


def inputs(mask: rs.Mask, dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    skip_if_unavailable(dtype, *dims)
    torch.manual_seed(0)
    (rows, cols), (h, g), (d, e) = mask.lengths, heads, dims
    shapes = ((2, h, rows, d), (2, g, cols, d), (2, g, cols, e))
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v


# dtype, (query heads, key heads), (head dim, value dim). Each is compiled, which is slow, so each varies several of
# them.
KINDS = {
    "bfloat16, shared heads, 128": (torch.bfloat16, (8, 2), (128, 128)),
    "float16, 64": (torch.float16, (4, 4), (64, 64)),
    "float32, shared heads, 64": (torch.float32, (4, 2), (64, 64)),
}
OTHER_DIMS = {
    "bfloat16, 64 and 128": (torch.bfloat16, (4, 2), (64, 128)),
    "bfloat16, 96 and 40": (torch.bfloat16, (4, 4), (96, 40)),
}
CASES = {
    **{f"{kind}: {name}": (*KINDS[kind], mask) for kind in KINDS for name, mask in MASKS.items()},
    **{f"{kind}: {name}": (*OTHER_DIMS[kind], MASKS[name]) for kind in OTHER_DIMS for name in ("documents", "not near")},
    "float16, more keys than queries": (*KINDS["float16, 64"], rs.causal(300, 700, align="end")),
    "float16, one query": (*KINDS["float16, 64"], rs.causal(1, 700, align="end")),
}


@pytest.mark.parametrize(("dtype", "heads", "dims", "mask"), CASES.values(), ids=CASES)
def test_error_is_at_most_twice_that_of_plain_attention(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], mask: rs.Mask
) -> None:
    q, k, v = inputs(mask, dtype, heads, dims)
    for each in compared(q, k, v, mask, backend="flex"):
        # In float32 the errors are so small that the order of summation matters.
        assert each.error <= 2 * each.yardstick + 1e-6 * each.exact.abs().max().item()


@pytest.mark.parametrize("mask", [MASKS[name] for name in ("causal", "documents", "blind rows", "not near")])
def test_gradient_of_lse(mask: rs.Mask) -> None:
    q, k, v = inputs(mask, *KINDS["float32, shared heads, 64"])
    want = dense_attention(q, k, v, torch.from_numpy(mask.dense()).cuda())
    dout, dlse = torch.randn_like(want.out), torch.randn_like(want.lse)
    wanted = torch.autograd.grad(want, (q, k, v), (dout, dlse))
    got = rs.LocalWorld(3).attention(q, k, v, mask=mask, backend="flex", return_lse=True)
    grads = torch.autograd.grad((got.out, got.lse), (q, k, v), (dout.float(), dlse.float()))
    for mine, exact in zip(grads, wanted, strict=True):
        assert error(mine, exact) <= 1e-4 * exact.abs().max().item()


def test_other_documents_need_no_recompilation() -> None:
    from torch._dynamo.utils import counters

    lengths = [[100 + 10 * n, 500 - 10 * n, 7, 417] for n in range(10)]
    programs = []
    for some in lengths:
        mask = rs.documents(some)
        q, k, v = inputs(mask, *KINDS["float16, 64"])
        rs.LocalWorld(1).attention(q, k, v, mask=mask, backend="flex").sum().backward()
        programs.append(counters["stats"]["unique_graphs"])
    assert programs == programs[:1] * len(lengths)


def test_the_cache_is_cleared_while_another_stream_reads_from_it() -> None:
    mask = rs.documents([50, 450, 7, 217])
    q, k, v = inputs(mask, *KINDS["float16, 64"])
    world = rs.LocalWorld(1)
    want = world.attention(q, k, v, mask=mask, backend="flex")
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)
        got = world.attention(q, k, v, mask=mask, backend="flex")
    flex.make_flex_calls.cache_clear()  # type: ignore[attr-defined]
    # Allocate memory of all sizes that the cached tensors had, on the stream that they were made on, and overwrite it.
    overwritten = [torch.full((n,), 2**30, dtype=torch.int32, device="cuda") for n in range(1, 2000) for _ in range(2)]
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    del overwritten


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_than_the_current_device() -> None:
    mask = rs.documents([50, 450, 7, 217])
    q, k, v = inputs(mask, *KINDS["float16, 64"])
    want = rs.LocalWorld(2).attention(q, k, v, mask=mask, backend="flex")
    there = [x.detach().to("cuda:1").requires_grad_() for x in (q, k, v)]
    got = rs.LocalWorld(2).attention(*there, mask=mask, backend="flex")
    torch.autograd.grad(got.sum(), there)
    assert torch.equal(got.to("cuda:0"), want)


def test_all_documents_are_one_launch() -> None:
    mask = rs.documents([50] * 20)
    q, k, v = inputs(mask, *KINDS["float16, 64"])
    world = rs.LocalWorld(1)
    world.attention(q, k, v, mask=mask, backend="flex")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        world.attention(q, k, v, mask=mask, backend="flex")
    launched = {event.key: event.count for event in profile.key_averages() if "flex_attention" in event.key}
    assert sum(launched.values()) == 1, launched


@pytest.mark.parametrize("where", [0, 1, 2, 3], ids=["q", "k", "v", "dout"])
def test_a_nan_stays_in_its_document(where: int) -> None:
    """No bit of another document changes; all of them share a block."""
    mask, document = rs.documents([50, 30, 70]), slice(50, 80)
    q, k, v = inputs(mask, torch.bfloat16, (4, 2), (64, 64))
    given = [*(x.detach() for x in (q, k, v)), torch.randn_like(q)]

    def results(poison: bool) -> list[Tensor]:
        tensors = [x.clone() for x in given]
        if poison:
            tensors[where][1, 1, 60] = torch.nan
        leaves = [x.requires_grad_() for x in tensors[:3]]
        out = rs.LocalWorld(1).attention(*leaves, mask=mask, backend="flex")
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]

    for name, clean, found in zip(("out", "dq", "dk", "dv"), results(poison=False), results(poison=True), strict=True):
        others = torch.ones(150, dtype=torch.bool, device="cuda")
        others[document] = False
        assert torch.equal(found[:, :, others], clean[:, :, others]), f"{name} of another document has changed"
        assert found[1].isnan().any() or (where == 3 and name == "out"), f"{name}: the NaN is lost"
