"""A torch function mode that makes a plan for each attention call, from its mask and from the layout of its tensors."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ringspan.compat.attention_calls import AttentionCall, FlexCall, FlexLengthError, parse_call
from ringspan.compat.balancers import Layouts, same_order
from ringspan.compat.batch_masks import masks_of_rows
from ringspan.compat.block_masks import MaskOrigin, batch_row
from ringspan.compat.call_settings import hold_settings, note_change_of_blocks, settings_of
from ringspan.compat.context_cache import ContextCache, ContextKey
from ringspan.compat.default_layouts import contiguous_of_counts, default_layouts
from ringspan.compat.error_texts import in_torchs_names
from ringspan.compat.meshes import BlockLayouts, MeshBlock, innermost_block, mesh_key
from ringspan.engine import PlanHandle
from ringspan.errors import InputError, PeerMismatch, UnplannedAttention
from ringspan.frontends import ContextParallel
from ringspan.frontends.attention_block import AttentionCatcher
from ringspan.frontends.dtensor import is_dtensor
from ringspan.frontends.reporting import report_error
from ringspan.frontends.treatments import is_varlen_attention
from ringspan.layouts import Layout
from ringspan.masks import full
from ringspan.plans.data import DkvDtype
from ringspan.torch_private.pytree import tree_map

NAME_THE_LAYOUT = (
    "attend in a context_parallel block whose buffers have this length, use flex_attention with a BlockMask of "
    "_context_parallel_shard, or rs.ContextParallel(mesh, mask, layout=...)"
)


class MaskFromCallMode(AttentionCatcher):
    """Passes each attention call on to a :class:`ContextParallel` that was made for the call's mask.

    The layouts of a call are, in this order: those of its sharded BlockMask; ``block``, those of the
    ``context_parallel`` block around it, or None if there is no block; what ``_cp_options.enable_load_balance`` says.
    The rotate method and ``convert_to_f32`` are those that were set when this mode was made. ``traced`` handles calls
    of compiled functions inside a module.
    """

    def __init__(self, contexts: ContextCache, traced: AttentionCatcher | None = None, *, block: BlockLayouts | None) -> None:
        super().__init__()
        self._contexts, self._settings, self._traced = contexts, settings_of(contexts.shardings), traced
        self._block, self._is_in_block = block or {}, block is not None
        # Made in advance for buffers of one length: torch.compile can trace calls of a context, not its construction.
        self._ready: dict[tuple[bool, DkvDtype], ContextParallel] = {}
        if len(self._block) == 1:
            ((layout,),) = self._block.values()
            dtypes: set[DkvDtype] = {self._settings.dkv_dtype(dtype) for dtype in (torch.float32, torch.bfloat16)}
            self._ready = {
                (is_causal, dkv_dtype): self._context(layout, layout, is_causal, dkv_dtype)
                for is_causal in (False, True)
                for dkv_dtype in sorted(dtypes)
            }

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
            if not self._ready and self._traced is not None:
                return self._traced.caught(func, args, kwargs)
            if not self._ready:
                raise UnplannedAttention(
                    "attention can be compiled only in a block whose buffers have one length: give it such buffers, or do "
                    "not compile"
                )
            ready = self._ready[call.is_causal, self._settings.dkv_dtype(call.query.dtype)]
            return ready.caught(func, args, kwargs)
        return self._planned(func, call)

    def refuse(self, error: Exception) -> None:
        report_error(self._contexts.group, "forward", error)

    @torch.compiler.disable  # after a graph break in the caller, torch.compile would try to trace the planner
    def _planned(self, func: Any, call: AttentionCall) -> Any:
        layouts, kv_layouts = self._layouts(call)
        _check_lengths_of_mask(call, (layouts[0].length, kv_layouts[0].length))
        try:
            return self._attend(func, call, layouts, kv_layouts)
        except (InputError, PeerMismatch) as error:
            translated = in_torchs_names(error) or error
            if call.has_block_mask and not self._lengths_fit(call, layouts[0], kv_layouts[0]):
                raise FlexLengthError(str(translated)) from None
            raise translated from None
        except UnplannedAttention as error:
            raise in_torchs_names(error) or error from None

    def keep_settings(self) -> None:
        hold_settings(self._contexts.shardings)

    def handles_of(self, call: Any) -> list[PlanHandle]:
        """Return registered handles for the plans of a call: one, or one for each row of the batch.

        They are for compiled code, which computes attention by an operator.
        """
        pairs = self._pairs(call, *self._layouts(call))
        contexts = [self._context(*pair, call.is_causal, self._settings.dkv_dtype(call.query.dtype)) for pair in pairs]
        if call.mask_origin is None or len(contexts) == 1:
            return [context.handle_of(None if call.mask_origin is None else call.mask_origin.whole) for context in contexts]
        return [context.handle_of(batch_row(call.mask_origin.whole, b)) for b, context in enumerate(contexts)]

    def _attend(self, func: Any, call: AttentionCall, layouts: Layouts, kv_layouts: Layouts) -> Any:
        pairs = self._pairs(call, layouts, kv_layouts)
        dkv_dtype = self._settings.dkv_dtype(call.query.dtype)
        masks = masks_of_rows(call, pairs)
        if masks is not None:
            of_batch = self._contexts.of_batch(masks, pairs, self._settings.strategy, dkv_dtype)
            return of_batch.caught(func, (), call.without_mask().arguments())
        contexts = [self._context(*pair, call.is_causal, dkv_dtype) for pair in pairs]
        if len(contexts) == 1:
            return contexts[0].caught(func, (), call.arguments())
        results = [context.caught(func, (), call.row(b).arguments()) for b, context in enumerate(contexts)]
        return tree_map(lambda *parts: None if parts[0] is None else torch.cat(parts), *results)

    def _pairs(self, call: AttentionCall, layouts: Layouts, kv_layouts: Layouts) -> list[tuple[Layout, Layout]]:
        """Return the layouts of queries and keys: one pair, or one for each row of the batch."""
        rows = max(len(layouts), len(kv_layouts))
        if rows > 1 and (call.query.ndim != 4 or call.query.shape[0] != rows):
            raise InputError(
                f"the balancer orders each of {rows} batch rows differently, but the queries have shape "
                f"{tuple(call.query.shape)}: call attention with (batch, heads, tokens, dim) of the whole batch"
            )
        return list(zip(layouts * (rows // len(layouts)), kv_layouts * (rows // len(kv_layouts)), strict=True))

    def _context(self, layout: Layout, kv_layout: Layout, is_causal: bool, dkv_dtype: DkvDtype) -> ContextParallel:
        return self._contexts.get(ContextKey(layout, kv_layout, is_causal, self._settings.strategy, dkv_dtype))

    def _layouts(self, call: AttentionCall) -> tuple[Layouts, Layouts]:
        block, origin = self._block, call.mask_origin
        if origin is not None:
            self._check_order_of_mask(origin)
            return origin.layouts, origin.kv_layouts
        if len(block) == 1:  # ContextParallel compares its length with the tensors
            (own,) = block.values()
            return own, own
        q_counts, kv_counts = self._counts(call)
        if block:
            return self._of_block(sum(q_counts)), self._of_block(sum(kv_counts))
        if not call.depends_on_order:
            return (contiguous_of_counts(q_counts),), (contiguous_of_counts(kv_counts),)
        return self._by_switch(q_counts), self._by_switch(kv_counts)

    def _check_order_of_mask(self, origin: MaskOrigin) -> None:
        """Raise if the tensors of a call cannot be in the order of its BlockMask."""
        own = self._block.get(origin.layouts[0].length)
        if own is not None:
            if not same_order(own, origin.layouts):
                raise InputError(
                    f"the BlockMask was sharded by {origin.layouts[0]!r}, but the buffers of the context_parallel block by "
                    f"{own[0]!r}: shard the mask and the tensors in one way"
                )
            return
        for layout in (origin.layouts[0], origin.kv_layouts[0]):
            others = () if origin.order is None else self._contexts.shardings.of_others(origin.order, layout.length)
            if others and layout.world > 1:
                raise InputError(
                    f"the BlockMask is in {origin.order} order, but all tensors of {layout.length} tokens were sharded in "
                    f"another ({', '.join(others)}): shard the mask and the tensors with the same load_balancer"
                )

    def _by_switch(self, counts: tuple[int, ...]) -> Layouts:
        return default_layouts(counts, settings_of(self._contexts.shardings).orders_of(sum(counts)), remedy=NAME_THE_LAYOUT)

    def _counts(self, call: AttentionCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return how many queries and how many keys each rank has."""
        here, group = (_local_tokens(call.query), _local_tokens(call.key)), self._contexts.group
        if not self._is_in_block and not self._contexts.shardings.has_uneven:
            return (here[0],) * group.world, (here[1],) * group.world
        counts = group.all_gather_ints(here, call.query.device, label="the all-gather of sequence lengths")
        q_counts, kv_counts = zip(*counts, strict=True)
        return q_counts, kv_counts

    def _lengths_fit(self, call: AttentionCall, layout: Layout, kv_layout: Layout) -> bool:
        rank = self._contexts.group.rank
        return (_local_tokens(call.query), _local_tokens(call.key)) == (layout.counts[rank], kv_layout.counts[rank])

    def _of_block(self, length: int) -> Layouts:
        own = self._block.get(length)
        if own is None:
            lengths = ", ".join(map(str, sorted(self._block)))
            raise InputError(
                f"the ranks together have {length} tokens, but the buffers of the context_parallel block have {lengths}: "
                "make this sequence a buffer too, or put attention that is not split in `with rs.local_attention():`"
            )
        return own


class BlockMode(MaskFromCallMode, MeshBlock):
    """The mode of a ``context_parallel`` block, which is open while the mode is entered: also in a recomputation."""

    def __init__(self, contexts: ContextCache, layouts: BlockLayouts) -> None:
        self.mesh_key = mesh_key(contexts.mesh)
        self.layouts = {**(innermost_block(contexts.mesh) or {}), **layouts}
        super().__init__(contexts, block=self.layouts)

    def __enter__(self) -> Self:
        if not torch.compiler.is_dynamo_compiling():
            note_change_of_blocks()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            if not torch.compiler.is_dynamo_compiling():
                note_change_of_blocks()


def _check_lengths_of_mask(call: AttentionCall, lengths: tuple[int, int]) -> None:
    """Raise if a BlockMask that is not a shard is not one of the whole sequence."""
    if not isinstance(call, FlexCall) or call.block_mask is None or call.mask_origin is not None:
        return
    given = tuple(call.block_mask.seq_lengths)
    if given != lengths:
        raise FlexLengthError(
            f"this BlockMask is over {given[0]} × {given[1]} (queries × keys), but the whole sequence is {lengths[0]} × "
            f"{lengths[1]}. Give the mask of the whole sequence, or what _context_parallel_shard returned for it: a part of a "
            "shard (block_mask[...]), or a mask made of its mask_mod, has no known layout. Index the whole mask, then shard it"
        )


def _local_tokens(x: Tensor) -> int:
    return (x.to_local() if is_dtensor(x) else x).shape[-2]
