"""aten's attention operators, a pair for each SDPA backend, and names of operators that are overridden or refused."""

from __future__ import annotations

import torch

_aten = torch.ops.aten

flash_forward = _aten._flash_attention_forward
flash_backward = _aten._flash_attention_backward
cpu_flash_forward = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
cudnn_forward = _aten._scaled_dot_product_cudnn_attention
cudnn_backward = _aten._scaled_dot_product_cudnn_attention_backward
efficient_forward = _aten._scaled_dot_product_efficient_attention
efficient_backward = _aten._scaled_dot_product_efficient_attention_backward

# The operators of SDPA's flash backend, by the names that ``torch.library`` takes.
SDPA_FLASH_FORWARD = "_scaled_dot_product_flash_attention"
SDPA_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"

# Fused layers and packed sequences: attention that does not call ``F.scaled_dot_product_attention``.
NATIVE_MULTI_HEAD_ATTENTION = "_native_multi_head_attention"
TRANSFORMER_ENCODER_LAYER = "_transformer_encoder_layer_fwd"
# What ``torch.nn.attention.varlen.varlen_attn`` and ``varlen_attn_out`` call. Importing their module imports
# torch._dynamo.
VARLEN_ATTENTION = "_varlen_attn"
VARLEN_ATTENTION_OUT = "_varlen_attn_out"
