"""ContextParallel: shard a sequence over a group, attend over all of it, and gather it again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ringspan.costs import Hardware
from ringspan.debugging.settings import settings
from ringspan.engine import PlanHandle, attend
from ringspan.errors import InputError
from ringspan.frontends.attention import attend_tensors, registered_handle
from ringspan.frontends.attention_block import under_autocast
from ringspan.frontends.batch_rows import attend_rows, lay_end_to_end, refuse_rows, rows_of, stack_rows, take_rows
from ringspan.frontends.containers import map_sequences
from ringspan.frontends.dtensor import any_dtensor, is_dtensor
from ringspan.frontends.flex import FlexResult, check_arguments, flex_attention, plan_of
from ringspan.frontends.groups import Group
from ringspan.frontends.losses import Losses
from ringspan.frontends.neighbours import Neighbours
from ringspan.frontends.rank_comparison import TokensOfRanks, check_in_use, check_layout, compare_layouts, mark_layout
from ringspan.frontends.reporting import report_error, reports_errors
from ringspan.frontends.routing import Routing
from ringspan.frontends.unshard import Unshard
from ringspan.frontends.validate import check_mask
from ringspan.frontends.varlen import VarlenCall, attend_packed
from ringspan.frontends.watched_block import WatchedBlock
from ringspan.kernels import ScoreMod
from ringspan.layouts import Layout, LayoutLike
from ringspan.masks import Mask
from ringspan.planner import Plan, plan
from ringspan.plans import Shape
from ringspan.plans.data import DkvDtype, Side
from ringspan.strategies import Strategy
from ringspan.torch_private.dynamo import dynamo_constant, dynamo_disable
from ringspan.transports import ProcessGroupTransport, as_transport

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions

    from ringspan.frontends.dtensor.offsets import ShardExtents


T = TypeVar("T")


class ContextParallel(WatchedBlock, Neighbours, Routing, Losses):
    """A sequence split over the ranks of a group, and its attention mask.

    ::

        cp = rs.ContextParallel(mesh["cp"], rs.documents(lengths))
        tokens, labels = cp.shard(tokens, labels, dim=1)
        with cp:                                   # F.scaled_dot_product_attention is context-parallel in here
            logits = model(tokens, positions=cp.positions(documents=lengths))
        loss = cp.mean(token_loss, labels >= 0)    # the mean over all tokens of all ranks that have a label
        loss.backward()
        cp.sum_gradients(model.parameters())

    ``F.scaled_dot_product_attention`` calls in the block use this mask; a call whose arguments contradict it raises. A
    ``flex_attention`` call with a ``block_mask`` uses that mask, on this layout, and a ``varlen_attn`` call the mask of
    its ``cu_seq`` and ``window_size``. The mode is thread-local. Blocks nest, and the innermost one applies. On exit
    the mode is removed. (The wrapper around ``flex_attention`` stays installed. It does nothing outside a block.)

    Strategy and layout are chosen by the constructor, before there are tensors. Pass ``hardware`` and ``shape`` to
    choose for your machine and model, as in :func:`ringspan.plan`.

    ``dkv_dtype="bfloat16"`` sends gradients of keys and values in bfloat16, which halves their bytes and rounds each
    message (docs/numerics.md). By default sums of several ranks are sent as they are accumulated, in float32.

    ``timeout`` is the number of seconds to wait for a message of another rank (None: the time limit of the group).

    ``cuda_graphs=True`` captures attention in CUDA graphs from its fourth call on, for ranks with few tokens. Results
    are the same bits. It costs copies and up to 2 GiB of memory (docs/training.md).

    A block in which no attention was intercepted raises :class:`ringspan.UnplannedAttention` when it ends, if it was
    never used before or a softmax over this rank's keys was computed in it: the model computes attention in a way that
    the block cannot see, each rank on its own keys. ``expect_attention=False`` allows it. :func:`ringspan.strict` finds
    such attention beside intercepted calls as well.
    """

    def __init__(
        self,
        group: Group,
        mask: Mask,
        *,
        strategy: str | Strategy = "auto",
        layout: LayoutLike = "auto",
        kv_layout: LayoutLike | None = None,
        hardware: str | Hardware | None = None,
        shape: Shape | None = None,
        dkv_dtype: DkvDtype = "float32",
        backend: str = "auto",
        timeout: float | None = None,
        expect_attention: bool = True,
        cuda_graphs: bool = False,
    ) -> None:
        self.group: ProcessGroupTransport = as_transport(group, timeout)
        self.expects_attention = expect_attention
        self.tokens_of_ranks = TokensOfRanks()
        self.backend, self.cuda_graphs = backend, cuda_graphs
        self.plan: Plan = plan(
            check_mask(mask),
            world=self.group.world,
            rank=self.group.rank,
            strategy=strategy,
            layout=layout,
            kv_layout=kv_layout,
            hardware=hardware,
            shape=shape,
            dkv_dtype=dkv_dtype,
        )
        self._rows = rows_of(self.plan.mask)  # of a batch whose rows have masks of their own
        super().__init__(mask)
        self._strategy, self._requested_layout, self._requested_kv_layout = strategy, layout, kv_layout
        self._hardware, self._shape = hardware, shape
        self._handle = registered_handle(self.plan, self.group, backend, cuda_graphs=cuda_graphs)
        self._handle_name = f"{self._handle.id}"
        self._shard_handles: dict[ShardExtents, PlanHandle] = {}

    @property
    def mask(self) -> Mask:
        return self.plan.mask

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world(self) -> int:
        return self.group.world

    def with_mask(
        self,
        mask: Mask,
        *,
        strategy: str | Strategy | None = None,
        sides: tuple[Side, Side] = ("q", "kv"),
        layout: Layout | None = None,
        kv_layout: Layout | None = None,
    ) -> ContextParallel:
        """Return a ContextParallel with the same layout and another mask, for layers that differ (full and sliding
        window).

        In a cross-attention, ``sides=("q", "q")`` is the self-attention of its queries, ``("kv", "kv")`` of its keys.
        Pass ``layout``, and ``kv_layout`` if it differs, for layers that have other tokens, such as a prompt before
        those of the sequence; ``sides`` has no effect then.
        """
        if layout is None and kv_layout is not None:
            raise InputError("with_mask takes kv_layout= only together with layout=: pass layout=cp.plan.q_layout for its own")
        layouts = [self._layout(side) for side in sides] if layout is None else [layout, kv_layout or layout]
        if check_mask(mask).lengths != tuple(layout.length for layout in layouts):
            raise InputError(
                f"the mask of with_mask must have the lengths of the layout: {mask.name} has {mask.lengths[0]} queries × "
                f"{mask.lengths[1]} keys, the layout {layouts[0].length} × {layouts[1].length}"
            )
        strategy = self._strategy if strategy is None else strategy
        return self._for_mask(mask, strategy=strategy, layout=layouts[0], kv_layout=layouts[1])

    def prefetch(self, mask: Mask) -> Future[ContextParallel]:
        """Plan the next sequence in a background thread, while this one is computed.

        ::

            for batch in batches:
                upcoming = cp.prefetch(rs.documents(batch.next_lengths))
                ...                                # a step with cp
                cp = upcoming.result()

        Strategy and layout are those given to this object; ``"auto"`` chooses again, for the new mask. Planning needs
        no communication: it is deterministic in the mask and the arguments of this object, which must be equal on all
        ranks. An error in the mask is raised by ``result()``.
        """
        planner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ringspan-plan")
        try:
            layouts = {"layout": self._requested_layout, "kv_layout": self._requested_kv_layout}
            return planner.submit(self._for_mask, mask, strategy=self._strategy, **layouts)
        finally:
            planner.shutdown(wait=False)  # the thread ends when the plan is made

    def _for_mask(self, mask: Mask, **options: Any) -> ContextParallel:
        return ContextParallel(
            self.group,
            mask,
            hardware=self._hardware,
            shape=self._shape,
            dkv_dtype=self.plan.program.dkv_dtype,
            backend=self.backend,
            expect_attention=self.expects_attention,
            cuda_graphs=self.cuda_graphs,
            **options,
        )

    # -- tokens to ranks and back --------------------------------------------------------------------------------------

    @overload
    def shard(self, tree: T, /, *, dim: int, of: Side = "q") -> T: ...

    @overload
    def shard(self, first: T, second: T, /, *others: T, dim: int, of: Side = "q") -> tuple[T, ...]: ...

    @overload
    def shard(self, first: Any, second: Any, /, *others: Any, dim: int, of: Side = "q") -> tuple[Any, ...]: ...

    def shard(self, *trees: Any, dim: int, of: Side = "q") -> Any:
        """Select this rank's tokens from whole sequences, as new tensors.

        ``dim`` is the sequence dim of each tensor; ``of="kv"`` uses the layout of the keys (cross-attention). Arguments
        are tensors and NumPy arrays, or nested lists, tuples, dicts, mappings (``BatchEncoding``) and dataclasses of
        them. Numbers, strings, flags and None in these are returned unchanged. Any other object raises, as it could
        hold tokens. One argument gives one result, several give a tuple.
        """
        n = self._layout(of).length // (self._rows or 1)
        sharded = tuple(map_sequences(lambda x: self._take(x, dim, of), tree, n) for tree in trees)
        return sharded[0] if len(sharded) == 1 else sharded

    def _take(self, x: Tensor, dim: int, of: Side) -> Tensor:
        layout = self._layout(of)
        if x.is_nested:
            raise InputError("a nested tensor cannot be sharded: shard x.values(), with rs.documents(lengths) as the mask")
        if self._rows is not None:
            return mark_layout(take_rows(x, dim, layout, self.rank, self._rows), layout)
        if not -x.ndim <= dim < x.ndim:
            raise InputError(f"dim={dim} is not a dim of a tensor of shape {tuple(x.shape)}")
        if x.shape[dim] != layout.length:
            raise InputError(
                f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.shape[dim]} tokens, but the plan's sequence has "
                f"{layout.length}{self._hint(of, x.shape[dim])}: "
                "shard whole sequences, and give the sequence dim as dim="
            )
        if settings.debug:
            self.tokens_of_ranks.note(x)
        return mark_layout(x.index_select(dim, self.positions(of, device=x.device)), layout)

    @reports_errors("unshard")
    @dynamo_disable
    def unshard(self, x: Tensor, *, dim: int, of: Side = "q", grad: Literal["replicate", "partial"] = "replicate") -> Tensor:
        """Gather the whole sequence on every rank, in its original order. Differentiable.

        ``grad`` says what the gradient of the result is, in the terms of DTensor. ``"replicate"``: the same on all
        ranks, because each computes the same function of the whole sequence. ``"partial"``: a part on each rank, to be
        summed, because each computes another function of it.
        """
        layout = self._layout(of)
        if grad not in ("replicate", "partial"):
            raise InputError(f'grad must be "replicate" or "partial", not {grad!r}')
        if not isinstance(x, Tensor):
            raise InputError(
                f"unshard takes one tensor, of this rank's tokens; got {type(x).__name__}. Call it for each tensor"
            )
        check_layout(x, layout, in_graph=True)
        if settings.strict:
            self.check_graph(x)
        if self._rows is not None:
            rows = lay_end_to_end(x, dim, self._rows, layout.counts[self.rank])
            return stack_rows(Unshard.apply(rows, self.group, layout, 0, grad), dim, self._rows)
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != layout.counts[self.rank]:
            raise InputError(
                f"a tensor of shape {tuple(x.shape)} does not have this rank's {layout.counts[self.rank]} tokens on dim {dim}: "
                "unshard what cp.shard gave"
            )
        if settings.debug:
            compare_layouts(layout, self.group, x.device)
            check_in_use(layout)
        result: Tensor = Unshard.apply(x, self.group, layout, dim, grad)
        return result

    def _hint(self, of: Side, tokens: int) -> str:
        """Return a hint for an error message, if the tensor is of the other sequence of a cross-attention."""
        other: Side = "kv" if of == "q" else "q"
        what = "keys" if other == "kv" else "queries"
        return f" ({tokens} is the number of its {what}: pass of={other!r})" if self._layout(other).length == tokens else ""

    # -- attention -----------------------------------------------------------------------------------------------------

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """Called for ``F.scaled_dot_product_attention`` inside the block; see :func:`ringspan.attention`."""
        self.mark_as_used()
        if self._rows is not None:
            return attend_rows(partial(attend_tensors, self._handle, scale=scale), q, k, v, self._rows).out
        if scale is None and not any_dtensor(q, k, v):  # the common case
            return attend(self._handle, q, k, v).out
        handle = self._handle
        if self._mask_has_predicate and is_dtensor(q):
            from ringspan.frontends.dtensor.offsets import extents_of

            handle = self._shard_handle(extents_of(q), self._handle_name)
        return attend_tensors(handle, q, k, v, scale).out

    def refuse(self, error: Exception) -> None:
        report_error(self.group, "forward", error, plan=self.plan.digest)

    @dynamo_constant
    def _shard_handle(self, extents: ShardExtents, name: str) -> PlanHandle:
        """Return the handle for a shard of batch and heads. ``name`` is that of this object's own handle: Dynamo guards
        on arguments but not on ``self``."""
        if extents not in self._shard_handles:
            self._shard_handles[extents] = registered_handle(self.plan, self.group, self.backend, extents, self.cuda_graphs)
        return self._shard_handles[extents]

    @reports_errors("forward")
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
    ) -> FlexResult:
        """Called for PyTorch's ``flex_attention`` inside the block; see :func:`ringspan.flex_attention`.

        A BlockMask of the whole sequence is planned on this layout when it is first used. Without one the mask is that
        of the block. ``kernel_options`` are ignored.
        """
        self.mark_as_used()
        q, k, v = under_autocast(query, key, value)
        if self._rows is not None:
            if score_mod is not None or block_mask is not None:
                refuse_rows("flex_attention with a score_mod or a block_mask", self.mask)
            request = check_arguments(q, k, enable_gqa=enable_gqa, return_lse=return_lse, return_aux=return_aux)
            return request.select(attend_rows(partial(attend_tensors, self._handle, scale=scale), q, k, v, self._rows))
        made = self.plan if block_mask is None else self._plan_of(block_mask)
        return flex_attention(
            q,
            k,
            v,
            score_mod,
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=return_lse,
            return_aux=return_aux,
            plan=made,
            group=self.group,
            backend=self.backend,
            cuda_graphs=self.cuda_graphs,
        )

    def handle_of(self, block_mask: BlockMask | None) -> PlanHandle:
        """Return a registered handle for a BlockMask of the whole sequence on this layout; for None, that of the
        plan."""
        if block_mask is None:
            return self._handle
        return registered_handle(self._plan_of(block_mask), self.group, self.backend, cuda_graphs=self.cuda_graphs)

    def _plan_of(self, block_mask: BlockMask) -> Plan:
        return plan_of(block_mask, self.plan, self._strategy, hardware=self._hardware, shape=self._shape)

    @reports_errors("forward")
    def varlen_attention(self, call: VarlenCall) -> tuple[Tensor, Tensor]:
        """Called for PyTorch's ``varlen_attn`` inside the block; see :mod:`ringspan.frontends.varlen`."""
        return attend_packed(self._handle, call)

    def checkpoint_context(self, policy: Any = None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For ``checkpoint(f, x, use_reentrant=False, context_fn=cp.checkpoint_context)``: ``f`` runs again in this
        block.

        A checkpoint inside the block does not need it (:mod:`ringspan.frontends.recompute`). For selective
        checkpointing pass ``context_fn=partial(cp.checkpoint_context, policy)``. If the policy saves
        ``torch.ops.ringspan.attend.default``, attention is neither computed nor communicated a second time.
        """
        forward_context, recompute_context = (
            (nullcontext(), nullcontext()) if policy is None else create_selective_checkpoint_contexts(policy)
        )
        return forward_context, _both(self, recompute_context)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Return self: copies of a model share the ContextParallel object."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ContextParallel belongs to one process and its group and cannot be pickled: save cp.plan.to_json(), or make "
            "it again with the same mask, layout and strategy"
        )

    def __repr__(self) -> str:
        return f"<ContextParallel rank {self.rank} of {self.world}: {self.plan!r}>"


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
