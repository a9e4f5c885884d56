"""Find computations in a ``with cp:`` block that need the tokens of other ranks and that the block cannot intercept.

Always: a block that ends without attention raises, if it was never used before or has seen a softmax over this rank's
keys; and so does a function of TorchScript that contains attention, and an embedding of tokens that were sharded by
another layout than that of the block. In strict mode (``rs.strict()``, ``RINGSPAN_DEBUG=1``) the functions of the block
are watched as well: attention written by hand (:mod:`ringspan.frontends.handwritten_attention`), a convolution, a norm
over the sequence and a mean cross-entropy raise. So does a loss, or ``unshard``, of a tensor whose autograd graph has
attention that no block has intercepted (:mod:`ringspan.frontends.graph_attention`). When strict mode is off, only
softmax and embeddings are watched: other functions have no treatment (:mod:`ringspan.frontends.treatments`).
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ringspan.debugging.settings import settings
from ringspan.errors import UnplannedAttention
from ringspan.frontends.attention_block import AttentionMode
from ringspan.frontends.batch_rows import rows_of
from ringspan.frontends.graph_attention import check_graph
from ringspan.frontends.handwritten_attention import USE_RINGSPAN, follow_attention, is_local_softmax, tensors_in
from ringspan.frontends.mixing import check_call
from ringspan.frontends.rank_comparison import TokensOfRanks, check_sharded_by, follow_layout, note_layouts
from ringspan.frontends.recompute import entered_blocks, is_entered_here
from ringspan.frontends.treatments import EMBEDDING, attention_in_script, name_of, treatments
from ringspan.planner import Plan
from ringspan.transports import ProcessGroupTransport

NO_ATTENTION = (
    "no attention was intercepted in this block, so every rank has attended to its own keys only, if at all. The block sees "
    "F.scaled_dot_product_attention, flex_attention, varlen_attn and nn.MultiheadAttention, called in its thread. It does not "
    'see attention that is written as matmul and softmax (as attn_implementation="eager" of transformers does), kernels of '
    f"other packages, and other threads ({USE_RINGSPAN}). If the block is meant to have no attention, give "
    "ContextParallel expect_attention=False"
)

_ESCAPE = "or wrap it in `with rs.local_attention():` if this layer is not part of the split sequence"


class strict:  # noqa: N801 (used as `with strict():`)
    """Watch the functions in ``with cp:`` blocks, and raise for those that silently use this rank's tokens only.

    These are attention written as matmul, softmax and matmul, convolutions and norms over the sequence, and
    ``F.cross_entropy`` with a mean, as in transformers' ``model(labels=...)``. ``cp.mean``, ``cp.sum``,
    ``cp.cross_entropy`` and ``cp.unshard`` also search the autograd graph of their tensor for attention that no block
    has intercepted: outside of the block, or in another thread. Call it once at the start of a program, or use it as a
    context manager. ``rs.strict(False)`` turns it off. ``RINGSPAN_DEBUG=1`` turns it on, too. It is for development: it
    inspects every function call in a block. Compiled code is not watched.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._before = settings.strict
        _set_strict(enabled)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        _set_strict(self._before)


def _set_strict(enabled: bool) -> None:
    if settings.strict != enabled:
        settings.strict = enabled
        treatments.clear()


class WatchedBlock(AttentionMode):
    """A block that raises if it has no attention, and that watches its functions."""

    plan: Plan
    group: ProcessGroupTransport
    tokens_of_ranks: TokensOfRanks
    expects_attention: bool
    _was_used_before = False
    _has_local_softmax = False

    def __enter__(self) -> Self:
        if not torch.compiler.is_dynamo_compiling() and self not in entered_blocks():
            self._was_used_before, self._has_local_softmax = self._was_used_before or self.was_used, False
            self.was_used = False
            if settings.debug:
                self.tokens_of_ranks.compare(self.group)
                note_layouts(self.plan.q_layout, self.plan.kv_layout)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if torch.compiler.is_dynamo_compiling():
            return
        # Functions of torch.cond run in an entry of their own, inside the user's.
        if raised[0] is not None or not self.expects_attention or self.was_used or self in entered_blocks():
            return
        if not self._was_used_before or self._has_local_softmax:  # else: an optimiser step, or a CUDA graph replay
            raise UnplannedAttention(NO_ATTENTION)

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name, local_shape = name_of(func), self._local_shape()
        if is_local_softmax(name, result, local_shape):
            self._has_local_softmax = True
        if settings.strict or name == EMBEDDING:
            self._check_layout_of((args, kwargs), local_shape)
        if settings.strict:
            check_call(name, args, kwargs, local_shape[0], _ESCAPE)
            follow_attention(name, args, kwargs, result, local_shape, _ESCAPE)
            follow_layout(tensors_in((args, kwargs)), tensors_in(result), local_shape)

    def _check_layout_of(self, inputs: Any, local_shape: tuple[int, int]) -> None:
        """Raise if this is the innermost block and an input with this rank's tokens was sharded by another layout."""
        if entered_blocks()[-1:] == [self]:
            layouts = (self.plan.q_layout, self.plan.kv_layout)
            for x in tensors_in(inputs):
                check_sharded_by(x, layouts, local_shape)

    def check_graph(self, x: Tensor) -> None:
        """Raise if x was computed from attention that no block has intercepted. Reads the autograd graph of x."""
        if self.group.world > 1 and not torch.compiler.is_dynamo_compiling():
            check_graph(x, self._local_shape(), _ESCAPE)

    def _local_shape(self) -> tuple[int, int]:
        """Return the numbers of queries and keys of this rank, in each row of the batch."""
        rows = rows_of(self.plan.mask) or 1
        return self.plan.q_rows // rows, self.plan.kv_rows // rows

    def before_script_call(self, name: str, operators: tuple[str, ...]) -> None:
        if not is_entered_here(self) or self._was_absent_in_forward():
            return
        found = attention_in_script(operators)
        if found:
            error = UnplannedAttention(
                f"the TorchScript function {name} contains {found}, which the block cannot see: it would use only the keys of "
                f"this rank. Call the module or function itself, not what torch.jit made of it, {_ESCAPE}"
            )
            self.refuse(error)
            raise error
