"""FlexAttention under context parallelism, compared with one device.

    torchrun --nproc-per-node 4 examples/flex_cp.py            # gloo on CPUs, NCCL where every process has a GPU

Four processes split a batch of sequences. Each process calls PyTorch's own flex_attention on its tokens, with
BlockMasks of the whole sequence: a causal mask_mod, and packed documents that differ between batch rows. The score_mod
adds a learned bias for each distance. The output and all gradients are gathered and compared with dense attention on
one device.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import ringspan as rs

BATCH, HEADS, KV_HEADS, TOKENS, DIM = 2, 8, 2, 1000, 32  # no length needs to be divisible by anything
DOCUMENTS = 28
REACH = 16


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def documents(ids: Tensor) -> Callable[..., Tensor]:
    def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[b, q] == ids[b, k]) & (k <= q)

    return same_document


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask_mod: Callable[..., Tensor]) -> Tensor:
    """Dense attention of the whole sequence on one device."""
    b = torch.arange(BATCH, device=q.device)[:, None, None, None]
    i, j = torch.arange(TOKENS, device=q.device)[:, None], torch.arange(TOKENS, device=q.device)[None, :]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    score = q @ k.mT * DIM**-0.5 + bias[:, (j - i).clamp(-REACH, REACH) + REACH]
    return score.masked_fill(~mask_mod(b, None, i, j), -torch.inf).softmax(-1) @ v


def split(cp: rs.ContextParallel, whole: list[Tensor], dout: Tensor, block_mask: BlockMask) -> list[Tensor]:
    """Attention over all ranks: the output and all gradients, gathered."""
    q, k, v = (x.detach().requires_grad_() for x in cp.shard(*whole[:3], dim=2))
    bias = whole[3].detach().requires_grad_()
    with cp:
        out = flex_attention(q, k, v, score_mod=rs.relative_bias(bias), block_mask=block_mask, enable_gqa=True)
    out.backward(cp.shard(dout, dim=2))
    cp.sum_gradients([bias])  # each rank has the gradient of its own pairs
    return [*(cp.unshard(x, dim=2).detach() for x in (out, q.grad, k.grad, v.grad)), bias.grad]


def main() -> None:
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpus else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)

    source = torch.Generator().manual_seed(0)  # the same tensors on every rank
    shapes = [(BATCH, h, TOKENS, DIM) for h in (HEADS, KV_HEADS, KV_HEADS)] + [(HEADS, 2 * REACH + 1)]
    whole = [torch.randn(shape, generator=source).to(device).requires_grad_() for shape in shapes]
    dout = torch.randn(shapes[0], generator=source).to(device)
    cuts = torch.stack([torch.randperm(TOKENS - 1, generator=source)[: DOCUMENTS - 1] + 1 for _ in range(BATCH)])
    ids = (torch.arange(TOKENS) >= cuts.sort().values[:, :, None]).sum(1).to(device)

    cp = rs.ContextParallel(None, rs.causal(TOKENS), layout="zigzag")
    for name, mask_mod, batch in (("causal", causal, None), ("documents", documents(ids), BATCH)):
        block_mask = create_block_mask(mask_mod, batch, None, TOKENS, TOKENS, device=device)
        got = split(cp, whole, dout, block_mask)
        alone = dense(*(x.double() for x in whole), mask_mod)
        want = [alone.detach(), *torch.autograd.grad(alone, whole, dout.double())]
        if dist.get_rank() == 0:
            off = [((x - y).abs().max() / y.abs().max()).item() for x, y in zip(got, want, strict=True)]
            figures = ", ".join(f"{what} {x:.1e}" for what, x in zip(("out", "dq", "dk", "dv", "dbias"), off, strict=True))
            print(f"{name} over {cp.world} ranks, relative to one device: {figures}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
