"""Attention whose mask is what the call says: ``is_causal``, or everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.compat.balancers import Layouts
from ringspan.compat.memory import memory_of, the_one
from ringspan.compat.options import _cp_options
from ringspan.compat.sharding import in_order
from ringspan.errors import InputError
from ringspan.frontends import ContextParallel
from ringspan.frontends.sdpa import AttentionCatcher
from ringspan.layouts import Layout
from ringspan.masks import causal, full
from ringspan.transports import ProcessGroup


class SdpaCall(NamedTuple):
    """The arguments of ``F.scaled_dot_product_attention``, however they were passed."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def row(self, b: int) -> SdpaCall:
        """One row of the batch."""
        return self._replace(query=self.query[b : b + 1], key=self.key[b : b + 1], value=self.value[b : b + 1])


class MaskFromTheCall(AttentionCatcher):
    """Opens, for each call, the block of a :class:`ContextParallel` that has the call's mask; that does the rest.

    ``layouts`` are those of the block's own buffers, by the lengths of their sequences. Without any, they are those of the
    shards that are in use on the mesh. Where there are none of these either, the ranks' tokens are taken to lie in order.
    """

    def __init__(self, mesh: DeviceMesh, layouts: Mapping[int, Layouts]) -> None:
        super().__init__()
        self._group, self._memory = ProcessGroup(mesh), memory_of(mesh)
        self._own = {length: {own} for length, own in layouts.items()}

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not F.scaled_dot_product_attention:
            with ContextParallel(self._group, full(0)):  # the block of any mask refuses other ways to attention by name
                return func(*args, **kwargs)
        call = SdpaCall(*args, **kwargs)
        layouts, kv_layouts = self._layouts(call.query, call.key)
        rows = max(len(layouts), len(kv_layouts))
        if rows == 1:
            return self._attend(call, layouts[0], kv_layouts[0])
        if call.query.ndim != 4 or call.query.shape[0] != rows:
            raise InputError(
                f"the balancer has rearranged each of {rows} rows of the batch in its own way, but the queries have shape "
                f"{tuple(call.query.shape)}: call attention with (batch, heads, tokens, dim) of the whole batch"
            )
        pairs = zip(layouts * (rows // len(layouts)), kv_layouts * (rows // len(kv_layouts)), strict=True)
        return torch.cat([self._attend(call.row(b), *pair) for b, pair in enumerate(pairs)])

    def _attend(self, call: SdpaCall, layout: Layout, kv_layout: Layout) -> Tensor:
        lengths = layout.length, kv_layout.length
        mask = causal(*lengths, align="start") if call.is_causal else full(*lengths)
        with ContextParallel(self._group, mask, strategy=_cp_options.strategy, layout=layout, kv_layout=kv_layout):
            return F.scaled_dot_product_attention(**call._asdict())

    def _layouts(self, query: Tensor, key: Tensor) -> tuple[Layouts, Layouts]:
        itself = self._memory.shard(query), self._memory.shard(key)
        if itself[0] is not None and itself[1] is not None:
            return itself[0], itself[1]
        known = self._own or self._memory.in_use()
        if len(known) == 1:
            (length,) = known
            return the_one(known, length), the_one(known, length)
        # The ranks' tokens together tell which sequence it is. One rank's alone may not, where lengths differ by little.
        counts = self._group.gather_numbers([query.shape[-2], key.shape[-2]], query.device)
        q_counts, kv_counts = zip(*counts, strict=True)
        if not known:
            found = in_order(q_counts), in_order(kv_counts)
            self._memory.keep({layouts[0].length: layouts for layouts in found})
            return found
        return the_one(known, sum(q_counts)), the_one(known, sum(kv_counts))
