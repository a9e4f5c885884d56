"""Attention whose mask is what the call says: ``is_causal``, a ``block_mask``, or everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ringspan.compat.balancers import Layouts
from ringspan.compat.calls import Call, read
from ringspan.compat.contexts import Contexts, Meaning
from ringspan.compat.options import _cp_options
from ringspan.compat.shard_registry import memory_of, the_one
from ringspan.compat.sharding import in_order
from ringspan.errors import InputError, UnplannedAttention
from ringspan.frontends import ContextParallel
from ringspan.frontends.sdpa import AttentionCatcher
from ringspan.layouts import Layout
from ringspan.masks import full
from ringspan.torch_private.pytree import tree_map


class MaskFromTheCall(AttentionCatcher):
    """Hands each call to a :class:`ContextParallel` that has the call's mask, which does the rest.

    ``layouts`` are those of the block's own buffers, by the lengths of their sequences. Without any, they are those of the
    shards that are in use on the mesh. Where there are none of these either, the ranks' tokens are taken to lie in order.
    The rotate method is the one that was set when the block was opened.
    """

    def __init__(self, contexts: Contexts, layouts: Mapping[int, Layouts]) -> None:
        super().__init__()
        self._contexts, self._memory, self._strategy = contexts, memory_of(contexts.mesh), _cp_options.strategy
        self._own = {length: {own} for length, own in layouts.items()}
        # Made beforehand where it is clear what they will be: a compiler follows a call into a context, not the making of one.
        self._ready: dict[bool, ContextParallel] = {}
        if len(layouts) == 1:
            ((layout,),) = layouts.values()
            self._ready = {is_causal: self._context(layout, layout, is_causal) for is_causal in (False, True)}

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = read(func, args, kwargs)
        if call is None:
            # It refuses other ways to attention by name.
            return ContextParallel(self._contexts.group, full(0)).caught(func, args, kwargs)
        if torch.compiler.is_compiling():
            if not self._ready:
                raise UnplannedAttention(
                    "only a block whose buffers are of one length can be traced: give it those, or do not compile"
                )
            return self._ready[call.is_causal].caught(func, args, kwargs)
        return self._planned(func, call)

    @torch.compiler.disable  # a compiler that gave the caller up would try its luck with planning
    def _planned(self, func: Any, call: Call) -> Any:
        layouts, kv_layouts = self._layouts(call.query, call.key)
        rows = max(len(layouts), len(kv_layouts))
        if rows == 1:
            return self._context(layouts[0], kv_layouts[0], call.is_causal).caught(func, (), call.arguments())
        if call.query.ndim != 4 or call.query.shape[0] != rows:
            raise InputError(
                f"the balancer has rearranged each of {rows} rows of the batch in its own way, but the queries have shape "
                f"{tuple(call.query.shape)}: call attention with (batch, heads, tokens, dim) of the whole batch"
            )
        pairs = zip(layouts * (rows // len(layouts)), kv_layouts * (rows // len(kv_layouts)), strict=True)
        contexts = [self._context(*pair, call.is_causal) for pair in pairs]
        results = [context.caught(func, (), call.row(b).arguments()) for b, context in enumerate(contexts)]
        return tree_map(lambda *parts: None if parts[0] is None else torch.cat(parts), *results)

    def _context(self, layout: Layout, kv_layout: Layout, is_causal: bool) -> ContextParallel:
        return self._contexts.get(Meaning(layout, kv_layout, is_causal, self._strategy))

    def _layouts(self, query: Tensor, key: Tensor) -> tuple[Layouts, Layouts]:
        itself = self._memory.shard(query), self._memory.shard(key)
        if itself[0] is not None and itself[1] is not None:
            return itself[0], itself[1]
        known = self._own or self._memory.in_use()
        if len(known) == 1:
            (length,) = known
            return the_one(known, length), the_one(known, length)
        # The ranks' tokens together tell which sequence it is. One rank's alone may not, where lengths differ by little.
        counts = self._contexts.group.gather_numbers([query.shape[-2], key.shape[-2]], query.device)
        q_counts, kv_counts = zip(*counts, strict=True)
        if known:
            return the_one(known, sum(q_counts)), the_one(known, sum(kv_counts))
        found = in_order(q_counts), in_order(kv_counts)
        self._memory.keep({layouts[0].length: layouts for layouts in found})
        return found
