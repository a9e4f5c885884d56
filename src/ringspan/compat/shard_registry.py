"""A registry of the tensors that were sharded over a mesh, with their layouts.

``context_parallel_unshard`` and attention receive tensors that were computed from shards. The registry tells them the
layouts. A value of type ``Layouts`` is a tuple: it has one layout for all rows of the batch, or one for each row.

All ranks must get the same layouts at the same call. Otherwise some ranks would communicate while others do not. Therefore
the layouts in use must not depend on when Python's garbage collector runs:

* The layouts of the *latest* sharding are in use until the next sharding. When a ``context_parallel`` context exits, it drops
  those of its own sequence lengths only.
* Layouts of earlier shardings are in use as long as one of their shards is reachable. This is determined once after each
  sharding and each exit of a context, and again at every call while several layouts are in use for one length. Unreachable
  shards are collected first.
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
        self._latest: dict[int, Layouts] = {}  # by sequence length
        self._unshard_only: dict[int, Layouts] = {}  # by sequence length
        self._in_use: dict[int, set[Layouts]] | None = None  # None: not determined yet

    def register_shards(self, shards: Iterable[tuple[Tensor, Layouts]]) -> None:
        """Register the shards of a new sharding, each with its layouts. It becomes the latest sharding."""
        registered = list(shards)
        with self._lock:
            self._in_use = None
            self._shards.update(registered)
            self._latest = {layouts[0].length: layouts for _, layouts in registered}
            for length in self._latest:
                self._unshard_only.pop(length, None)

    def set_layouts_of_buffer(self, x: Tensor, layouts: Layouts | None) -> None:
        """Register that a buffer was sharded in place or, with None, that its whole sequence was restored."""
        with self._lock:
            self._in_use = None
            if layouts is None:
                self._shards.pop(x, None)
            else:
                self._shards[x] = layouts

    def keep_for_unshard_only(self, layouts: Mapping[int, Layouts]) -> None:
        """Stop using these layouts (by sequence length) for attention. Results computed with them can still be unsharded."""
        with self._lock:
            self._in_use = None
            self._unshard_only |= layouts
            for length in layouts:
                self._latest.pop(length, None)

    def in_use(self) -> dict[int, set[Layouts]]:
        """Return the layouts that the tensors of an attention call can have now, by the length of the whole sequence."""
        known = self._in_use
        if known is not None:
            return known
        with self._lock:
            latest = set(self._latest.values())
            if any(layouts not in latest for layouts in self._shards.values()):
                gc.collect()  # another rank may have collected these shards already
            in_use: dict[int, set[Layouts]] = {}
            for layouts in (*latest, *self._shards.values()):
                in_use.setdefault(layouts[0].length, set()).add(layouts)
            if all(len(candidates) == 1 for candidates in in_use.values()):
                self._in_use = in_use
            return in_use

    def layouts_of_shard(self, x: Tensor) -> Layouts | None:
        """Return the layouts of a tensor that is itself a shard, and None for any other tensor."""
        layouts: Layouts | None = self._shards.get(x)
        return layouts

    def layouts_to_unshard(self, x: Tensor, length: int) -> Layouts | None:
        """Return the layouts of a tensor of ``length`` tokens over all ranks, or None if nothing was sharded over this mesh."""
        own = self.layouts_of_shard(x)
        if own is not None:
            return own
        with self._lock:
            candidates = dict(self.in_use())
            for other_length, layouts in self._unshard_only.items():
                candidates[other_length] = candidates.get(other_length, set()) | {layouts}
        return only_layouts_of_length(candidates, length) if candidates else None


def only_layouts_of_length(candidates: Mapping[int, set[Layouts]], length: int) -> Layouts:
    """Return the only layouts for sequences of that length. Raises an error if there are none or several."""
    if length not in candidates:
        lengths = ", ".join(map(str, sorted(candidates)))
        raise InputError(
            f"the ranks together have {length} tokens, but the sequences sharded over this mesh have {lengths}: shard this "
            "sequence too (buffers=, or _context_parallel_shard), give load_balancer= when unsharding, or put attention that "
            "is not split in `with rs.local_attention():`"
        )
    if len(candidates[length]) > 1:
        names = " and ".join(sorted("/".join(layout.name for layout in layouts) for layouts in candidates[length]))
        raise InputError(
            f"sequences of {length} tokens are sharded over this mesh in several ways ({names}), and this tensor can be of "
            "any: give load_balancer= when unsharding, and delete the shards of one before attention over those of another"
        )
    (layouts,) = candidates[length]
    return layouts


# Keyed by the process group of the mesh and by its global ranks, because mesh["cp"] is a new object each time.
_registries: WeakKeyDictionary[Any, dict[tuple[int, ...], ShardRegistry]] = WeakKeyDictionary()


def registry_of(mesh: DeviceMesh) -> ShardRegistry:
    """Return the registry of a mesh. Equal meshes share one."""
    check_mesh(mesh)
    return _registries.setdefault(mesh.get_group(), {}).setdefault(tuple(mesh.mesh.tolist()), ShardRegistry())


def check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise InputError(f"a mesh of one axis is needed, such as mesh['cp']; got {mesh!r}")
