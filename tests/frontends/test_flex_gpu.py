"""FlexAttention under context parallelism, compiled on a CUDA device, against dense float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import ringspan as rs
from ringspan.kernels import Inputs, availability, eager, flex, select_kernel
from tests.flex_reference import dense_flex

pytestmark = pytest.mark.gpu

B, H, G, N, D = 2, 4, 2, 1000, 64


def in_documents(seed: int, count: int = 28) -> Callable[..., Tensor]:
    source = torch.Generator().manual_seed(seed)
    cuts = torch.stack([torch.randperm(N - 1, generator=source)[: count - 1] + 1 for _ in range(B)]).sort().values
    ids = (torch.arange(N) >= cuts[:, :, None]).sum(1).cuda()
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def tensors(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(B, H, N, D), (B, G, N, D), (B, G, N, D), (H, 33)]
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


def on_cpu(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The indices of the truth are made on the CPU."""
    return lambda *indices: function(*(x.cuda() for x in indices))


MASK_MODS = {"causal": (causal, None), "documents": (None, B)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["ring", "exchange", "ulysses", "pass_q"])
@pytest.mark.parametrize("name", MASK_MODS)
def test_compiled_through_flex(name: str, strategy: str, dtype: torch.dtype) -> None:
    mask_mod, batch = MASK_MODS[name]
    mask_mod = mask_mod or in_documents(0)
    block_mask = create_block_mask(mask_mod, batch, None, N, N, device="cuda")
    q, k, v, bias = tensors(dtype)
    out, lse = rs.LocalWorld(4).flex_attention(
        q,
        k,
        v,
        rs.relative_bias(bias),
        block_mask,
        enable_gqa=True,
        return_lse=True,
        layout="zigzag",
        strategy=strategy,
        backend="flex",
    )
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    of_cuda = rs.relative_bias(exact[3])
    want = dense_flex(*exact[:3], on_cpu(mask_mod), lambda score, *i: of_cuda(score, *(x.cuda() for x in i)))
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v, bias), dout)
    wanted = torch.autograd.grad(want.out, exact, dout.double())
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for mine, should in zip((out, lse, *grads), (*want, *wanted), strict=True):
        assert (mine.double() - should).abs().max() <= tolerance * max(1.0, should.abs().max().item())


def test_auto_takes_flex_and_eager_is_there_for_the_rest() -> None:
    inputs = {"device": torch.device("cuda"), "head_dim": 64, "v_dim": 64, "has_mods": True}
    if dict(availability(Inputs(dtype=torch.bfloat16, **inputs)))["flex"] is None:  # type: ignore[arg-type]
        assert select_kernel("auto", Inputs(dtype=torch.bfloat16, **inputs)) is flex  # type: ignore[arg-type]
    assert select_kernel("auto", Inputs(dtype=torch.float64, **inputs)) is eager  # type: ignore[arg-type]


def test_other_documents_are_not_other_programs() -> None:
    """Twenty batches of documents, of one shape: what was compiled for the first two serves all."""
    from torch._dynamo.utils import counters

    programs = []
    for seed in range(20):
        q, k, v, bias = tensors(torch.bfloat16)
        mask = rs.mask_mod(in_documents(seed), N, batch=B)
        out = rs.LocalWorld(2).attention(
            q, k, v, mask=mask, score_mod=rs.relative_bias(bias), backend="flex", strategy="gather", layout="contiguous"
        )
        out.sum().backward()
        programs.append(counters["stats"]["unique_graphs"])
    assert programs[2:] == programs[1:2] * 18
