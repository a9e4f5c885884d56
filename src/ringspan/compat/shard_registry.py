"""Which tensors were sharded over a mesh, and by which layouts.

``context_parallel_unshard`` and attention receive tensors that were computed from shards. The registry tells them the
layout. All ranks must get the same answer at the same call, or some would communicate while others do not. So the
answer must not depend on when Python's garbage collector runs:

* The layouts of the *latest* sharding are in use until the next sharding, or until a block restores its buffers.
* Layouts of earlier shardings are in use as long as a shard of theirs is reachable. This is determined once after each
  of these events, and again while it is ambiguous which layout is meant. Unreachable shards are collected first.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from ringspan.compat.balancers import Layouts
from ringspan.errors import InputError


class ShardRegistry:
    """The layouts in use over one mesh: those of reachable shards and those of the latest sharding. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: gc.collect() can run a finalizer that uses the registry
        self._shards = WeakTensorKeyDictionary()
        self._latest: dict[int, Layouts] = {}  # by sequence length, like _retired
        self._retired: dict[int, Layouts] = {}
        self._in_use: dict[int, set[Layouts]] | None = None  # None: to be determined

    def record(self, shards: Iterable[tuple[Tensor, Layouts]]) -> None:
        """Record a new sharding: its shards, each with its layouts."""
        recorded = list(shards)
        with self._lock:
            self._in_use = None
            self._shards.update(recorded)
            self._latest = {layouts[0].length: layouts for _, layouts in recorded}
            for length in self._latest:
                self._retired.pop(length, None)

    def mark(self, x: Tensor, layouts: Layouts | None) -> None:
        """Record that a tensor became a shard in place, or (None) whole again."""
        with self._lock:
            self._in_use = None
            if layouts is None:
                self._shards.pop(x, None)
            else:
                self._shards[x] = layouts

    def retire(self, layouts: Mapping[int, Layouts]) -> None:
        """Layouts that attention no longer uses. Results computed with them can still be unsharded."""
        with self._lock:
            self._in_use = None
            self._retired |= layouts
            for length in layouts:
                self._latest.pop(length, None)

    def in_use(self) -> dict[int, set[Layouts]]:
        """The layouts that an attention call can mean now, by the length of the whole sequence."""
        known = self._in_use
        if known is not None:
            return known
        with self._lock:
            latest = set(self._latest.values())
            if any(layouts not in latest for layouts in self._shards.values()):
                gc.collect()  # another rank may have collected these shards already
            found: dict[int, set[Layouts]] = {}
            for layouts in (*latest, *self._shards.values()):
                found.setdefault(layouts[0].length, set()).add(layouts)
            if all(len(candidates) == 1 for candidates in found.values()):
                self._in_use = found
            return found

    def layouts_of_shard(self, x: Tensor) -> Layouts | None:
        """The layouts of a tensor that is itself a shard; None for any other tensor."""
        layouts: Layouts | None = self._shards.get(x)
        return layouts

    def layouts_to_unshard(self, x: Tensor, length: int) -> Layouts | None:
        """The layouts of a tensor of ``length`` tokens over all ranks. None: nothing was sharded over this mesh."""
        own = self.layouts_of_shard(x)
        if own is not None:
            return own
        with self._lock:
            found = dict(self.in_use())
            for retired, layouts in self._retired.items():
                found[retired] = found.get(retired, set()) | {layouts}
        return unambiguous(found, length) if found else None


def unambiguous(found: Mapping[int, set[Layouts]], length: int) -> Layouts:
    """The only layouts found for sequences of that length. Raises if there are none or several."""
    if length not in found:
        lengths = ", ".join(map(str, sorted(found)))
        raise InputError(
            f"the ranks together hold {length} tokens, but the sequences sharded over this mesh have {lengths}: shard this "
            "sequence too (buffers=, or _context_parallel_shard), give load_balancer= when unsharding, or put attention that "
            "is not split in `with rs.local_attention():`"
        )
    if len(found[length]) > 1:
        names = " and ".join(sorted("/".join(layout.name for layout in layouts) for layouts in found[length]))
        raise InputError(
            f"sequences of {length} tokens are sharded over this mesh in several ways ({names}), and this tensor can be of "
            "any: give load_balancer= when unsharding, and delete the shards of one before attention over those of another"
        )
    (layouts,) = found[length]
    return layouts


# By the process group of the mesh and the order of its ranks: mesh["cp"] is a new object each time.
_registries: WeakKeyDictionary[Any, dict[tuple[int, ...], ShardRegistry]] = WeakKeyDictionary()


def registry_of(mesh: DeviceMesh) -> ShardRegistry:
    """The registry of a mesh. Equal meshes share one."""
    check_mesh(mesh)
    return _registries.setdefault(mesh.get_group(), {}).setdefault(tuple(mesh.mesh.tolist()), ShardRegistry())


def check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise InputError(f"a mesh of one axis is needed, such as mesh['cp']; got {mesh!r}")
