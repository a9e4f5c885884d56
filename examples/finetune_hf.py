"""Fine-tune a model of transformers on packed documents, with every sequence split over the processes.

    torchrun --nproc-per-node 2 examples/finetune_hf.py                                    # a tiny Gemma 3, random weights
    torchrun --nproc-per-node 8 examples/finetune_hf.py --model google/gemma-3-1b-it       # needs the weights

The tiny model has sliding-window and full layers. With ``--check``, the first process also trains alone on the same
batches, and the largest difference between the losses is printed.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

import ringspan as rs
from ringspan.integrations.transformers import prepare

DOCUMENTS = [[120, 301, 90], [200, 66, 245], [511]]  # the lengths of the documents of each batch; ranks need not divide them


def make_model(name: str | None, device: str) -> nn.Module:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to(device)
    torch.manual_seed(0)  # the same weights in every process
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return Gemma3ForCausalLM(config).to(device)


def train(model: nn.Module, device: str, steps: int, *, alone: bool = False) -> list[float]:
    """Train, on all processes or on this one alone, and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if alone:
        model.set_attn_implementation("sdpa")
    else:
        prepare(model)  # for most models, set_attn_implementation("ringspan")
    losses = []
    for step in range(steps):
        lengths = DOCUMENTS[step % len(DOCUMENTS)]
        generator = torch.Generator().manual_seed(step)  # the same batch in every process
        ids = torch.randint(256, (1, sum(lengths)), generator=generator).to(device)
        labels = rs.shift_labels(ids, documents=lengths)  # before sharding: the next token may be on another rank
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        if alone:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            loss.backward()
        else:
            cp = rs.ContextParallel(None, rs.documents(lengths))
            ids, labels, positions = cp.shard(ids, labels, positions, dim=1)
            with cp:
                logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            each = F.cross_entropy(logits.float().mT, labels, reduction="none")
            loss = cp.mean(each, labels >= 0)  # over all tokens of all ranks that have a label
            loss.backward()
            cp.sum_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the hub, or a folder; default: a tiny one")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="compare the losses with those of one process")
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    losses = train(make_model(options.model, device), device, options.steps)
    if dist.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.4f}")
        if options.check:
            alone = train(make_model(options.model, device), device, options.steps, alone=True)
            print(f"largest difference from one process: {max(abs(a - b) for a, b in zip(losses, alone, strict=True)):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
