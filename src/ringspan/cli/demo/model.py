"""The demo's model: a small decoder-only transformer with rotary embeddings and grouped key heads.

It contains nothing about ranks. It takes the position of each token (``positions``), because a rank's tokens are not
the first ones of the sequence, and calls PyTorch's own attention. That is all a model must do to run inside ``with
cp:``.

Legend: B batch, S tokens here, M model width, H query heads, G key heads (G divides H), D head dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringspan.cli.demo.config import ModelConfig
from ringspan.cli.demo.hf_model import HuggingFaceModel


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BSM: Tensor, rotation_SD: tuple[Tensor, Tensor], attn_mask: Tensor | None) -> Tensor:
        c = self.config
        heads_BHSD = self.qkv(x_BSM).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        q_BHSD, k_BGSD, v_BGSD = heads_BHSD.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        q_BHSD, k_BGSD = rotate(q_BHSD, rotation_SD), rotate(k_BGSD, rotation_SD)
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, attn_mask=attn_mask, enable_gqa=True)
        return self.out(out_BHSD.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.up = nn.Linear(config.width, 6 * config.width, bias=False)
        self.down = nn.Linear(3 * config.width, config.width, bias=False)

    def forward(self, x_BSM: Tensor, rotation_SD: tuple[Tensor, Tensor], attn_mask: Tensor | None) -> Tensor:
        x_BSM = x_BSM + self.attention(self.attention_norm(x_BSM), rotation_SD, attn_mask)
        gate, up = self.up(self.mlp_norm(x_BSM)).chunk(2, dim=-1)
        return x_BSM + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    """Logits (B, S, V) for tokens (B, S) at ``positions`` (S) of the sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_BS: Tensor, *, positions: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        rotation_SD = rotation(positions, self.config.head_dim)
        x_BSM = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSM = block(x_BSM, rotation_SD, attn_mask)
        return self.head(self.norm(x_BSM))


def build(config: ModelConfig, seed: int, *, attention: str = "ringspan") -> nn.Module:
    """Return the model with weights that depend on the seed alone. The global random generator is left unchanged.

    ``attention`` is the attention of a model of transformers. The demo's own model needs none: it calls PyTorch's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.hugging_face:
            model: nn.Module = HuggingFaceModel(config, attention)
        else:
            model = Transformer(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        return model


def rotation(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines (S, D) that rotate a head by its token's position. Computed in float64: positions
    are large."""
    rates = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles_SD = (positions.double()[:, None] * rates).repeat(1, 2)
    return angles_SD.cos().float(), angles_SD.sin().float()


def rotate(x_BHSD: Tensor, rotation_SD: tuple[Tensor, Tensor]) -> Tensor:
    cos_SD, sin_SD = rotation_SD
    left, right = x_BHSD.chunk(2, dim=-1)
    return x_BHSD * cos_SD + torch.cat([-right, left], dim=-1) * sin_SD
