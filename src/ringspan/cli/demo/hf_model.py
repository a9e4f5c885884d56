"""The demo's model of ``--hf``: a small Llama of transformers, called as the demo calls its own model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ringspan.cli.demo.config import ModelConfig


def why_not() -> str | None:
    """Return why ``--hf`` cannot run, or None."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "--hf needs transformers; install it with: pip install 'ringspan[hf]'"
    return None


class HuggingFaceModel(nn.Module):
    """Logits (B, S, V) for tokens (B, S) at ``positions`` (S). The attention is ``"ringspan"`` inside a block, and
    ``"sdpa"`` with an ``attn_mask`` (S, S) outside."""

    def __init__(self, config: ModelConfig, attention: str) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        import ringspan.integrations.transformers  # noqa: F401 (registers the attention "ringspan")

        sizes = LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=3 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
        )
        self.model: Any = LlamaForCausalLM(sizes)
        self.model.set_attn_implementation(attention)

    def forward(self, tokens_BS: Tensor, *, positions: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        mask = None if attn_mask is None else attn_mask[None, None]
        result = self.model(input_ids=tokens_BS, position_ids=positions[None], attention_mask=mask, use_cache=False)
        logits: Tensor = result.logits
        return logits
