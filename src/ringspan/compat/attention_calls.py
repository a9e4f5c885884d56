"""Attention calls as named tuples: positional and keyword arguments under one name each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions

from ringspan.compat.block_masks import MaskOrigin, batch_row, origin_of, unsharded
from ringspan.errors import InputError
from ringspan.kernels import ScoreMod
from ringspan.torch_private.flex_interception import flex_attention


class FlexLengthError(InputError, RuntimeError):
    """Tensors of another length than the BlockMask. torch raises a ValueError, and from 2.14 on a RuntimeError."""


class SdpaCall(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def depends_on_order(self) -> bool:
        """Whether the result depends on the order of the tokens."""
        return self.is_causal

    @property
    def has_block_mask(self) -> bool:
        """Always False: SDPA has no BlockMask."""
        return False

    @property
    def mask_origin(self) -> None:
        """None: SDPA has no BlockMask."""
        return None

    def arguments(self) -> dict[str, Any]:
        return self._asdict()

    def without_mask(self) -> SdpaCall:
        """Return the call itself: SDPA has no BlockMask."""
        return self

    def row(self, b: int) -> SdpaCall:
        """Return the call for one row of the batch."""
        return self._replace(**_row_tensors(self, b))


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
        """Always False: a FlexAttention call has its mask in ``block_mask``."""
        return False

    @property
    def depends_on_order(self) -> bool:
        """Whether the result depends on the order of the tokens: both functions receive their positions."""
        return self.block_mask is not None or self.score_mod is not None

    @property
    def has_block_mask(self) -> bool:
        return self.block_mask is not None

    @property
    def mask_origin(self) -> MaskOrigin | None:
        """What a sharded ``block_mask`` was made from."""
        return None if self.block_mask is None else origin_of(self.block_mask)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name. A sharded ``block_mask`` is replaced by that of the whole sequence."""
        return self._asdict() | {"block_mask": None if self.block_mask is None else unsharded(self.block_mask)}

    def without_mask(self) -> FlexCall:
        """Return the call without its BlockMask."""
        return self._replace(block_mask=None)

    def row(self, b: int) -> FlexCall:
        """Return the call for one row of the batch. ``score_mod`` and ``mask_mod`` receive the index of that row."""
        score_mod = None if self.score_mod is None else _with_batch_offset(self.score_mod, b)
        block_mask = None if self.block_mask is None else batch_row(unsharded(self.block_mask), b)
        return self._replace(**_row_tensors(self, b), score_mod=score_mod, block_mask=block_mask)


AttentionCall = SdpaCall | FlexCall


def parse_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """Return a call of ``scaled_dot_product_attention`` or ``flex_attention``, and None for any other function."""
    if func is F.scaled_dot_product_attention:
        return SdpaCall(*args, **kwargs)
    return FlexCall(*args, **kwargs) if func is flex_attention else None


def _with_batch_offset(score_mod: ScoreMod, row: int) -> ScoreMod:
    def shifted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b + row, h, q_idx, kv_idx)

    return shifted


def _row_tensors(call: AttentionCall, b: int) -> dict[str, Any]:
    return {name: getattr(call, name)[b : b + 1] for name in ("query", "key", "value")}
