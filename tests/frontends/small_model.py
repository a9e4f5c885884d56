"""A small transformer with rotary embeddings, grouped key heads and a layer with a window, and its expected results.

Two sequences of packed documents, a token of which predicts the next of its document, in one process under dense masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringspan as rs

LENGTHS = ([6, 13, 4], [23])
N, VOCABULARY, WIDTH, DIM = 23, 17, 16, 4
REACH = 3


def masks(lengths: Sequence[int]) -> tuple[rs.Mask, rs.Mask]:
    """The masks of the two layers."""
    return rs.documents(lengths), rs.documents(lengths) & rs.window(left=REACH)


class Layer(nn.Module):
    """``block`` is opened around its attention; ``seen`` is a dense mask, for one process."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = nn.Linear(WIDTH, 4 * DIM), nn.Linear(WIDTH, 2 * DIM), nn.Linear(WIDTH, 2 * DIM)
        self.out, self.up, self.down = nn.Linear(4 * DIM, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.block: AbstractContextManager[Any] = nullcontext()
        self.seen: Tensor | None = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm(x)
        # However many heads this process has: tensor parallelism may have split them.
        q, k, v = (f(h).unflatten(-1, (-1, DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        # Halves change places. DTensors cannot roll(DIM // 2, -1) before torch 2.12.
        q, k = (t * cos + torch.cat(t.chunk(2, -1)[::-1], -1) * sin for t in (q, k))
        with self.block:
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen, enable_gqa=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def sequences() -> Tensor:
    """(sequence, batch, token)"""
    return torch.randint(VOCABULARY, (2, 1, N), generator=torch.Generator().manual_seed(1))


def rotation(positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.outer(positions.double(), torch.tensor([1.0, 0.3], dtype=torch.float64, device=positions.device)).repeat(
        1, DIM // 2
    )
    return angle.cos(), angle.sin()


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def truth() -> tuple[float, dict[str, Tensor]]:
    """The mean loss of all tokens with a label of both sequences, and its gradients, computed without ringspan."""
    whole = model()
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for tokens, lengths in zip(sequences(), LENGTHS, strict=True):
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        place = torch.cat([torch.arange(n) for n in lengths])
        q, k = torch.arange(N)[:, None], torch.arange(N)[None, :]
        whole.layers[0].seen = (document[q] == document[k]) & (k <= q)
        whole.layers[1].seen = whole.layers[0].seen & (k >= q - REACH)
        predicts = document[:-1] == document[1:]
        losses = token_losses(whole(tokens, *rotation(place))[:, :-1], tokens[:, 1:])
        total, counted = total + losses[:, predicts].sum(), counted + int(predicts.sum())
    loss = total / counted
    loss.backward()
    return loss.item(), {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
