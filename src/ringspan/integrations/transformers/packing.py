"""Packed documents and position ids.

In one process, transformers finds packed documents by position ids that do not increase by one. Inside a block it sees
the positions of this rank only, and takes every gap between two spans of the layout for a document::

    2 ranks, zigzag, 8 tokens, one document       position ids of rank 0: 0 1 6 7      documents found: 0 0 1 1

So the documents are those of the block's mask, and the position ids are checked against it.

Legend: B batch, S tokens of this rank, N tokens of the whole sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import masking_utils

from ringspan.errors import InputError, UnplannedAttention
from ringspan.integrations.transformers.mask_functions import MODULE, closure_of, is_from_masking_utils
from ringspan.masks import Mask, documents, mask_mod

MAX_FRAMES = 24  # between a mask function and the forward of a model
PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
COUNTS_IN_DOCUMENTS = hasattr(masking_utils, REMAPPED.partition(".")[0])  # since transformers 5.23


def packed_mask(position_ids: Tensor, *, causal: bool = True) -> Mask:
    """Return the mask of a packed batch, from the position ids (B, N) of the whole sequence.

    As in transformers, a document starts wherever the position does not increase by one. If all rows of the batch have
    the same documents, the result is that of :func:`ringspan.documents`.

    >>> packed_mask(torch.tensor([[0, 1, 2, 0, 1]]))
    <Mask documents(2 over 5 tokens): 5 × 5, area 9, 2 bands>
    """
    if position_ids.ndim != 2 or position_ids.is_floating_point():
        raise InputError(f"position_ids must be (batch, tokens), not {position_ids.dtype} of shape {tuple(position_ids.shape)}")
    steps_BN = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    ids_BN = (steps_BN != 1).cumsum(-1)
    if (ids_BN == ids_BN[:1]).all():
        return documents(torch.bincount(ids_BN[0]), causal=causal)
    n = position_ids.shape[1]
    if causal:
        return mask_mod(lambda b, h, q, k: (ids_BN[b, q] == ids_BN[b, k]) & (k <= q), n, batch=len(ids_BN))
    return mask_mod(lambda b, h, q, k: ids_BN[b, q] == ids_BN[b, k], n, batch=len(ids_BN))


def packed_ids(function: Callable[..., Any]) -> Tensor | None:
    """Return the document ids that transformers has found for this rank's tokens, in a mask function; None if none."""
    found: Tensor | None = _captured(function, PACKED, "packed_sequence_mask")
    return found


def positions_of_mask(function: Callable[..., Any]) -> Tensor | None:
    """Return the position ids by which transformers would count this rank's tokens, if they looked packed.

    transformers 5.23 gives a mask function the positions of tokens in their documents, if the batch is packed. The
    tokens of one rank can look packed and those of another not, so it cannot be seen in ``function``. So the conditions
    are those of ``_preprocess_mask_arguments``: position ids, and neither a padding mask nor a KV cache. They are read
    from the frame of the function of transformers that makes the mask. In compiled code that frame is not there, but
    every rank's ``function`` has the position ids.
    """
    if not COUNTS_IN_DOCUMENTS:
        return None
    found = _captured(function, REMAPPED, "position_ids")
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None or found is not None:
            return found
        if frame.f_globals.get("__name__") == MODULE and frame.f_code.co_name.startswith("create_"):
            given = frame.f_locals
            if given.get("attention_mask") is not None or given.get("past_key_values") is not None:
                return None
            positions = given.get("position_ids")
            return None if positions is None else positions.expand(given["inputs_embeds"].shape[0], -1)
        frame = frame.f_back
    return None


def _captured(function: Any, qualname: str, name: str) -> Any:
    """Return a variable of the mask function of this name, where it is in a composed function; None if it is not."""
    if not is_from_masking_utils(function):
        return None
    closure = closure_of(function)
    if function.__qualname__ == qualname:
        return closure[name]
    for part in (*closure.get("mask_functions", ()), *filter(None, [closure.get("mask_function")])):
        found = _captured(part, qualname, name)
        if found is not None:
            return found
    return None


def positions_of_model() -> tuple[bool, Tensor | None]:
    """Return whether the ``forward`` that makes a mask has a variable ``position_ids``, and its value.

    The value is None if the user passed none. It is read from the frame of that ``forward``, because many models do not
    pass it to their layers: those that add position embeddings to the tokens, for example.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "forward" and "position_ids" in frame.f_locals:
            return True, frame.f_locals["position_ids"]
        frame = frame.f_back
    return False, None


def missing_positions() -> UnplannedAttention:
    return UnplannedAttention(
        "this model was called without position_ids, and counts the tokens of this rank from 0: pass "
        "position_ids=cp.positions()[None], for packed documents cp.positions(documents=lengths)[None], or "
        "cp.shard(position_ids, dim=1), to the model"
    )


def check_restarts(ids_BS: Tensor, tokens_S: NDArray[np.int64], mask: Mask) -> None:
    """Raise if positions restart between two neighbouring tokens that are in one document of the block's mask."""
    if mask.predicate is not None:  # its documents are not known
        return
    neighbours = np.flatnonzero(np.diff(tokens_S) == 1) + 1
    changes = (torch.diff(ids_BS, dim=-1) != 0).any(dim=0).cpu().numpy()
    inside = np.setdiff1d(tokens_S[neighbours[changes[neighbours - 1]]], mask.documents())
    if len(inside):
        raise _restarts(int(inside[0]), mask)


def check_positions(position_ids: Tensor, tokens_S: NDArray[np.int64], mask: Mask | None, valid_BN: Tensor | None) -> None:
    """Raise unless the position ids are those of this rank's tokens.

    They may count from the start of the sequence, from the start of each document of ``mask``, or over the tokens that
    are no padding. ``mask`` is None for a sequence without documents. The ids of padding are not checked.
    """
    if position_ids.ndim != 2 or position_ids.shape[1] != len(tokens_S):
        # Several kinds of positions for each token, as in M-RoPE. Their meaning depends on the model, but positions
        # that all count from 0 on this rank are wrong.
        counted = torch.arange(len(tokens_S), device=position_ids.device)
        if position_ids.shape[-1] == len(tokens_S) and tokens_S[-1] >= len(tokens_S) and bool((position_ids == counted).all()):
            raise missing_positions()
        return
    given_BS = position_ids.cpu().numpy()
    allowed: list[NDArray[np.int64]] = [tokens_S]
    is_padding: Any = np.zeros(len(tokens_S), dtype=bool)
    if mask is not None and mask.predicate is None:
        starts = mask.documents()
        allowed.append(tokens_S - starts[np.searchsorted(starts, tokens_S, side="right") - 1])
    elif mask is not None:
        return  # its documents are not known
    if valid_BN is not None:
        allowed.append((valid_BN.cumsum(-1) - 1).cpu().numpy()[:, tokens_S])
        is_padding = ~valid_BN.cpu().numpy()[:, tokens_S]
    if any(((given_BS == wanted) | is_padding).all() for wanted in allowed):
        return
    row, i = (int(n) for n in np.argwhere((given_BS != tokens_S) & ~is_padding)[0])
    where = f"row {i} of this rank is token {tokens_S[i]}"
    if (given_BS == np.arange(len(tokens_S))).all():
        raise UnplannedAttention(
            f"the position ids of this rank are 0, 1, 2, …, but {where}: pass position_ids={_positions_of(mask)}[None], or "
            "cp.shard(position_ids, dim=1), to the model"
        )
    raise UnplannedAttention(
        f"the position ids of this rank are {_shown(given_BS[row])}. They differ from its tokens: {where}, with position "
        f"{given_BS[row, i]}. Positions must count from the start of the sequence or of each document of the block's mask. "
        "For a packed batch, make ContextParallel with ringspan.integrations.transformers.packed_mask(position_ids) of the "
        "whole sequence, or rs.documents(lengths)"
    )


def _positions_of(mask: Mask | None) -> str:
    """Return the call that makes the positions of this rank, for error messages."""
    # Positions in the whole sequence are accepted for packed documents, too, but are rarely meant.
    return "cp.positions()" if mask is None or len(mask.documents()) <= 2 else "cp.positions(documents=lengths)"


def _restarts(token: int, mask: Mask) -> UnplannedAttention:
    return UnplannedAttention(
        f"the position ids restart at token {token}, so this batch is packed, but the block's mask {mask.name} has no document "
        "that starts there. Make ContextParallel with ringspan.integrations.transformers.packed_mask(position_ids) of the "
        "whole sequence, or rs.documents(lengths)"
    )


def _shown(values: NDArray[np.int64]) -> str:
    shown = ", ".join(str(x) for x in values[:6].tolist())
    return shown if len(values) <= 6 else f"{shown}, …"
