"""The mesh of a call, and the ``context_parallel`` blocks that the current thread has open over it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ringspan.compat.balancers import Layouts
from ringspan.errors import InputError


def check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise InputError(f"a mesh of one axis is needed, such as mesh['cp']; got {mesh!r}")


# The layouts of a block's buffers and of the blocks around it, by sequence length.
BlockLayouts = Mapping[int, Layouts]


class _OpenBlocks(threading.local):
    """Blocks are torch function modes, which belong to the thread that entered them."""

    def __init__(self) -> None:
        self.stack: list[tuple[tuple[Any, ...], BlockLayouts]] = []


_blocks = _OpenBlocks()


def innermost_block(mesh: DeviceMesh) -> BlockLayouts | None:
    """Return the layouts of the innermost block that this thread has open over the mesh. None: there is no block."""
    if not _blocks.stack:
        return None
    key = _key(mesh)
    return next((layouts for other, layouts in reversed(_blocks.stack) if other == key), None)


def open_block(mesh: DeviceMesh, layouts: BlockLayouts) -> None:
    """Open a block in this thread, with these layouts."""
    _blocks.stack.append((_key(mesh), layouts))


def close_block() -> None:
    """Close the block that this thread has opened last."""
    _blocks.stack.pop()


def _key(mesh: DeviceMesh) -> tuple[Any, ...]:
    # mesh["cp"] is a new object each time.
    return (mesh.get_group(), *mesh.mesh.tolist())
