"""The ContextParallel objects of one mesh, made once for each layout, mask, strategy and dkv_dtype of its
attention calls."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ringspan.compat.meshes import check_mesh
from ringspan.compat.shardings import shardings_of
from ringspan.frontends import ContextParallel
from ringspan.layouts import Layout
from ringspan.masks import causal, full
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
        self._contexts: dict[ContextKey, ContextParallel] = {}

    def get(self, key: ContextKey) -> ContextParallel:
        context = self._contexts.get(key)
        if context is None:
            lengths = key.layout.length, key.kv_layout.length
            mask = causal(*lengths, align="start") if key.is_causal else full(*lengths)
            context = ContextParallel(
                self.group,
                mask,
                strategy=key.strategy,
                layout=key.layout,
                kv_layout=key.kv_layout,
                dkv_dtype=key.dkv_dtype,
            )
            if len(self._contexts) >= MAX_CONTEXTS:
                self._contexts.clear()
            self._contexts[key] = context
        return context
