"""The mesh of a call, and the ``context_parallel`` blocks that the current thread has open over it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ringspan.compat.balancers import Layouts
from ringspan.errors import InputError


def check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise InputError(f"a mesh of one axis is needed, such as mesh['cp']; got {mesh!r}")


class OpenBlock(NamedTuple):
    """The layouts of a block's buffers and of the blocks around it, by sequence length.

    ``opened`` is the number of calls of ``_context_parallel_shard`` before the block was opened.
    """

    layouts: Mapping[int, Layouts]
    opened: int


class _OpenBlocks(threading.local):
    """Blocks are torch function modes, which belong to the thread that entered them."""

    def __init__(self) -> None:
        self.stack: list[tuple[tuple[Any, ...], OpenBlock]] = []


_blocks = _OpenBlocks()


def innermost_block(mesh: DeviceMesh) -> OpenBlock | None:
    """Return the innermost block that this thread has open over the mesh, or None."""
    if not _blocks.stack:
        return None
    key = _key(mesh)
    return next((block for other, block in reversed(_blocks.stack) if other == key), None)


@contextmanager
def opened(mesh: DeviceMesh, layouts: Mapping[int, Layouts], serial: int) -> Iterator[None]:
    """Open a block with these layouts, in addition to those of the enclosing block over the mesh."""
    outer = innermost_block(mesh)
    block = OpenBlock({**(outer.layouts if outer else {}), **layouts}, serial)
    _blocks.stack.append((_key(mesh), block))
    try:
        yield
    finally:
        _blocks.stack.pop()


def _key(mesh: DeviceMesh) -> tuple[Any, ...]:
    # mesh["cp"] is a new object each time.
    return (mesh.get_group(), *mesh.mesh.tolist())
