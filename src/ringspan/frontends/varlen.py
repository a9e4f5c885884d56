"""``torch.nn.attention.varlen.varlen_attn``: attention of packed documents that are split over the ranks of a group.

The tensors of a call hold this rank's tokens, ``cu_seq_q`` and ``cu_seq_k`` describe the whole sequence::

    documents of 3 and 5 tokens      cu_seq = [0, 3, 8] on every rank
    rank 0: tokens 0 1 6 7           q (4, H, D)
    rank 1: tokens 2 3 4 5           q (4, H, D)

A call says all of its mask: its documents and, by ``window_size``, which keys of its document a query sees. The
documents must be those of the plan's mask. The window need not be: a call with another window is planned on the plan's
layout, once.

Legend: S queries and T keys of this rank, H query heads, G key heads, D head dim, E value dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ringspan.caching.registry import on_clear_caches
from ringspan.engine import PlanHandle, attend, attend_by_id, copy_id, is_exporting, is_traced, registry
from ringspan.errors import InputError, UnplannedAttention
from ringspan.frontends.attention import registered_handle
from ringspan.frontends.batch_rows import refuse_rows
from ringspan.frontends.dtensor import any_dtensor
from ringspan.frontends.validate import check_scale
from ringspan.kernels import Partial
from ringspan.masks import Mask
from ringspan.masks.documents import document_hulls, document_windows
from ringspan.planner import Plan
from ringspan.planner import plan as make_plan
from ringspan.torch_private.tensor_version import tensor_version

NO_LIMIT = -1  # in window_size


class VarlenCall(NamedTuple):
    """The arguments of the operator that ``varlen_attn`` calls, in its order. torch 2.11 has them up to
    ``window_size``.

    ``max_q``, ``max_k``, ``num_splits`` and ``backend`` tune kernels that are not used here; they change no result.
    ``enable_gqa`` was checked by ``varlen_attn`` itself.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seq_q: Tensor
    cu_seq_k: Tensor | None
    max_q: int
    max_k: int
    is_causal: bool = False
    scale: float | None = None
    window_size: Any = None
    enable_gqa: bool = False
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    num_splits: int | None = None
    backend: int | None = None

    @property
    def window(self) -> tuple[int, int]:
        """Return how many keys before and after its own a query sees; NO_LIMIT for all of its document."""
        left, right = (NO_LIMIT, NO_LIMIT) if self.window_size is None else self.window_size
        return max(left, NO_LIMIT), 0 if self.is_causal else max(right, NO_LIMIT)

    def cu_seqs(self) -> tuple[Tensor, Tensor]:
        """Return ``cu_seq_q`` and ``cu_seq_k``. Raise for a call with a KV cache."""
        if self.seqused_k is not None or self.block_table is not None or self.cu_seq_k is None:
            raise UnplannedAttention(
                "this call of varlen_attn reads a KV cache (seqused_k, block_table, or no cu_seq_k), which is not split over "
                "ranks: give cu_seq_k, or wrap the call in `with rs.local_attention():`"
            )
        return self.cu_seq_q, self.cu_seq_k

    def four_dims(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (1, H, S, D), k (1, G, T, D) and v (1, G, T, E)."""
        q, k, v = self.query, self.key, self.value
        if not q.ndim == k.ndim == v.ndim == 3:
            raise InputError(
                f"varlen_attn takes q, k and v of 3 dims (tokens, heads, dim), not of {q.ndim}, {k.ndim}, {v.ndim}"
            )
        return q.unsqueeze(0).transpose(1, 2), k.unsqueeze(0).transpose(1, 2), v.unsqueeze(0).transpose(1, 2)


def from_four_dims(result: Partial) -> tuple[Tensor, Tensor]:
    """Return out (S, H, E) and lse (H, S)."""
    out_1HSE, lse_1HS = result
    return out_1HSE.transpose(1, 2).squeeze(0), lse_1HS.squeeze(0)


def attend_packed(handle: PlanHandle, call: VarlenCall) -> tuple[Tensor, Tensor]:
    """Return out (S, H, E) and lse (H, S) of this rank's tokens. Both are differentiable."""
    refuse_rows("varlen_attn", handle.plan.mask)
    cu_seq_q, cu_seq_k = call.cu_seqs()
    left, right = call.window
    scale = check_scale(call.scale, call.query.shape[-1])
    if is_traced() and handle.id is not None:
        plan_id = handle.constant_id() if is_exporting() else handle.id
        call_id = torch.ops.ringspan.plan_of_documents(cu_seq_q, cu_seq_k, plan_id, left, right)

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Partial:
            return attend_by_id(q, k, v, call_id, scale)

    else:
        planned = handle_of_documents(handle, cu_seq_q, cu_seq_k, left, right)

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Partial:
            return attend(planned, q, k, v, scale)

    q_1HSD, k_1GTD, v_1GTE = call.four_dims()
    if not any_dtensor(q_1HSD, k_1GTD, v_1GTE):
        return from_four_dims(compute(q_1HSD, k_1GTD, v_1GTE))
    from ringspan.frontends.dtensor.attention import attend_shards

    return from_four_dims(attend_shards(compute, q_1HSD, k_1GTD, v_1GTE, tuple(handle.group.global_ranks)))


def mask_of_call(call: VarlenCall) -> Mask:
    """Return the mask of a call, over the whole sequence."""
    cu_seq_q, cu_seq_k = call.cu_seqs()
    return _mask(_bounds("cu_seq_q", cu_seq_q), _bounds("cu_seq_k", cu_seq_k), *call.window)


# -- from a plan to the plan of a call
# ------------------------------------------------------------------------------------

# The boundaries of documents as the bytes of int64: Python computes the hash of a bytes object once.
Bounds = bytes

# handle -> the handles of its calls by boundaries and window; None for a call whose mask is that of the handle's own
# plan.
_handles: WeakKeyDictionary[PlanHandle, dict[tuple[Bounds, Bounds, int, int], PlanHandle | None]] = WeakKeyDictionary()
# cu_seq tensor -> its version and its boundaries: a GPU is read once for each tensor, not in every layer.
_bounds_read = WeakTensorKeyDictionary()
on_clear_caches(_handles.clear)
on_clear_caches(_bounds_read.clear)


def handle_of_documents(handle: PlanHandle, cu_seq_q: Tensor, cu_seq_k: Tensor, left: int, right: int) -> PlanHandle:
    """Return the handle for the mask of a call: ``handle`` itself if its plan has this mask. Made once."""
    known = _handles.setdefault(handle, {})
    key = (_bounds("cu_seq_q", cu_seq_q), _bounds("cu_seq_k", cu_seq_k), left, right)
    try:
        found = known[key]
    except KeyError:
        planned = _plan_of_call(handle.plan, *key)
        found = None
        if planned is not None:
            found = registered_handle(planned, handle.group, handle.backend, cuda_graphs=handle.cuda_graphs)
        known[key] = found
    return handle if found is None else found


def _plan_of_call(plan: Plan, q_bounds: Bounds, k_bounds: Bounds, left: int, right: int) -> Plan | None:
    """Return the plan for the mask of a call on the layouts of ``plan``, or None if it is ``plan`` itself."""
    for name, bounds, length in zip(("cu_seq_q", "cu_seq_k"), (q_bounds, k_bounds), plan.mask.lengths, strict=True):
        end = int(np.frombuffer(bounds, dtype=np.int64)[-1])
        if end != length:
            raise InputError(
                f"{name} ends at {end}, but the plan's sequence has {length} tokens: q, k and v are this rank's, but cu_seq_q "
                "and cu_seq_k describe the whole sequence, on every rank"
            )
    mask = _mask(q_bounds, k_bounds, left, right)
    if mask == plan.mask:
        return None
    _check_documents(plan.mask, _mask(q_bounds, k_bounds, NO_LIMIT, NO_LIMIT))
    return make_plan(
        mask,
        world=plan.world,
        rank=plan.rank,
        strategy=plan.strategy,
        layout=plan.q_layout,
        kv_layout=plan.kv_layout,
        dkv_dtype=plan.program.dkv_dtype,
    )


def _check_documents(planned: Mask, given: Mask) -> None:
    """Raise unless the two masks have the same documents."""
    if planned.predicate is not None:
        raise InputError(
            f"the plan's mask {planned.name} is decided by a function, so that its documents are not known: give "
            "rs.documents(lengths) to ContextParallel, and call varlen_attn with the cu_seq of these lengths"
        )
    # Cut at the documents of the call, since one band can have several documents of one token: a diagonal.
    common = planned & given
    if common.area != planned.area or len(document_hulls(common)) != len(document_hulls(given)):
        raise InputError(
            f"cu_seq_q and cu_seq_k have documents of {_sizes(given)}, but the plan's mask {planned.name} has documents of "
            f"{_sizes(planned)}: make ContextParallel with rs.documents(lengths) for the lengths of this batch"
        )


def _sizes(mask: Mask) -> str:
    hulls = document_hulls(mask)
    q_sizes, k_sizes = (hulls[:, 1] - hulls[:, 0]).tolist(), (hulls[:, 3] - hulls[:, 2]).tolist()
    sizes = [f"{q}" if q == k else f"{q} × {k}" for q, k in zip(q_sizes, k_sizes, strict=True)]
    shown = ", ".join(sizes[:8]) or "no"
    return f"{shown} tokens" if len(sizes) <= 8 else f"{shown}, … tokens ({len(sizes)} documents)"


def _mask(q_bounds: Bounds, k_bounds: Bounds, left: int, right: int) -> Mask:
    q_ends, k_ends = np.frombuffer(q_bounds, dtype=np.int64), np.frombuffer(k_bounds, dtype=np.int64)
    if len(q_ends) != len(k_ends):
        raise InputError(f"cu_seq_q has {len(q_ends) - 1} documents and cu_seq_k has {len(k_ends) - 1}: both need one each")
    limits = {side: None if n == NO_LIMIT else n for side, n in (("left", left), ("right", right))}
    return document_windows(np.diff(q_ends), np.diff(k_ends), **limits)


def _bounds(name: str, cu_seq: Tensor) -> Bounds:
    # On a CPU reading is cheap. On a GPU it waits for the device, so the boundaries are kept while the version of the
    # tensor is the same. Collectives into the tensor do not change the version: make a new tensor for new documents
    # there.
    version = None if cu_seq.is_inference() or cu_seq.device.type == "cpu" else tensor_version(cu_seq)
    known = _bounds_read.get(cu_seq)
    if known is not None and version is not None and known[0] == version:
        bounds: Bounds = known[1]
        return bounds
    if cu_seq.ndim != 1 or cu_seq.is_floating_point():
        raise InputError(f"{name} must be a 1-D tensor of whole numbers, not {cu_seq.dtype} of shape {tuple(cu_seq.shape)}")
    ends = cu_seq.detach().to("cpu", torch.int64).numpy()
    if not len(ends) or ends[0] != 0 or (np.diff(ends) < 0).any():
        raise InputError(f"{name} must start at 0 and never decrease, as [0, *cumsum(lengths)]; got {ends[:8].tolist()}…")
    bounds = ends.tobytes()
    _bounds_read[cu_seq] = (version, bounds)
    return bounds


# -- for compiled code -------------------------------------------------------------------------------------------------

# The values of cu_seq are not known while a program is traced. So the program computes the id of the plan when it runs.
torch.library.define(
    "ringspan::plan_of_documents", "(Tensor cu_seq_q, Tensor cu_seq_k, Tensor plan_id, int left, int right) -> Tensor"
)


@torch.library.impl("ringspan::plan_of_documents", "CompositeExplicitAutograd")
def _plan_of_documents(cu_seq_q: Tensor, cu_seq_k: Tensor, plan_id: Tensor, left: int, right: int) -> Tensor:
    handle = registry.find(plan_id)
    found = handle_of_documents(handle, cu_seq_q, cu_seq_k, left, right)
    return copy_id(plan_id if found is handle or found.id is None else found.id)


@torch.library.register_fake("ringspan::plan_of_documents")
def _(cu_seq_q: Tensor, cu_seq_k: Tensor, plan_id: Tensor, left: int, right: int) -> Tensor:
    return torch.empty_like(plan_id)
