"""Layers with a short causal convolution over the tokens (LFM2, Inkling).

A token needs the K - 1 tokens before it, and some of them are on other ranks. So while such a layer runs inside a
block, ``F.conv1d`` is computed from windows of tokens that ``cp.halo`` has brought together::

    rank 0 has tokens 0 1 6 7, rank 1 has 2 3 4 5, and K = 3

    token of rank 0    0      1      6      7
    window           . . 0  . 0 1  4 5 6  5 6 7

No window reaches into another document of the block's mask, or of ``cu_seq_lens_q``.

Legend: B batch, C channels, S tokens of this rank, K width of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ringspan.errors import UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.integrations.transformers.model_block import block_of_model
from ringspan.integrations.transformers.packing import refuse_documents
from ringspan.integrations.transformers.refusals import CONVOLVES_WITHOUT_CALL, named_refusals


def convolution_over_ranks(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a layer with a causal convolution. In a block, the convolution is over the tokens of all
    ranks."""
    block = block_of_model()
    if block is None:
        return original(self, *args, **kwargs)
    with named_refusals(self, block.refuse):
        refuse_padding(kwargs.get("attention_mask"))
        refuse_padding(kwargs.get("conv_mask"))
        with CausalConvolutions(block, document_lengths(block, kwargs.get("cu_seq_lens_q"))) as mode:
            out = original(self, *args, **kwargs)
        if not mode.was_used:
            raise UnplannedAttention(
                "this layer has computed its convolution without F.conv1d, by a kernel that sees the tokens of this rank only. "
                "Load the model without kernels of the hub (causal_conv1d)"
            )
    return out


class CausalConvolutions(TorchFunctionMode):
    """Computes causal depthwise convolutions over the tokens of all ranks of a block."""

    def __init__(self, block: ContextParallel, documents: list[int]) -> None:
        super().__init__()
        self.block, self.documents, self.was_used = block, documents, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.conv1d:
            return func(*args, **(kwargs or {}))
        self.was_used = True
        return self._convolve(*args, **(kwargs or {}))

    def _convolve(
        self,
        input: Tensor,  # the names are those of F.conv1d
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        channels, _, width = weight.shape
        sizes = [x[0] if isinstance(x, tuple) else x for x in (stride, padding, dilation)]
        if sizes != [1, width - 1, 1] or groups != channels or input.ndim != 3:
            raise UnplannedAttention(
                f"this layer has a convolution of width {width} with stride, padding and dilation {sizes} and {groups} groups, "
                f"over an input of shape {tuple(input.shape)}. Under context parallelism it must be causal and depthwise: "
                f"stride 1, padding {width - 1}, dilation 1 and {channels} groups"
            )
        window_BCSK = self.block.halo(input, before=width - 1, dim=2, documents=self.documents)
        out_BCS = torch.einsum("bcsk,ck->bcs", window_BCSK, weight[:, 0])
        if bias is not None:
            out_BCS = out_BCS + bias[:, None]
        return F.pad(out_BCS, (0, width - 1))  # the layer cuts off what the padding on the right has added


def refuse_padding(attention_mask: Tensor | None) -> None:
    if attention_mask is not None:
        raise UnplannedAttention(
            "the batch has padding, which this layer would look for in the last tokens of the mask: pack documents instead"
        )


def document_lengths(block: ContextParallel, cu_seq_lens: Tensor | None) -> list[int]:
    """Return the lengths of the documents of the block's mask, split by those of the call."""
    if block.mask.predicate is not None:
        raise UnplannedAttention("the documents of the block's mask are not known: give ContextParallel rs.documents(lengths)")
    starts = block.mask.documents(single=True)
    if cu_seq_lens is not None:
        starts = np.union1d(starts, cu_seq_lens.cpu().numpy())
    length = block.plan.q_layout.length
    lengths: list[int] = np.diff(np.union1d(starts, [0, length])).tolist()
    return lengths


def refuse_documents_of_call(layer: nn.Module, block: ContextParallel, cu_seq_lens: Tensor | None) -> None:
    """Raise if a call has documents that the convolutions before an attention layer do not know."""
    model_type = getattr(getattr(layer, "config", None), "model_type", "")
    if model_type in CONVOLVES_WITHOUT_CALL:
        refuse_documents(cu_seq_lens, block.mask, f"The convolutions of {model_type}")
