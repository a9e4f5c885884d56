"""Calls of attention, with their arguments by name however they were passed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions

from ringspan.compat.block_masks import row_of, whole_of
from ringspan.kernels import ScoreMod
from ringspan.torch_private.flex_door import flex_attention


class SdpaCall(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def arguments(self) -> dict[str, Any]:
        return self._asdict()

    def row(self, b: int) -> SdpaCall:
        """One row of the batch."""
        return self._replace(**_row(self, b))


class FlexCall(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScoreMod | None = None
    block_mask: BlockMask | None = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: FlexKernelOptions | None = None
    return_aux: AuxRequest | None = None

    @property
    def is_causal(self) -> bool:
        """Its mask is its block_mask."""
        return False

    def arguments(self) -> dict[str, Any]:
        """With the mask of the whole sequence, where it is given this rank's share of one."""
        return self._asdict() | {"block_mask": None if self.block_mask is None else whole_of(self.block_mask)}

    def row(self, b: int) -> FlexCall:
        """One row of the batch, whose functions are still told which it is."""
        score_mod = None if self.score_mod is None else _of_row(self.score_mod, b)
        block_mask = None if self.block_mask is None else row_of(whole_of(self.block_mask), b)
        return self._replace(**_row(self, b), score_mod=score_mod, block_mask=block_mask)


Call = SdpaCall | FlexCall


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call, if it is one of the two functions that can be made exact."""
    if func is F.scaled_dot_product_attention:
        return SdpaCall(*args, **kwargs)
    return FlexCall(*args, **kwargs) if func is flex_attention else None


def _of_row(score_mod: ScoreMod, row: int) -> ScoreMod:
    def shifted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b + row, h, q_idx, kv_idx)

    return shifted


def _row(call: Call, b: int) -> dict[str, Any]:
    return {name: getattr(call, name)[b : b + 1] for name in ("query", "key", "value")}
