"""A small model and training step, and one change of them for each mistake that check_parity names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringspan as rs

LENGTHS = [5, 9, 3]
N, VOCABULARY, WIDTH, HEADS = 17, 11, 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        angle = positions.to(x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype).repeat(2)
        q, k = (t * angle.cos() + t.roll(2, -1) * angle.sin() for t in (q, k))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class ByHand(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).tril().softmax(-1) @ v


class Outside(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with rs.local_attention():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Masked(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q.shape[-2], k.shape[-2]).bool())


class Layer(nn.Module):
    """``mixer`` is a layer between attention and the MLP."""

    def __init__(self, attention: nn.Module, mixer: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.attention, self.mixer = nn.LayerNorm(WIDTH), attention, mixer
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), positions)
        if self.mixer is not None:
            x = x + self.mixer(x)
        return x + self.mlp(x)


class Convolution(nn.Conv1d):
    """A causal convolution over 3 tokens."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x.mT, (2, 0))).mT


class SequenceNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True)


class TokenShift(nn.Module):
    """Mixes tokens in its own code, before its first module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


class Model(nn.Module):
    def __init__(self, *layers: nn.Module, learned_positions: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.table = nn.Parameter(torch.randn(N, WIDTH)) if learned_positions else None
        self.layers = nn.ModuleList(layers)

    def states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.table is not None:
            x = x + self.table[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, positions)
        return x

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.states(tokens, positions))


class WindowedLayer(Layer):
    """A layer with a block of its own."""

    def __init__(self, cp: rs.ContextParallel) -> None:
        super().__init__(Attention())
        self.block = cp.with_mask(cp.mask & rs.window(left=3))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        with self.block:
            return super().forward(x, positions)


def intact(**options: Any) -> Model:
    return Model(Layer(Attention()), Layer(Attention()), **options)


# -- steps -------------------------------------------------------------------------------------------------------------


def forward(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> tuple[Tensor, Tensor]:
    """The losses of this rank's tokens, and their labels."""
    mine, labels = cp.shard(tokens, rs.shift_labels(tokens, documents=LENGTHS), dim=1)
    with cp:
        logits = model(mine, cp.positions(documents=LENGTHS))
    return F.cross_entropy(logits.mT, labels, reduction="none"), labels


def finish(model: Model, loss: Tensor, cp: rs.ContextParallel) -> Tensor:
    loss.backward()
    cp.sum_gradients(model.parameters())
    return loss


def right(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    losses, labels = forward(model, tokens, cp)
    return finish(model, cp.mean(losses, labels >= 0), cp)


def part_of_the_loss(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    losses, _ = forward(model, tokens, cp)
    labels = (rs.shift_labels(tokens, documents=LENGTHS) >= 0).sum()
    return finish(model, losses.sum() / labels, cp)


def one_document(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    mine, labels = cp.shard(tokens, rs.shift_labels(tokens), dim=1)
    with cp:
        logits = model(mine, cp.positions())
    return finish(model, cp.mean(F.cross_entropy(logits.mT, labels, reduction="none"), labels >= 0), cp)


def without_backward(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    losses, labels = forward(model, tokens, cp)
    return cp.mean(losses, labels >= 0)


def positions_of_the_shard(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    mine, labels = cp.shard(tokens, rs.shift_labels(tokens), dim=1)
    with cp:
        logits = model(mine, torch.arange(mine.shape[1]))
    return finish(model, cp.mean(F.cross_entropy(logits.mT, labels, reduction="none"), labels >= 0), cp)


def labels_of_the_shard(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    mine = cp.shard(tokens, dim=1)
    labels = rs.shift_labels(mine.clone())  # a clone: shift_labels refuses what cp.shard gave
    with cp:
        logits = model(mine, cp.positions())
    return finish(model, cp.mean(F.cross_entropy(logits.mT, labels, reduction="none"), labels >= 0), cp)


def loss_of_the_rank(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    losses, labels = forward(model, tokens, cp)
    return finish(model, losses.sum() / (labels >= 0).sum(), cp)


def without_block(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    mine = cp.shard(tokens, dim=1)
    return finish(model, cp.mean(model(mine, cp.positions())), cp)


def chunked(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    """Tokens that are not cut by the layout."""
    at = cp.plan.q_layout.counts
    mine = tokens.split(list(at), dim=1)[cp.rank]
    with cp:
        return cp.mean(model(mine, cp.positions()).square())


def without_sum(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    losses, labels = forward(model, tokens, cp)
    loss = cp.mean(losses, labels >= 0)
    loss.backward()
    return loss


def averaged(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    """What DDP does."""
    loss = right(model, tokens, cp)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= cp.world
    return loss


def summed_averages(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    losses, labels = forward(model, tokens, cp)
    return finish(model, cp.mean(losses, labels >= 0, grads="averaged"), cp)


def head_on_whole_states(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    with cp:
        x = model.states(cp.shard(tokens, dim=1), cp.positions())
    logits = model.head(cp.unshard(x, dim=1))
    return finish(model, F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:]), cp)


def micro_batches(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    total = torch.zeros(())
    for part in (tokens, tokens.flip(1)):
        total = total + right(model, part, cp).detach()
    return total


def partial_unshard(model: Model, tokens: Tensor, cp: rs.ContextParallel) -> Tensor:
    """Each rank computes a part of the loss from all states, without grad="partial"."""
    with cp:
        x = model.states(cp.shard(tokens, dim=1), cp.positions())
    states = cp.shard(cp.unshard(x, dim=1).cumsum(1), dim=1)
    return finish(model, cp.mean(model.head(states).square()), cp)


# name -> (model, step, cause)
BROKEN: dict[str, tuple[Callable[[], Model], Callable[..., Tensor], str]] = {
    "positions of the shard": (intact, positions_of_the_shard, "positions"),
    "table cut at the length of the shard": (lambda: intact(learned_positions=True), right, "positions"),
    "labels of the shard": (intact, labels_of_the_shard, "labels"),
    "mean loss of each rank": (intact, loss_of_the_rank, "loss_per_rank"),
    "part of the loss": (intact, part_of_the_loss, "loss_part"),
    "attention by hand in one layer": (lambda: Model(Layer(Attention()), Layer(ByHand())), right, "mask"),
    "attention by hand": (lambda: Model(Layer(ByHand())), right, "mask"),
    "attention outside the block": (lambda: Model(Layer(Attention()), Layer(Outside())), right, "mask"),
    "a mask of the call": (lambda: Model(Layer(Masked())), right, "refused"),
    "no block": (intact, without_block, "mask"),
    "gradients not summed": (intact, without_sum, "not_summed"),
    "gradients averaged": (intact, averaged, "averaged"),
    "sum of gradients to be averaged": (intact, summed_averages, "summed_again"),
    "head on whole states": (intact, head_on_whole_states, "summed_again"),
    "sum after every micro-batch": (intact, micro_batches, "summed_per_micro_batch"),
    "partial gradients of unshard": (intact, partial_unshard, "partial_unshard"),
    "convolution": (lambda: Model(Layer(Attention()), Layer(Attention(), Convolution())), right, "mixing"),
    "norm over the sequence": (lambda: Model(Layer(Attention(), SequenceNorm())), right, "mixing"),
    "token shift": (lambda: Model(Layer(Attention(), TokenShift())), right, "mixing"),
    "tokens in another order": (intact, chunked, "inputs"),
}
