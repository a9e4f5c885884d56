"""The ContextParallel objects of one mesh, made once for each layout, mask, strategy and dkv_dtype of its
attention calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ringspan.compat.meshes import check_mesh
from ringspan.compat.shardings import shardings_of
from ringspan.frontends import ContextParallel
from ringspan.layouts import Layout, by_rows
from ringspan.masks import Mask, causal, full, per_row
from ringspan.plans.data import DkvDtype
from ringspan.transports import ProcessGroupTransport

# A batch needs one context for each row if a balancer orders every row differently.
MAX_CONTEXTS = 256


class ContextKey(NamedTuple):
    """Everything that distinguishes the contexts of a mesh."""

    layout: Layout
    kv_layout: Layout
    is_causal: bool
    strategy: str
    dkv_dtype: DkvDtype


class ContextCache:
    """Lives as long as its owner: one ``context_parallel`` block, or one module with a ``_ContextParallel`` style."""

    def __init__(self, mesh: DeviceMesh) -> None:
        check_mesh(mesh)
        self.mesh, self.group = mesh, ProcessGroupTransport(mesh)
        self.shardings = shardings_of(mesh.get_group())
        self._contexts: dict[Any, ContextParallel] = {}

    def get(self, key: ContextKey) -> ContextParallel:
        """Return the context of one mask and one layout for all rows of the batch."""

        def make() -> ContextParallel:
            lengths = key.layout.length, key.kv_layout.length
            return ContextParallel(
                self.group,
                causal(*lengths, align="start") if key.is_causal else full(*lengths),
                strategy=key.strategy,
                layout=key.layout,
                kv_layout=key.kv_layout,
                dkv_dtype=key.dkv_dtype,
            )

        return self._get(key, make)

    def of_batch(
        self, masks: Sequence[Mask], pairs: Sequence[tuple[Layout, Layout]], strategy: str, dkv_dtype: DkvDtype
    ) -> ContextParallel:
        """Return the context of a batch whose rows have these masks, and these layouts of queries and keys: one pair
        for all rows, or one for each."""

        def make() -> ContextParallel:
            mask, of_rows = per_row(masks), [*pairs] * (len(masks) // len(pairs))
            layout, kv_layout = (by_rows(layouts, mask, self.group.world) for layouts in zip(*of_rows, strict=True))
            return ContextParallel(self.group, mask, strategy=strategy, layout=layout, kv_layout=kv_layout, dkv_dtype=dkv_dtype)

        return self._get((tuple(mask.digest for mask in masks), tuple(pairs), strategy, dkv_dtype), make)

    def _get(self, key: Any, make: Callable[[], ContextParallel]) -> ContextParallel:
        context = self._contexts.get(key)
        if context is None:
            context = make()
            if len(self._contexts) >= MAX_CONTEXTS:
                self._contexts.clear()
            self._contexts[key] = context
        return context
