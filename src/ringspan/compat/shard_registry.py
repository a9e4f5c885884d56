"""What was sharded over a mesh, and how: so that nobody has to guess what a tensor that comes back was cut from.

Ranks must find the same here at the same time, else some would talk to each other while others do not. So nothing may hang on
when Python's garbage collector happens to come by. The rule:

* What was sharded *last* is in use until something else is sharded, or a block gives its buffers back.
* What was sharded before is in use as well if its shards can still be reached. Whether they can is looked up once after such
  an event (and again where there is doubt which is meant), and garbage that nobody has collected yet does not count.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from ringspan.compat.balancers import Layouts
from ringspan.errors import InputError


class Memory:
    """The layouts in use over one mesh: those of shards that still exist, and those that were used last."""

    def __init__(self) -> None:
        self._shards = WeakTensorKeyDictionary()
        self._last: dict[int, Layouts] = {}
        self._past: dict[int, Layouts] = {}
        self._in_use: dict[int, set[Layouts]] | None = None  # None: to be looked up

    def remember(self, shards: Iterable[tuple[Tensor, Layouts]]) -> None:
        """Shards that are now the user's."""
        made = list(shards)
        self._in_use = None
        self._shards.update(made)
        self._last = {layouts[0].length: layouts for _, layouts in made}
        for length in self._last:
            self._past.pop(length, None)

    def mark(self, x: Tensor, layouts: Layouts | None) -> None:
        """A tensor that has become a shard in place, or (None) whole again."""
        self._in_use = None
        if layouts is None:
            self._shards.pop(x, None)
        else:
            self._shards[x] = layouts

    def keep(self, layouts: Mapping[int, Layouts]) -> None:
        """Layouts that no shard has any more. What was computed from such may still come to be unsharded."""
        self._in_use = None
        self._past |= layouts
        for length in layouts:
            self._last.pop(length, None)

    def in_use(self) -> dict[int, set[Layouts]]:
        """By the length of the whole sequence: the layouts that attention called now may mean."""
        if self._in_use is not None:
            return self._in_use
        last = set(self._last.values())
        if any(layouts not in last for layouts in self._shards.values()):
            gc.collect()  # on another rank it may have been collected already
        found: dict[int, set[Layouts]] = {}
        for layouts in (*last, *self._shards.values()):
            found.setdefault(layouts[0].length, set()).add(layouts)
        if all(len(ways) == 1 for ways in found.values()):
            self._in_use = found
        return found

    def shard(self, x: Tensor) -> Layouts | None:
        """The layouts of a tensor that is itself a shard."""
        layouts: Layouts | None = self._shards.get(x)
        return layouts

    def of(self, x: Tensor, length: int) -> Layouts | None:
        """The layouts of a share of ``length`` tokens that comes to be unsharded. None: nothing was sharded over this mesh."""
        itself = self.shard(x)
        if itself is not None:
            return itself
        found = dict(self.in_use())
        for past, layouts in self._past.items():
            found[past] = found.get(past, set()) | {layouts}
        return the_one(found, length) if found else None


def the_one(found: Mapping[int, set[Layouts]], length: int) -> Layouts:
    """The layouts of a sequence of that length, if there is no doubt."""
    if length not in found:
        lengths = ", ".join(map(str, sorted(found)))
        raise InputError(
            f"the ranks together hold {length} tokens, but what was sharded over this mesh has {lengths}: shard this sequence "
            "too (buffers=, or _context_parallel_shard), say load_balancer= when unsharding, or keep attention that is not "
            "split in `with rs.local_attention():`"
        )
    if len(found[length]) > 1:
        names = " and ".join(sorted("/".join(layout.name for layout in layouts) for layouts in found[length]))
        raise InputError(
            f"sequences of {length} tokens are sharded over this mesh in several ways ({names}), and this tensor does not say "
            "in which: say load_balancer= when unsharding, and drop the shards of one before attention over those of another"
        )
    (layouts,) = found[length]
    return layouts


# By the process group of the mesh and the order in which the mesh counts its ranks.
_memories: WeakKeyDictionary[Any, dict[tuple[int, ...], Memory]] = WeakKeyDictionary()


def memory_of(mesh: DeviceMesh) -> Memory:
    """Equal meshes share theirs: ``mesh["cp"]`` is another object every time."""
    check_mesh(mesh)
    return _memories.setdefault(mesh.get_group(), {}).setdefault(tuple(mesh.mesh.tolist()), Memory())


def check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise InputError(f"a mesh of one axis is needed, as mesh['cp']; this is {mesh!r}")
