"""What calls of attention over a mesh may mean, each as a context that is made once."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ringspan.compat.shard_registry import check_mesh
from ringspan.frontends import ContextParallel
from ringspan.layouts import Layout
from ringspan.masks import causal, full
from ringspan.transports import ProcessGroupTransport

# A batch has one for each of its rows, where a balancer has rearranged each in its own way.
MOST = 256


class Meaning(NamedTuple):
    """How queries and keys lie, whether a query sees later keys, and how these travel."""

    layout: Layout
    kv_layout: Layout
    is_causal: bool
    strategy: str


class Contexts:
    """The contexts of a mesh, for as long as whoever opens blocks over it keeps this: a block, or a module made parallel."""

    def __init__(self, mesh: DeviceMesh) -> None:
        check_mesh(mesh)
        self.mesh, self.group = mesh, ProcessGroupTransport(mesh)
        self._made: dict[Meaning, ContextParallel] = {}

    def get(self, meaning: Meaning) -> ContextParallel:
        made = self._made.get(meaning)
        if made is None:
            layout, kv_layout, is_causal, strategy = meaning
            lengths = layout.length, kv_layout.length
            mask = causal(*lengths, align="start") if is_causal else full(*lengths)
            made = ContextParallel(self.group, mask, strategy=strategy, layout=layout, kv_layout=kv_layout)
            if len(self._made) >= MOST:
                self._made.clear()
            self._made[meaning] = made
        return made
