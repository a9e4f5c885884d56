"""The mask of a kind of layer, which a model hands on to its layers in place of a mask tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ringspan.errors import InputError, RingspanError, UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.integrations.transformers.model_block import Sides, block_with_mask
from ringspan.integrations.transformers.packing import check_positions, check_restarts, missing_positions
from ringspan.layouts import Layout
from ringspan.masks import Mask, documents, window
from ringspan.plans.data import Side
from ringspan.torch_private.checkpoints import is_recomputing


class ModelCall(NamedTuple):
    """What a forward pass says about the tokens of the model."""

    batch: int
    valid_BN: Tensor | None  # False at padding, for the whole sequence
    packed_BS: Tensor | None  # the number of the document of each token of this rank, as transformers counts them
    positions: tuple[bool, Tensor | None] = (False, None)  # whether the position ids of the model are known, and these
    first: int = 0  # the position id of the first token
    cu_seq_lens: Tensor | None = None  # where the documents of the call start, in the whole sequence


class NotATensor(UnplannedAttention, AttributeError):
    """An attribute of tensors that a mask does not have. It is an AttributeError so that ``hasattr`` returns False."""


class LayerMask:
    """The mask of a kind of layer, over the whole sequence, in place of a mask tensor.

    Models make masks that no layer uses. So a mask that cannot be made exact has a ``refusal``, which is raised when a
    layer uses the mask.

    Code of models reads whether a mask is prepared (``ndim``, ``shape``) and whether it is added to scores (``dtype``,
    not bool). All other operations of tensors raise.
    """

    ndim = 4
    dtype = torch.float32

    def __init__(
        self, mask: Mask, outer: ContextParallel, sides: Sides, call: ModelCall, *, refusal: RingspanError | None = None
    ) -> None:
        self.outer = outer  # the user's block
        self._mask, self._sides, self._call, self._refusal = mask, sides, call, refusal
        self.local_lengths = tuple(layout_of(outer, side).counts[outer.rank] for side in sides)
        self.tokens, self.key_tokens = (layout_of(outer, side).length for side in sides)
        self._last: tuple[Any, Any, Any, ContextParallel] | None = None
        self._block: ContextParallel | None = None
        if refusal is None:
            try:
                self._block = self._made(self._documents(call.cu_seq_lens))
            except RingspanError as error:
                self._refusal = error
        is_known, of_model = call.positions
        is_split = layout_of(outer, sides[0]).counts[outer.rank] != self.tokens
        # Its text: Dynamo of torch 2.11 cannot trace that an existing exception is raised.
        self._no_positions = str(missing_positions(call.first)) if is_known and of_model is None and is_split else None

    @property
    def block(self) -> ContextParallel:
        """The user's block with the mask of the layer.

        Compiled code reads it, since it cannot check position ids. It raises if the model got none: a compiler then runs
        this layer uncompiled, which checks by ``block_of`` the positions that the model has made.
        """
        if self._no_positions is not None:
            raise UnplannedAttention(self._no_positions)
        return self._usable_block()

    def _usable_block(self) -> ContextParallel:
        self.outer.was_used = True  # a layer attends: the block need not intercept a call
        if self._block is None:
            raise self._refusal or UnplannedAttention("this mask has no block")
        return self._block

    @torch.compiler.disable
    def block_of(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None, window_size: int | None) -> ContextParallel:
        """Return the block for a call: with its packed documents, if it has their boundaries.

        Raises if its position ids are not those of this rank's tokens, or if its window is not in the mask. All layers
        of a model have the same tensors, which are read once.
        """
        is_known, of_model = self._call.positions
        if position_ids is None and is_known:
            position_ids = of_model
            if of_model is None:
                raise missing_positions(self._call.first)
        last = self._last
        if last is not None and last[0] is position_ids and last[1] is cu_seq_lens and last[2] == window_size:
            return last[3]
        of_documents = self._documents(self._call.cu_seq_lens if cu_seq_lens is None else cu_seq_lens)
        block = self._usable_block() if cu_seq_lens is None else self._made(of_documents)
        self._check_positions(position_ids, of_documents)
        if window_size is not None:
            _check_window(block.mask, window_size)
        self._last = (position_ids, cu_seq_lens, window_size, block)
        return block

    def narrowed(self, size: int) -> LayerMask:
        """Return this mask, limited to the last ``size`` keys of each query."""
        mask = self._mask & window(left=size - 1)
        return LayerMask(mask, self.outer, self._sides, self._call, refusal=self._refusal)

    def valid_keys(self, count: int) -> Tensor | None:
        """Return which keys are no padding (B, count), those of this rank or of the whole sequence; None for all.

        Raises if a row of the batch has padding between its tokens.
        """
        valid_BN = self._call.valid_BN
        if valid_BN is None:
            return None
        mine = torch.from_numpy(_tokens(self.outer, self._sides[1])).to(valid_BN.device)
        of_keys = valid_BN.bool() if count == valid_BN.shape[1] else valid_BN.bool()[:, mine]
        if _has_gaps(valid_BN.bool()) or _has_gaps(of_keys):
            raise UnplannedAttention(
                "this layer has ALiBi biases, which do not count padding, and the batch has padding between the tokens of a "
                "row, or between those of this rank: pad the rows at their ends, and use layout='contiguous' or 'zigzag'"
            )
        return of_keys

    @property
    def shape(self) -> torch.Size:
        """The shape that a mask tensor would have: (B, 1, S, T), of this rank's tokens."""
        return torch.Size((self._call.batch, 1, *self.local_lengths))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def to(self, *_: Any, **__: Any) -> LayerMask:
        return self

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this rank has refused a call. They would wait for its messages."""
        self.outer.refuse(error)

    def _documents(self, cu_seq_lens: Tensor | None) -> Mask:
        """Return the block's mask, with the documents of the call."""
        mask = self.outer.mask
        return mask if cu_seq_lens is None else mask & _documents(cu_seq_lens, *mask.lengths)

    def _made(self, of_documents: Mask) -> ContextParallel:
        if self._sides == ("q", "kv"):
            return block_with_mask(self.outer, self._sides, _intersect(self._mask, of_documents))
        if of_documents.predicate is not None or of_documents.area != np.prod(of_documents.lengths):
            raise UnplannedAttention(
                f"the block's mask {of_documents.name} is that of cross-attention, and does not say what the tokens of the "
                "encoder or of the decoder see of each other: give ContextParallel rs.full(n, m)"
            )
        return block_with_mask(self.outer, self._sides, self._mask)

    def _check_positions(self, position_ids: Tensor | None, of_documents: Mask) -> None:
        is_self_attention = self._sides == ("q", "kv") and of_documents.lengths[0] == of_documents.lengths[1]
        tokens = _tokens(self.outer, self._sides[0])
        if self._call.packed_BS is not None and is_self_attention:
            check_restarts(self._call.packed_BS, tokens, of_documents)
        if position_ids is not None:
            mask = of_documents if is_self_attention else None
            check_positions(position_ids, tokens, mask, self._call.valid_BN, first=self._call.first)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotATensor(
            f"this model reads {name!r} of its attention mask, but inside a ContextParallel block the mask is not a tensor"
        )

    def __lt__(self, number: float) -> LayerMask:
        if not number < 0:
            raise NotATensor(f"this model compares its attention mask with {number}, but inside a block it is not a tensor")
        return self  # ``mask < -1`` are the pairs that the mask hides, for masked_fill

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MASKED_FILLS and len(args) == 3 and _is_bias_of_keys(args[0]) and isinstance(args[1], LayerMask):
            return BiasedMask(args[1], args[0])
        if func in ADDITIONS:
            raise _adds_mask()
        if func is F.scaled_dot_product_attention and is_recomputing():
            raise UnplannedAttention(
                "a checkpoint runs this layer again by SDPA, with the mask of a forward pass by ringspan: the backward pass "
                "ran after the context was left, for example that of accelerate, which sets the attention of the model back. "
                "Call backward inside it"
            )
        raise UnplannedAttention(
            f"this model applies {getattr(func, '__name__', func)} to its attention mask, but inside a ContextParallel block "
            "the mask is not a tensor"
        )

    def __getitem__(self, index: Any) -> LayerMask:
        parts = index if isinstance(index, tuple) else (index,)
        if all(isinstance(x, slice) and (x.start or 0, x.stop, x.step) == (0, None, None) for x in parts):
            return self  # Gemma 4 takes [:, :, -logits_to_keep:, :], with logits_to_keep=0 for all
        raise UnplannedAttention(
            "this model takes a part of its attention mask, but inside a ContextParallel block the mask is not a tensor. Leave "
            "logits_to_keep out; without it, the layers of this model cannot run under context parallelism"
        )

    def __add__(self, scores: Any) -> NoReturn:
        raise _adds_mask()

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"<LayerMask {self._mask!r}>"


MASKED_FILLS = {torch.masked_fill, Tensor.masked_fill}
ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__}


@dataclass(frozen=True)
class BiasedMask:
    """A mask to which the model has added a bias of the keys (B, H, 1, T). Falcon does so with its ALiBi biases."""

    mask: LayerMask
    bias: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.bias.shape[:-2], *self.mask.local_lengths))


def _is_bias_of_keys(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.requires_grad and x.ndim == 4 and x.shape[-2] == 1


def _adds_mask() -> UnplannedAttention:
    return UnplannedAttention(
        "a layer of this model adds the mask to its scores, which are those of this rank alone: it does not use the attention "
        "function that was set. Either ringspan.integrations.transformers.prepare was not called or does not know this layer, "
        "or the model has made the layer after that call"
    )


def _intersect(of_layer: Mask, of_block: Mask) -> Mask:
    if of_block.is_causal and not of_layer.is_causal:
        raise UnplannedAttention(
            f"this layer lets queries see later keys (its mask is {of_layer.name}), but the block's mask {of_block.name} does "
            "not. Give ContextParallel rs.full(length), or rs.documents(lengths, causal=False): the model adds causality"
        )
    return of_layer & of_block


def _has_gaps(valid_BT: Tensor) -> bool:
    starts_BT = valid_BT & ~F.pad(valid_BT, (1, 0))[:, :-1]
    return bool((starts_BT.sum(-1) > 1).any())


def _documents(cu_seq_lens: Tensor, q_len: int, k_len: int) -> Mask:
    ends = cu_seq_lens.cpu().numpy().astype(np.int64)
    if q_len != k_len or ends[-1] != q_len:
        raise InputError(
            f"cu_seq_lens_q ends at {ends[-1]}, but the whole sequence has {q_len} tokens: it describes the whole sequence, on "
            "every rank"
        )
    return documents(np.diff(ends), causal=False)


def _check_window(mask: Mask, size: int) -> None:
    if not is_in_window(mask, size):
        raise UnplannedAttention(
            f"this layer has a sliding window of {size} tokens, but the mask that the model made for it, {mask.name}, is wider"
        )


def is_in_window(mask: Mask, size: int) -> bool:
    """Return whether no query sees keys further back than the sliding window of a layer.

    Later keys are not limited: image blocks can reach further than the window, and the bands of a mask with a predicate
    can reach to the end of the sequence.
    """
    return (mask & window(left=size - 1 if mask.is_causal else size)).area == mask.area


@torch.compiler.disable
def limit_of_call(mask: Mask, window_size: int | None, cu_seq_lens: Tensor | None) -> str:
    """Return what a call of attention limits its queries to, if a mask does not; empty if the mask does."""
    if window_size is not None and not is_in_window(mask, window_size):
        return f"has a sliding window of {window_size} tokens"
    if cu_seq_lens is not None and (mask & _documents(cu_seq_lens, *mask.lengths)).area != mask.area:
        return f"has packed documents (cu_seq_lens_q of {len(cu_seq_lens) - 1})"
    return ""


def layout_of(outer: ContextParallel, side: Side) -> Layout:
    return outer.plan.q_layout if side == "q" else outer.plan.kv_layout


def _tokens(outer: ContextParallel, side: Side) -> NDArray[np.int64]:
    tokens: NDArray[np.int64] = layout_of(outer, side).positions(outer.rank)
    return tokens
