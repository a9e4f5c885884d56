"""A torch function mode that takes the mask from each attention call: ``is_causal``, a ``block_mask``, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ringspan.compat.attention_calls import AttentionCall, parse_call
from ringspan.compat.balancers import Layouts
from ringspan.compat.context_cache import ContextCache, ContextKey
from ringspan.compat.options import _cp_options
from ringspan.compat.shard_registry import only_layouts_of_length, registry_of
from ringspan.compat.sharding import contiguous_of_counts
from ringspan.errors import InputError, UnplannedAttention
from ringspan.frontends import ContextParallel
from ringspan.frontends.attention_block import AttentionCatcher, is_varlen_attention
from ringspan.layouts import Layout
from ringspan.masks import full
from ringspan.torch_private.pytree import tree_map


class MaskFromCallMode(AttentionCatcher):
    """Passes each attention call on to a :class:`ContextParallel` that was made for the call's mask.

    ``layouts`` are the layouts of the block's own buffers, by sequence length. If it is empty, the layouts of the
    shards in use on the mesh apply. If there are none of those either, the ranks' tokens are taken to be contiguous, in
    rank order. The rotate method is the one that was set when this mode was made.
    """

    def __init__(self, contexts: ContextCache, layouts: Mapping[int, Layouts]) -> None:
        super().__init__()
        self._contexts, self._registry, self._strategy = contexts, registry_of(contexts.mesh), _cp_options.strategy
        self._own = {length: {own} for length, own in layouts.items()}
        # Made in advance for buffers of one length: torch.compile can trace calls of a context, not its construction.
        self._ready: dict[bool, ContextParallel] = {}
        if len(layouts) == 1:
            ((layout,),) = layouts.values()
            self._ready = {is_causal: self._context(layout, layout, is_causal) for is_causal in (False, True)}

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = parse_call(func, args, kwargs)
        if is_varlen_attention(func):
            raise UnplannedAttention(
                "varlen_attn says which documents it attends to, but not how this block has split them: use `with cp:`, with "
                "cp = rs.ContextParallel(mesh, rs.documents(lengths))"
            )
        if call is None:
            # Any ContextParallel refuses the other attention functions, with an error that names the function.
            return ContextParallel(self._contexts.group, full(0)).caught(func, args, kwargs)
        # is_compiling() is True in every thread while one of them compiles (from torch 2.13 on).
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            if not self._ready:
                raise UnplannedAttention(
                    "attention can be compiled only in a block whose buffers have one length: give it such buffers, or do "
                    "not compile"
                )
            return self._ready[call.is_causal].caught(func, args, kwargs)
        return self._planned(func, call)

    @torch.compiler.disable  # after a graph break in the caller, torch.compile would try to trace the planner
    def _planned(self, func: Any, call: AttentionCall) -> Any:
        layouts, kv_layouts = self._layouts(call.query, call.key)
        rows = max(len(layouts), len(kv_layouts))
        if rows == 1:
            return self._context(layouts[0], kv_layouts[0], call.is_causal).caught(func, (), call.arguments())
        if call.query.ndim != 4 or call.query.shape[0] != rows:
            raise InputError(
                f"the balancer orders each of {rows} batch rows differently, but the queries have shape "
                f"{tuple(call.query.shape)}: call attention with (batch, heads, tokens, dim) of the whole batch"
            )
        pairs = zip(layouts * (rows // len(layouts)), kv_layouts * (rows // len(kv_layouts)), strict=True)
        contexts = [self._context(*pair, call.is_causal) for pair in pairs]
        results = [context.caught(func, (), call.row(b).arguments()) for b, context in enumerate(contexts)]
        return tree_map(lambda *parts: None if parts[0] is None else torch.cat(parts), *results)

    def _context(self, layout: Layout, kv_layout: Layout, is_causal: bool) -> ContextParallel:
        return self._contexts.get(ContextKey(layout, kv_layout, is_causal, self._strategy))

    def _layouts(self, query: Tensor, key: Tensor) -> tuple[Layouts, Layouts]:
        q_layouts, kv_layouts = self._registry.layouts_of_shard(query), self._registry.layouts_of_shard(key)
        if q_layouts is not None and kv_layouts is not None:
            return q_layouts, kv_layouts
        known = self._own or self._registry.in_use()
        if len(known) == 1:
            (length,) = known
            return only_layouts_of_length(known, length), only_layouts_of_length(known, length)
        # The sum over ranks identifies the sequence. One rank's count may fit several whose lengths differ by little.
        counts = self._contexts.group.all_gather_ints(
            [query.shape[-2], key.shape[-2]], query.device, label="the all-gather of sequence lengths"
        )
        q_counts, kv_counts = zip(*counts, strict=True)
        if known:
            return only_layouts_of_length(known, sum(q_counts)), only_layouts_of_length(known, sum(kv_counts))
        found = contiguous_of_counts(q_counts), contiguous_of_counts(kv_counts)
        self._registry.keep_for_unshard_only({layouts[0].length: layouts for layouts in found})
        return found
