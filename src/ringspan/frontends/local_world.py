"""All ranks in one process: the same plans and the same engine as separate processes, without torch.distributed.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ringspan.caching.by_stream import cache_by_stream, copy_to_device
from ringspan.engine import (
    RowWindow,
    attend_ranks,
    attend_ranks_with_max_logits,
    config_for,
    shape_of,
    window_plan,
    windows_of_ranks,
)
from ringspan.errors import InputError
from ringspan.frontends.batch_rows import attend_rows, rows_of
from ringspan.frontends.flex import FlexResult, check_arguments, mask_of
from ringspan.frontends.labels import document_lengths
from ringspan.frontends.neighbours import check_fill, halo_window, roll_window, rows_first, windows_back
from ringspan.frontends.validate import check_mask, check_scale
from ringspan.frontends.varlen import VarlenCall, from_four_dims, mask_of_call
from ringspan.kernels import Partial, ScoreMod
from ringspan.layouts import Layout, LayoutLike, check_world, make_layout
from ringspan.masks import Mask, full
from ringspan.masks.offsets import offsets
from ringspan.planner import Plan, plan
from ringspan.plans.data import DkvDtype
from ringspan.strategies import Strategy
from ringspan.torch_private.dynamo import dynamo_disable
from ringspan.torch_private.function_modes import disable_torch_function
from ringspan.transports import InProcessTransport, Traffic

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions


class LocalWorld:
    """A world of ``n`` ranks in this process, for debugging, tests and single devices.

    It plans in every call, which torch.compile cannot trace: the graph breaks here, and ``fullgraph=True`` raises.

    >>> import torch, ringspan as rs
    >>> q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
    >>> out = rs.LocalWorld(4).attention(q, k, v, mask=rs.causal(10), strategy="ring", layout="zigzag")
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True
    """

    def __init__(self, n: int) -> None:
        self.world = check_world(n)
        self.traffic: list[Traffic] = [Traffic() for _ in range(self.world)]
        """Bytes that each rank has sent and received, over all calls."""

    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask,
        strategy: str | Strategy = "auto",
        layout: LayoutLike = "auto",
        kv_layout: LayoutLike | None = None,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        dkv_dtype: DkvDtype = "float32",
        return_lse: Literal[False] = False,
        return_max_logits: Literal[False] = False,
        backend: str = "auto",
        cuda_graphs: bool = False,
    ) -> Tensor: ...
    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask,
        strategy: str | Strategy = "auto",
        layout: LayoutLike = "auto",
        kv_layout: LayoutLike | None = None,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        dkv_dtype: DkvDtype = "float32",
        return_lse: Literal[True],
        return_max_logits: Literal[False] = False,
        backend: str = "auto",
        cuda_graphs: bool = False,
    ) -> Partial: ...
    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask,
        strategy: str | Strategy = "auto",
        layout: LayoutLike = "auto",
        kv_layout: LayoutLike | None = None,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        dkv_dtype: DkvDtype = "float32",
        return_lse: Literal[False] = False,
        return_max_logits: Literal[True],
        backend: str = "auto",
        cuda_graphs: bool = False,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask,
        strategy: str | Strategy = "auto",
        layout: LayoutLike = "auto",
        kv_layout: LayoutLike | None = None,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        dkv_dtype: DkvDtype = "float32",
        return_lse: Literal[True],
        return_max_logits: Literal[True],
        backend: str = "auto",
        cuda_graphs: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    @dynamo_disable
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask,
        strategy: str | Strategy = "auto",
        layout: LayoutLike = "auto",
        kv_layout: LayoutLike | None = None,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        dkv_dtype: DkvDtype = "float32",
        return_lse: bool = False,
        return_max_logits: bool = False,
        backend: str = "auto",
        cuda_graphs: bool = False,
    ) -> Tensor | Partial | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """Compute attention of whole sequences: q (B, H, S, D), k (B, G, T, D), v (B, G, T, E). Returns the whole
        result.

        The sequence is split over the ranks, and every rank executes its own plan. Differentiable. ``score_mod(score,
        b, h, q, k)`` changes the score of each visible pair, as in FlexAttention. ``dkv_dtype`` is as in
        :func:`ringspan.plan`, ``return_lse``, ``return_max_logits`` and ``cuda_graphs`` are as in
        :func:`ringspan.attention`.
        """
        plans = self.plans(mask, strategy=strategy, layout=layout, kv_layout=kv_layout, dkv_dtype=dkv_dtype)
        found: list[Tensor] | None = [] if return_max_logits else None
        options: dict[str, Any] = {"scale": scale, "backend": backend, "score_mod": score_mod, "cuda_graphs": cuda_graphs}
        result = self.run(plans, q, k, v, **options, max_logits=found)
        if found is not None:
            return (*result, found[0]) if return_lse else (result.out, found[0])
        return result if return_lse else result.out

    @dynamo_disable
    def flex_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: ScoreMod | None = None,
        block_mask: BlockMask | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: FlexKernelOptions | None = None,
        *,
        return_aux: AuxRequest | None = None,
        return_max_logits: bool = False,
        mask: Mask | None = None,
        strategy: str | Strategy = "auto",
        layout: LayoutLike = "auto",
        backend: str = "auto",
    ) -> FlexResult:
        """Compute FlexAttention of whole sequences; see :func:`ringspan.flex_attention`.

        The mask is ``block_mask`` or ``mask``; without either, every query sees every key.
        """
        request = check_arguments(query, key, enable_gqa=enable_gqa, return_lse=return_lse, return_aux=return_aux)
        lengths = (query.shape[-2], key.shape[-2])
        if block_mask is not None:
            if mask is not None:
                raise InputError("block_mask= and mask= exclude each other: give one of the two")
            mask = mask_of(block_mask, lengths)
        plans = self.plans(full(*lengths) if mask is None else mask, strategy=strategy, layout=layout)
        found: list[Tensor] | None = [] if return_max_logits else None
        result = self.run(plans, query, key, value, scale=scale, backend=backend, score_mod=score_mod, max_logits=found)
        return request.select(result, None if found is None else found[0])

    @dynamo_disable
    def varlen_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        strategy: str | Strategy = "auto",
        layout: LayoutLike = "auto",
        backend: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``torch.nn.attention.varlen.varlen_attn`` of packed documents, split inside: q (S, H, D), k (T, G, D), v (T,
        G, E).

        ``return_aux=AuxRequest(lse=True)`` gives out (S, H, E) and lse (H, S).
        """
        call = VarlenCall(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)
        plans = self.plans(mask_of_call(call), strategy=strategy, layout=layout)
        q, k, v = call.four_dims()
        check_arguments(q, k, enable_gqa=enable_gqa, return_lse=False, return_aux=None)
        out, lse = from_four_dims(self.run(plans, q, k, v, scale=scale, backend=backend))
        return (out, lse) if return_aux is not None and return_aux.lse else out

    def roll(
        self, x: Tensor, shift: int, *, dim: int = 1, documents: Any = None, fill: float = 0, layout: LayoutLike = "contiguous"
    ) -> Tensor:
        """Shift the tokens of a whole sequence, which is split inside; see :meth:`ringspan.ContextParallel.roll`."""
        return self._windows(x, roll_window(shift, fill), dim, documents, layout).squeeze(dim % x.ndim + 1)

    def halo(
        self,
        x: Tensor,
        *,
        before: int,
        after: int = 0,
        dim: int = 1,
        documents: Any = None,
        fill: float = 0,
        layout: LayoutLike = "contiguous",
    ) -> Tensor:
        """Return the neighbours of each token of a whole sequence; see :meth:`ringspan.ContextParallel.halo`."""
        return self._windows(x, halo_window(before, after, fill), dim, documents, layout)

    @dynamo_disable
    def _windows(self, x: Tensor, window: RowWindow, dim: int, documents: Any, layout: LayoutLike) -> Tensor:
        if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
            raise InputError(f"x must be a tensor with its tokens on dim {dim}; got {getattr(x, 'shape', type(x).__name__)}")
        rows, dim = rows_first(x, dim, x.shape[dim])
        check_fill(window.fill, x.dtype)
        lengths = document_lengths(documents, len(rows))
        made, _ = make_layout(layout, offsets(lengths, -len(rows), 0), self.world)
        transport = InProcessTransport(self.world)
        transport.traffic = self.traffic
        plans = [window_plan(lengths, made, window, rank) for rank in range(self.world)]
        parts = windows_of_ranks(
            plans, [rows.index_select(0, t) for t in _tokens(made, x.device)], window, transport.run, "roll or halo"
        )
        return windows_back(torch.cat(parts).index_select(0, _inverse_order(made, x.device)), x, dim)

    def plans(
        self,
        mask: Mask,
        *,
        strategy: str | Strategy = "auto",
        layout: LayoutLike = "auto",
        kv_layout: LayoutLike | None = None,
        dkv_dtype: DkvDtype = "float32",
    ) -> list[Plan]:
        """Return the plans of all ranks."""
        options: dict[str, Any] = {"strategy": strategy, "layout": layout, "kv_layout": kv_layout, "dkv_dtype": dkv_dtype}
        first = plan(check_mask(mask), world=self.world, rank=0, **options)
        return [first.at(rank) for rank in range(self.world)]

    @dynamo_disable
    def run(
        self,
        plans: list[Plan],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        backend: str = "auto",
        score_mod: ScoreMod | None = None,
        max_logits: list[Tensor] | None = None,
        cuda_graphs: bool = False,
    ) -> Partial:
        """Compute attention of whole sequences with given plans, one for each rank: out (B, H, S, E) and lse (B, H,
        S).

        For a mask that differs between the rows of a batch, B is the number of its rows. If a list is given as
        ``max_logits``, the largest logit of each head (H,) is appended to it.
        """
        rows = rows_of(plans[0].mask)
        if rows is not None and score_mod is not None:
            raise InputError(
                "a score_mod does not support masks that differ between the rows of a batch: give one function of the "
                "whole batch, mask=rs.mask_mod(function, n, batch=rows) with function(b, h, q, k)"
            )
        attend = partial(
            self._run_sequence,
            plans,
            scale=scale,
            backend=backend,
            score_mod=score_mod,
            max_logits=max_logits,
            cuda_graphs=cuda_graphs,
        )
        return attend(q, k, v) if rows is None else attend_rows(attend, q, k, v, rows)

    def _run_sequence(
        self,
        plans: list[Plan],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        backend: str,
        score_mod: ScoreMod | None,
        max_logits: list[Tensor] | None,
        cuda_graphs: bool,
    ) -> Partial:
        """Compute attention of the one sequence that the plans know: rows of a batch are laid end to end."""
        shape = shape_of(q, k, v)
        plans = [plan.for_heads(shape.heads, shape.kv_heads) for plan in plans]
        mask, q_layout, kv_layout = plans[0].mask, plans[0].q_layout, plans[0].kv_layout
        if (q.shape[2], k.shape[2]) != mask.lengths:
            raise InputError(
                f"q has {q.shape[2]} tokens and k has {k.shape[2]}, but the mask {mask.name} is over {mask.lengths[0]} × "
                f"{mask.lengths[1]} (queries × keys): make the mask for these lengths"
            )
        queries = _split(q, q_layout)
        keys, values = _split(k, kv_layout), _split(v, kv_layout)
        transport = InProcessTransport(self.world)
        transport.traffic = self.traffic
        scale = check_scale(scale, shape.head_dim)
        config = config_for(plans[0], q, v, scale, backend, score_mod, cuda_graphs=cuda_graphs)
        with disable_torch_function():  # a `with cp:` block around this call must not catch the kernels' own calls
            split = list(zip(queries, keys, values, strict=True))
            if max_logits is None:
                parts = attend_ranks(plans, split, config, transport.run)
            else:
                parts, largest_H = attend_ranks_with_max_logits(plans, split, config, transport.run)
                max_logits.append(largest_H)
        inverse = _inverse_order(q_layout, q.device)
        out = torch.cat([part.out for part in parts], dim=2).index_select(2, inverse)
        lse = torch.cat([part.lse for part in parts], dim=2).index_select(2, inverse)
        return Partial(out, lse)


def _split(x: Tensor, layout: Layout) -> list[Tensor]:
    return [x.index_select(2, tokens) for tokens in _tokens(layout, x.device)]


# Layouts whose indices are cached on the device: 8 bytes for each token.
MAX_LAYOUTS = 16


@cache_by_stream(MAX_LAYOUTS)
def _tokens(layout: Layout, device: torch.device) -> tuple[Tensor, ...]:
    """Return the tokens of each rank, in its order."""
    return tuple(copy_to_device(layout.positions(rank), device) for rank in range(layout.world))


@cache_by_stream(MAX_LAYOUTS)
def _inverse_order(layout: Layout, device: torch.device) -> Tensor:
    """Return the row of each token in the concatenation of all ranks."""
    return copy_to_device(layout.order().argsort(), device)
