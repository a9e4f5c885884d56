"""The attention of XLNet, with relative positions.

The score of a query i and a key j has a term ``(q + r_r_bias) · W r(i - j)``, where r is sines and cosines of the
distance. In one process the layer computes it for all distances and shifts the rows. No rank has all distances; but a
sine of a difference is a sum of products, so that the term is a dot product of features of i and of j::

    u = Wᵀ (q + r_r_bias)                      one number for each sine and cosine
    sin(f (i - j)) = sin(f i) cos(f j) - cos(f i) sin(f j)
    cos(f (i - j)) = cos(f i) cos(f j) + sin(f i) sin(f j)

    score = (q + r_w_bias, u_sin sin(f i) + u_cos cos(f i), u_cos sin(f i) - u_sin cos(f i)) · (k, cos(f j), sin(f j))

So keys have ``d_model`` more features than in one process.

Legend: B batch, H heads, S tokens of this rank, D head dim, M features of the model, F = M / 2 frequencies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ringspan.errors import UnplannedAttention
from ringspan.integrations.transformers.layer_mask import LayerMask
from ringspan.integrations.transformers.masks import ringspan_mask
from ringspan.integrations.transformers.model_block import block_of_model
from ringspan.integrations.transformers.model_call import documents_of_call
from ringspan.integrations.transformers.packing import refuse_documents
from ringspan.integrations.transformers.refusals import named_refusals


def xlnet_attention(
    self: Any,
    original: Callable[..., Any],
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    k_of_distances: Tensor,
    seg_mat: Tensor | None = None,
    attn_mask: Tensor | None = None,
    output_attentions: bool = False,
) -> Any:
    """Run ``XLNetRelativeAttention.rel_attn_core``, in a block over all ranks."""
    block = block_of_model()
    if block is None:
        return original(self, q_SBHD, k_SBHD, v_SBHD, k_of_distances, seg_mat, attn_mask, output_attentions)
    with named_refusals(self, block.refuse):
        refuse_documents(documents_of_call(), block.mask, "XLNet")
        count, batch = q_SBHD.shape[:2]
        _refuse(self, seg_mat, attn_mask, (count, len(k_SBHD)), output_attentions)
        made = ringspan_mask(
            batch, count, count, mask_function=bidirectional_mask_function if attn_mask is None else causal_mask_function
        )
        assert isinstance(made, LayerMask)
        positions_S = block.positions(device=q_SBHD.device)
        q_SBHE, k_SBHE = _with_positions(self, q_SBHD, k_SBHD, positions_S)
        q_BHSE, k_BHSE, v_BHSD = (x.permute(1, 2, 0, 3) for x in (q_SBHE, k_SBHE, v_SBHD))
        out_BHSD = made.block_of(None, None, None).attention(q_BHSE, k_BHSE, v_BHSD, scale=self.scale)
    return out_BHSD.permute(2, 0, 1, 3)


def xlnet_distances(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``XLNetModel.relative_positional_encoding``. In a block, raise if a distance is not just ``i - j``."""
    block = block_of_model()
    if block is not None and (self.clamp_len > 0 or self.bi_data):
        with named_refusals(self, block.refuse):
            raise UnplannedAttention(f"clamp_len={self.clamp_len} and bi_data={self.bi_data} change the distances of tokens")
    return original(self, *args, **kwargs)


def _with_positions(layer: Any, q_SBHD: Tensor, k_SBHD: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys with the features of their positions."""
    even_F = torch.arange(0, layer.d_model, 2, device=q_SBHD.device).float()
    angles_SF = positions_S[:, None].float() / torch.pow(10000, even_F / layer.d_model)
    sin_S11F, cos_S11F = (x[:, None, None, :].to(q_SBHD.dtype) for x in (angles_SF.sin(), angles_SF.cos()))
    u_SBHM = torch.einsum("sbhd,mhd->sbhm", q_SBHD + layer.r_r_bias, layer.r)
    u_sin, u_cos = u_SBHM.chunk(2, dim=-1)
    q_parts = [q_SBHD + layer.r_w_bias, u_sin * sin_S11F + u_cos * cos_S11F, u_cos * sin_S11F - u_sin * cos_S11F]
    shape = (*k_SBHD.shape[:-1], -1)
    return torch.cat(q_parts, dim=-1), torch.cat([k_SBHD, cos_S11F.expand(shape), sin_S11F.expand(shape)], dim=-1)


def _refuse(layer: Any, seg_mat: Any, attn_mask: Tensor | None, lengths: tuple[int, int], output_attentions: bool) -> None:
    problem = ""
    if layer.training and layer.dropout.p:
        problem = f"a dropout of {layer.dropout.p} of its weights and positions: set config.dropout to 0"
    elif lengths[0] != lengths[1]:
        problem = "mems, which are not split over ranks: pass use_mems=False"
    elif seg_mat is not None:
        problem = "segments (token_type_ids), which it compares on this rank only"
    elif output_attentions:
        problem = "to return its weights, which no rank has: output_attentions=False"
    elif attn_mask is not None and not torch.equal(attn_mask[:, :, 0, 0], attn_mask.new_ones(lengths).triu(1)):
        problem = "a mask that is not causal (attention_mask, perm_mask), over the tokens of this rank only"
    elif attn_mask is not None and attn_mask.shape[2] > 1:
        problem = "an attention_mask or a perm_mask, over the tokens of this rank only: pack documents instead"
    if problem:
        raise UnplannedAttention(f"this layer has {problem}")
