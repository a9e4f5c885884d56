"""The sizes of the demo's model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of the model. ``hugging_face`` selects a Llama of transformers instead of the demo's own model."""

    vocabulary: int = 257
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hugging_face: bool = False

    @property
    def width(self) -> int:
        return self.heads * self.head_dim
