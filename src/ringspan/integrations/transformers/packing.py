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
from ringspan.integrations.transformers.model_call import MAX_FRAMES
from ringspan.masks import Mask, documents, mask_mod
from ringspan.user_functions.index_reads import inputs_read

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


def positions_of_mask(function: Callable[..., Any], has_documents: bool) -> Tensor | None:
    """Return the position ids by which transformers would count this rank's tokens, if they looked packed.

    transformers 5.23 gives a mask function the positions of tokens in their documents, if the batch is packed. The
    tokens of one rank can look packed and those of another not, so it cannot be seen in ``function``. So the position
    ids are read from the frame of the function of transformers that makes the mask. In compiled code that frame is not
    there, but every rank's ``function`` has the position ids.

    In one process, transformers does not look for documents in a call with a padding mask or a KV cache. Here a cache
    is empty, and changes nothing. With a padding mask, tokens are counted in documents if the block has any.
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
            positions = given.get("position_ids")
            if positions is None or (given.get("attention_mask") is not None and not has_documents):
                return None
            return positions.expand(given["inputs_embeds"].shape[0], -1)
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


def refuse_documents(cu_seq_lens: Tensor | None, mask: Mask, what: str) -> None:
    """Raise if ``cu_seq_lens_q`` has documents that the block's mask does not have. ``what`` knows only the latter."""
    if cu_seq_lens is None:
        return
    known = np.array([0, mask.lengths[0]]) if mask.predicate is not None else mask.documents(single=True)
    unknown = np.setdiff1d(cu_seq_lens.cpu().numpy(), known)
    if len(unknown):
        raise UnplannedAttention(
            f"cu_seq_lens_q says that a document starts at token {unknown[0]}, which the block's mask does not say. {what} "
            "would cross it: give ContextParallel rs.documents(lengths)"
        )


def missing_positions(first: int = 0) -> UnplannedAttention:
    offset = f" + {first}" if first else ""
    return UnplannedAttention(
        f"this model was called without position_ids, and counts the tokens of this rank from {first}: pass "
        f"position_ids=cp.positions()[None]{offset}, for packed documents cp.positions(documents=lengths)[None]{offset}, or "
        "cp.shard(position_ids, dim=1), to the model"
    )


def check_restarts(ids_BS: Tensor, tokens_S: NDArray[np.int64], mask: Mask) -> None:
    """Raise if positions restart between two neighbouring tokens that are in one document of the block's mask."""
    if mask.predicate is not None:  # its documents are not known
        return
    neighbours = np.flatnonzero(np.diff(tokens_S) == 1) + 1
    changes = (torch.diff(ids_BS, dim=-1) != 0).any(dim=0).cpu().numpy()
    inside = np.setdiff1d(tokens_S[neighbours[changes[neighbours - 1]]], mask.documents(single=True))
    if len(inside):
        raise _restarts(int(inside[0]), mask)


def check_positions(
    position_ids: Tensor, tokens_S: NDArray[np.int64], mask: Mask | None, valid_BN: Tensor | None, *, first: int = 0
) -> None:
    """Raise unless the position ids are those of this rank's tokens.

    They may count from the start of the sequence, from the start of each document of ``mask``, or over the tokens that
    are no padding, each beginning with ``first``. ``mask`` is None for a sequence without documents. The ids of padding
    are not checked.
    """
    if position_ids.ndim != 2 or position_ids.shape[1] != len(tokens_S):
        # Several kinds of positions for each token, as in M-RoPE. Their meaning depends on the model, but positions
        # that all count from 0 are wrong unless this rank has the first tokens, in their order.
        counted = np.arange(len(tokens_S))
        may_be_counted = position_ids.shape[-1] == len(counted) and (tokens_S != counted).any()
        if may_be_counted and (position_ids.cpu().numpy() == counted).all():
            raise missing_positions(first)
        return
    given_BS = position_ids.cpu().numpy() - first
    allowed: list[NDArray[np.int64]] = [tokens_S]
    is_padding: Any = np.zeros(len(tokens_S), dtype=bool)
    if mask is not None and mask.predicate is None:
        for starts in (mask.documents(), mask.documents(single=True)):
            allowed.append(tokens_S - starts[np.searchsorted(starts, tokens_S, side="right") - 1])
    elif mask is not None:
        if not (given_BS == np.arange(len(tokens_S))).all():
            return  # its documents are not known
        allowed.append(_positions_in_documents(mask, tokens_S))
    if valid_BN is not None:
        allowed.append((valid_BN.cumsum(-1) - 1).cpu().numpy()[:, tokens_S])
        is_padding = ~valid_BN.cpu().numpy()[:, tokens_S]
    if any(((given_BS == wanted) | is_padding).all() for wanted in allowed):
        return
    row, i = (int(n) for n in np.argwhere((given_BS != tokens_S) & ~is_padding)[0])
    where = f"number {i} of its tokens is token {tokens_S[i]} of the sequence"
    offset = f" + {first}" if first else ""
    if (given_BS == np.arange(len(tokens_S))).all():
        raise UnplannedAttention(
            f"the position ids of this rank are {_shown(given_BS[row] + first)}, but {where}: pass "
            f"position_ids={_positions_of(mask)}[None]{offset}, or cp.shard(position_ids, dim=1), to the model"
        )
    from_first = f" and begin with {first} in this model (cp.positions()[None]{offset})" if first else ""
    raise UnplannedAttention(
        f"the position ids of this rank are {_shown(given_BS[row] + first)}. They differ from its tokens: {where}, with "
        f"position {given_BS[row, i] + first}. Positions must count from the start of the sequence or of each document of the "
        f"block's mask{from_first}. For a packed batch, make ContextParallel with "
        "ringspan.integrations.transformers.packed_mask(position_ids) of the whole sequence, or rs.documents(lengths)"
    )


def _positions_in_documents(mask: Mask, tokens_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions (rows, S) of tokens in their documents, for a mask with a predicate.

    A document starts at each token that does not see the token before it.
    """
    assert mask.predicate is not None
    in_bands_N = np.zeros(mask.lengths[0], dtype=bool)
    for q0, q1, k0, k1, lo, hi in mask.table.tolist():
        if lo <= -1 <= hi:
            in_bands_N[max(q0, k0 + 1) : min(q1, k1 + 1)] = True
    device = inputs_read(mask.predicate.mask_mod, mask.lengths).device
    token_N, of_pairs = torch.arange(len(in_bands_N), device=device), torch.vmap(mask.predicate.mask_mod, (None, None, 0, 0))
    positions = []
    for b in range(mask.predicate.batch or 1):
        row, head = (torch.tensor(index, device=device) for index in (b, 0))
        sees_last_N = np.zeros_like(in_bands_N)
        sees_last_N[1:] = in_bands_N[1:] & of_pairs(row, head, token_N[1:], token_N[:-1]).cpu().numpy()
        starts = np.flatnonzero(~sees_last_N)
        positions.append(tokens_S - starts[np.searchsorted(starts, tokens_S, side="right") - 1])
    return np.stack(positions)


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
