"""The kernel flex: FlexAttention, compiled by PyTorch. It needs one call if every query sees one interval of keys.

The compiled program reads the interval of each query from two tensors, and the blocks to compute from four tables. So a
new mask is new data, not a recompilation. A program is compiled at first use of each dtype, number of heads, head dim
and scale.

``score_mod`` and ``mask_mod`` are compiled into it. They are called with the tokens of the rows, which the program
looks up. Captured tensors are inputs of the program: other tensors, or another closure of the same code, need no
recompilation.

Legend: B batch, H query heads, G key heads (G divides H), S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ringspan.caching.by_digest import cache_by_digest
from ringspan.caching.by_stream import cache_by_stream, copy_to_device
from ringspan.errors import KernelError
from ringspan.kernels.blocks import BLOCK, MIN_LENGTH, block_tables
from ringspan.kernels.containment import is_one_part
from ringspan.kernels.interval_containment import Intervals, NonfiniteRows
from ringspan.kernels.intervals import IntervalLayer, interval_layers
from ringspan.kernels.kernel import Gradients, Inputs, PartialRows, Saved
from ringspan.kernels.mods import IndexedMods, MaskMod, ScoreMod
from ringspan.kernels.partial import EMPTY_LSE, Partial
from ringspan.kernels.recompute import gradients
from ringspan.masks import Band
from ringspan.torch_private.dynamo import dynamo_config
from ringspan.torch_private.function_modes import enable_torch_function, without_modes
from ringspan.torch_private.symbolic_shapes import check_size, distinct_sizes
from ringspan.user_functions.captures import captured_tensors
from ringspan.user_functions.rebinding import rebind_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

PACKAGE = "triton"

# The back ends of FlexAttention. For the second one see :mod:`ringspan.kernels.flex_flash`.
FlexBackend = Literal["TRITON", "FLASH"]

# What FlexAttention returns beside out.
Auxiliary = Literal["lse", "max_scores"]

MIN_DIM, MAX_DIM = 16, 256  # 16 is the smallest tile of tensor cores. Above 256 a block may not fit into shared memory.

# The dtype of token indices. FLASH cannot index a tensor by int64.
INDEX_DTYPES: dict[FlexBackend, torch.dtype] = {"TRITON": torch.int64, "FLASH": torch.int32}

# Dynamo stops compiling after 8 programs of one function by default. Here there is one for each combination of dtype,
# heads, dims and scale, with and without gradient; masks do not count.
MAX_PROGRAMS = 256

# How many lists of bands have their tables cached on the device. A list needs 16 MB for 128k × 128k tokens, four times
# as much for twice as many.
MAX_CACHED = 32


class LayerCall(NamedTuple):
    """One layer, with its intervals and blocks as tensors on the device."""

    layer: IntervalLayer
    start_S: Tensor
    stop_S: Tensor
    intervals: Intervals  # the same, as indices
    lists: dict[str, Any]  # arguments of BlockMask: "kv" are lists for each block of queries, "q" for each of keys


def unsupported_reason(inputs: Inputs) -> str | None:
    if inputs.device.type != "cuda":
        return f"serves CUDA devices, not {inputs.device.type}"
    major, minor = torch.cuda.get_device_capability(inputs.device)
    if major < 8:
        return f"needs compute capability 8 or higher; this device has {major}.{minor}"
    if inputs.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"computes in float16, bfloat16 and float32, not {inputs.dtype}"
    for what, dim in (("head dim", inputs.head_dim), ("value dim", inputs.v_dim)):
        if not MIN_DIM <= dim <= MAX_DIM:
            return f"takes a {what} from {MIN_DIM} to {MAX_DIM}, not {dim}"
    return None


def is_installed() -> bool:
    return find_spec(PACKAGE) is not None


def attend(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    mods: IndexedMods | None = None,
    flex_backend: FlexBackend = "TRITON",
) -> Iterator[PartialRows]:
    for call in make_flex_calls(tuple(bands), _has_mask_mod(mods), flex_backend, q_BHSD.device):
        rows, keys = slice(call.layer.q0, call.layer.q1), slice(call.layer.k0, call.layer.k1)
        q, k, v = q_BHSD[:, :, rows], k_BGTD[:, :, keys], v_BGTE[:, :, keys]
        nonfinite = None if is_one_part(tuple(bands)) else NonfiniteRows.of_inputs(q, k, v, call.intervals)
        if nonfinite is not None:
            q, (k, v) = nonfinite.zero_queries(q), nonfinite.zero_keys(k, v)
        here = None if mods is None else mods.sliced(rows, keys)
        q, k, v = (_as_base_tensor(x) for x in (q, k, v))
        result = _run_call(q, k, v, call=call, scale=scale, mods=here, flex_backend=flex_backend)
        yield PartialRows(rows.start, rows.stop, result if nonfinite is None else nonfinite.write_to_result(result))


def attend_backward(
    saved: Saved,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    mods: IndexedMods | None = None,
    flex_backend: FlexBackend = "TRITON",
    compute_gradients: Callable[..., Sequence[Tensor]] = gradients,
) -> Iterator[Gradients]:
    """Yield the gradients of each call.

    ``compute_gradients`` computes them, as :func:`ringspan.kernels.recompute.gradients` does.
    """
    learned = () if mods is None else mods.mods.learned
    for call in make_flex_calls(tuple(bands), _has_mask_mod(mods), flex_backend, k_BGTD.device):
        rows, keys = slice(call.layer.q0, call.layer.q1), slice(call.layer.k0, call.layer.k1)
        mine, k, v = saved.rows(rows.start, rows.stop), k_BGTD[:, :, keys], v_BGTE[:, :, keys]
        nonfinite = None if is_one_part(tuple(bands)) else NonfiniteRows.of_saved(mine, k, v, call.intervals)
        if nonfinite is not None:
            mine, (k, v) = nonfinite.zero_saved(mine), nonfinite.zero_keys(k, v)
        mine, k, v = mine._replace(q_BHSD=_as_base_tensor(mine.q_BHSD)), _as_base_tensor(k), _as_base_tensor(v)
        here = None if mods is None else mods.sliced(rows, keys)
        grads = compute_gradients(
            partial(_run_call, call=call, scale=scale, mods=here, flex_backend=flex_backend), mine, k, v, learned
        )
        dq, dk, dv, *dlearned = grads if nonfinite is None else nonfinite.write_to_gradients(grads)
        yield Gradients(rows, dq, keys, dk, dv, tuple(dlearned))


def max_logits(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    bands: Sequence[Band],
    *,
    scale: float,
    mods: IndexedMods | None = None,
) -> Tensor:
    """Return the largest score of each head, (H,), as :func:`ringspan.kernels.max_logits.max_logits` does.

    FlexAttention returns the largest score of each query, but ignores scores that are NaN. They make its output NaN,
    which is computed of zeros as values, of the smallest width that it takes.
    """
    largest_H = q_BHSD.new_full(q_BHSD.shape[1:2], EMPTY_LSE, dtype=torch.float32)
    for call in make_flex_calls(tuple(bands), _has_mask_mod(mods), "TRITON", q_BHSD.device):
        rows, keys = slice(call.layer.q0, call.layer.q1), slice(call.layer.k0, call.layer.k1)
        q, k = _as_base_tensor(q_BHSD[:, :, rows]), _as_base_tensor(k_BGTD[:, :, keys])
        v = k.new_zeros((*k.shape[:3], MIN_DIM))
        here = None if mods is None else mods.sliced(rows, keys)
        out_BHSE, largest_BHS = _run_call(q, k, v, call=call, scale=scale, mods=here, auxiliary="max_scores")
        largest_BHS = largest_BHS.masked_fill(out_BHSE.isnan().any(-1), torch.nan)
        largest_H = torch.maximum(largest_H, largest_BHS.amax((0, 2)))
    return largest_H


def _has_mask_mod(mods: IndexedMods | None) -> bool:
    return mods is not None and mods.mods.mask_mod is not None


@cache_by_stream(MAX_CACHED)
def make_flex_calls(
    bands: tuple[Band, ...], has_mask_mod: bool, flex_backend: FlexBackend, device: torch.device
) -> tuple[LayerCall, ...]:
    """Return one call for each layer of the bands. With a ``mask_mod`` no block counts as full."""
    return tuple(_make_call(layer, has_mask_mod, flex_backend, device) for layer in interval_layers(bands))


def _make_call(layer: IntervalLayer, has_mask_mod: bool, flex_backend: FlexBackend, device: torch.device) -> LayerCall:
    start_S, stop_S = (copy_to_device(x.astype(np.int32), device) for x in (layer.start, layer.stop))
    min_length = MIN_LENGTH if flex_backend == "TRITON" else 1  # FLASH requires tables of exactly the number of blocks
    found = block_tables(layer.start, layer.stop, layer.k1 - layer.k0, all_partial=has_mask_mod, min_length=min_length)
    lists = {}
    named = {"kv": found.partial, "full_kv": found.full, "q": found.partial_by_key, "full_q": found.full_by_key}
    for name, (counts, indices) in named.items():
        # The leading dims are batch and heads: one table for all.
        lists[f"{name}_num_blocks"] = copy_to_device(counts[None, None], device)
        lists[f"{name}_indices"] = copy_to_device(indices[None, None], device)
    intervals = Intervals(start_S.to(torch.int64), stop_S.to(torch.int64))
    return LayerCall(layer, start_S, stop_S, intervals, lists)


def _as_base_tensor(x: Tensor) -> Tensor:
    """Return a tensor of the same memory that has no base and no storage offset: Dynamo would recompile for each."""
    with torch.cuda.device_of(x):  # from_dlpack takes tensors of the current device only
        return from_dlpack(x.detach())


def _run_call(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    *learned: Tensor,
    call: LayerCall,
    scale: float,
    mods: IndexedMods | None = None,
    flex_backend: FlexBackend = "TRITON",
    auxiliary: Auxiliary = "lse",
) -> Partial:
    """Run one call. ``learned`` replaces the captured tensors that require a gradient.

    With ``auxiliary="max_scores"`` the second tensor of the result is the largest score of each query, not its lse.
    """
    with (
        # Every size gets its own symbol, even if two are equal when the program is compiled.
        distinct_sizes(),
        # Python numbers are constants of the program: the scale, and captured numbers.
        dynamo_config(recompile_limit=MAX_PROGRAMS, specialize_float=True, specialize_int=True),
        # Backward may run inside a `with cp:` context, whose mode must not intercept this call.
        without_modes(),
        # FlexAttention needs its own function mode to index tensors by tensors.
        enable_torch_function(),
    ):
        mod_arguments = () if mods is None else _mod_arguments(mods, learned, q_BHSD.shape[1], flex_backend)
        tensors = (q_BHSD, k_BGTD, v_BGTE, call.start_S, call.stop_S)
        return Partial(*_compiled()(*tensors, call.lists, scale, flex_backend, auxiliary, *mod_arguments))


class ModArguments(NamedTuple):
    """The arguments of the compiled program for ``score_mod`` and ``mask_mod``."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    heads: Tensor | int
    q_tokens_S: Tensor
    k_tokens_T: Tensor


def _mod_arguments(mods: IndexedMods, learned: Sequence[Tensor], count: int, flex_backend: FlexBackend) -> ModArguments:
    score_mod, old = mods.mods.score_mod, mods.mods.learned[: len(learned)]
    if score_mod is not None and old:
        score_mod = rebind_tensors(score_mod, {id(x): y for x, y in zip(old, learned, strict=True)})
        score, index = torch.zeros((), device=learned[0].device), torch.zeros((), dtype=torch.int64, device=learned[0].device)
        if {id(x) for x in captured_tensors(score_mod, score, *[index] * 4)} & {id(x) for x in old}:
            raise KernelError(
                'backend="flex" cannot tell how this score_mod holds a tensor that needs a gradient: hold it in a closure, a '
                'functools.partial or a module, or use backend="eager"'
            )
    tokens = (x.to(INDEX_DTYPES[flex_backend], copy=True) for x in (mods.q_tokens_S, mods.k_tokens_T))
    heads: Tensor | int = mods.first_head
    if flex_backend == "TRITON":  # FLASH cannot index a tensor by a value that was itself looked up
        heads = torch.arange(mods.first_head, mods.first_head + count, device=mods.q_tokens_S.device)
    return ModArguments(score_mod, mods.mods.mask_mod, heads, *tokens)


@cache_by_digest(1, plain=True)
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(attend_intervals, dynamic=True, fullgraph=True)


def attend_intervals(
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    start_S: Tensor,
    stop_S: Tensor,
    lists: dict[str, Any],
    scale: float,
    flex_backend: FlexBackend = "TRITON",
    auxiliary: Auxiliary = "lse",
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    heads: Tensor | int = 0,
    q_tokens_S: Tensor | None = None,
    k_tokens_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, or the largest scores, of attention in which query i sees the keys ``start_S[i] <= j <
    stop_S[i]``. Compiled.

    ``score_mod`` and ``mask_mod`` are called with ``q_tokens_S[i]`` and ``k_tokens_T[j]`` in place of rows i and j.
    ``heads`` is the global index of each head, or that of the first one.
    """
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    from ringspan.torch_private.flex_original import original_flex_attention

    (B, _, S, _), (_, _, T, _) = q_BHSD.shape, k_BGTD.shape
    # Every size has its own symbol; these are always equal.
    for same in (k_BGTD.shape[0] == B, v_BGTE.shape[0] == B, v_BGTE.shape[2] == T, len(start_S) == S, len(stop_S) == S):
        check_size(same)

    scores, sees = _functions_of_rows(start_S, stop_S, score_mod, mask_mod, heads, q_tokens_S, k_tokens_T)
    # Name the back end: by default FlexAttention uses another kernel for few queries.
    options: FlexKernelOptions = {"BACKEND": flex_backend}
    out, aux = original_flex_attention(
        q_BHSD,
        k_BGTD,
        v_BGTE,
        score_mod=scores,
        block_mask=BlockMask((S, T), **lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees),
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(**{auxiliary: True}),
        kernel_options=options,
    )
    if auxiliary == "max_scores":
        return out, cast(Tensor, aux.max_scores)
    lse = cast(Tensor, aux.lse)
    return out, lse if flex_backend == "TRITON" else lse.detach()  # FLASH does not compile if lse has a gradient


def _functions_of_rows(
    start_S: Tensor,
    stop_S: Tensor,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    heads: Tensor | int,
    q_tokens_S: Tensor | None,
    k_tokens_T: Tensor | None,
) -> tuple[ScoreMod | None, MaskMod]:
    """Return a ``score_mod`` and a ``mask_mod`` of the rows and heads of one call, from those of tokens and global
    heads. The second also has the interval of each query. Compiled."""

    def head(h: Tensor) -> Tensor:
        return h + heads if isinstance(heads, int) else heads[h]

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (start_S[i] <= j) & (j < stop_S[i])
        if mask_mod is not None:
            seen = seen & mask_mod(b, head(h), q_tokens_S[i], k_tokens_T[j])  # type: ignore[index]
        return seen

    def scores(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # The compiler of torch 2.11 takes a looked-up token for a single number, not for one per row, and then cannot
        # place the gradient of a tensor that is indexed by it. Adding a zero that depends on the row avoids this.
        q_token, k_token = q_tokens_S[i] + (i - i), k_tokens_T[j] + (j - j)  # type: ignore[index]
        return score_mod(score, b, head(h), q_token, k_token)  # type: ignore[misc]

    return None if score_mod is None else scores, sees
