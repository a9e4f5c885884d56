"""One step of GRPO over a tree of shared prefixes, compared with the same step over separate rows.

    torchrun --nproc-per-node 2 examples/grpo_step.py

Each prompt has a group of answers. Separate rows repeat the prompt for every answer. ``rs.fold`` stores it once, and
the tree is split over the processes. Printed are the tokens and visible pairs of both, the seconds of both steps on
this machine, and how far the losses and gradients are apart.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ringspan as rs

PROMPTS, ANSWERS = 2, 8
PROMPT_TOKENS, ANSWER_TOKENS = 512, 64
VOCABULARY, WIDTH, HEADS, CLIP = 64, 64, 4, 0.2


class Model(nn.Module):
    """Two layers of attention with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.project = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])

    def forward(self, tokens: Tensor, positions: Tensor, *, is_causal: bool = False) -> Tensor:
        angle = torch.outer(positions.double(), 0.1 ** torch.arange(WIDTH // HEADS // 2)).repeat(1, 2)
        cos, sin = angle.cos(), angle.sin()
        x = self.embed(tokens)
        for project in self.project:
            q, k, v = project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            q, k = (t * cos + t.roll(t.shape[-1] // 2, -1) * sin for t in (q, k))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2)
        return self.head(x)


def batch() -> tuple[list[Tensor], list[Tensor]]:
    """Rows of a prompt and an answer, and the advantage of each token of an answer, 0 for the prompt."""
    rows, advantages = [], []
    for _ in range(PROMPTS):
        prompt = torch.randint(VOCABULARY, (PROMPT_TOKENS,))
        rewards = torch.randn(ANSWERS, dtype=torch.float64)
        for reward in (rewards - rewards.mean()) / rewards.std():
            rows.append(torch.cat([prompt, torch.randint(VOCABULARY, (ANSWER_TOKENS,))]))
            advantages.append(torch.cat([torch.zeros(PROMPT_TOKENS), reward.repeat(ANSWER_TOKENS)]))
    return rows, advantages


def clipped(log_probability: Tensor, before: Tensor, advantage: Tensor) -> Tensor:
    """The clipped objective of PPO. For a fixed sign it is linear in the advantage."""
    ratio = (log_probability - before).exp()
    return torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy(logits, targets, reduction="none")


def on_rows(model: Model, rows: list[Tensor], advantages: list[Tensor]) -> Tensor:
    """The loss of separate rows, one after the other, in one process."""
    total = torch.zeros((), dtype=torch.float64)
    for row, advantage in zip(rows, advantages, strict=True):
        logits = model(row[None], torch.arange(len(row)), is_causal=True)
        new = log_probabilities(logits[0, :-1], row[1:])
        loss = -clipped(new, new.detach() - 0.1, advantage[1:]).sum() / (len(rows) * ANSWER_TOKENS)
        loss.backward()
        total += loss.detach()
    return total


def on_tree(model: Model, rows: list[Tensor], advantages: list[Tensor]) -> Tensor:
    """The same loss over the tree, split over the processes."""
    trie = rs.fold(rows)
    cp = rs.ContextParallel(None, trie.mask())
    # Rows that share a target can have advantages of both signs, and the objective is linear for each sign alone.
    gains = cp.targets(rs.shift_labels(tree=trie, weights=[a.clamp(min=0) for a in advantages]))
    losses = cp.targets(rs.shift_labels(tree=trie, weights=[a.clamp(max=0) for a in advantages]))
    with cp:
        logits = model(cp.shard(trie.tokens[None], dim=1), cp.positions(tree=trie))
    new = log_probabilities(logits[0, gains.token], gains.target)
    before = new.detach() - 0.1  # in training, the values that were recorded when the answers were sampled
    objective = clipped(new, before, gains.weight) + clipped(new, before, losses.weight)
    loss = cp.sum(-objective) / (len(rows) * ANSWER_TOKENS)
    loss.backward()
    cp.sum_gradients(model.parameters())
    return loss.detach()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model and batch in every process
    model, (rows, advantages) = Model().double(), batch()
    found = {}
    for name, step in (("rows", on_rows), ("tree", on_tree)):
        step(model, rows[:1], advantages[:1])  # the first call allocates memory
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        loss = step(model, rows, advantages)
        seconds = time.perf_counter() - start
        found[name] = (loss, [p.grad for p in model.parameters()], seconds)
        model.zero_grad()
    apart = [float((a - b).abs().max()) for a, b in zip(found["rows"][1], found["tree"][1], strict=True)]
    if dist.get_rank() == 0:
        many, one = rs.documents([len(row) for row in rows]), rs.fold(rows).mask()
        for what, a, b in (("tokens", many.lengths[0], one.lengths[0]), ("pairs", many.area, one.area)):
            print(f"{what}: {a:,} in rows, {b:,} in the tree: {a / b:.2f}x fewer")
        rows_s, tree_s = found["rows"][2], found["tree"][2]
        print(f"seconds: {rows_s:.2f} for rows in one process, {tree_s:.2f} for the tree over {dist.get_world_size()}")
        print(f"loss: {found['rows'][0] - found['tree'][0]:.1e} apart; gradients: at most {max(apart):.1e} apart")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
