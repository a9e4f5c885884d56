"""The mesh of a call, and the ``context_parallel`` blocks that the current task has entered over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ringspan.compat.balancers import Layouts
from ringspan.errors import InputError
from ringspan.frontends.recompute import blocks_of_task


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless the mesh has one axis."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise InputError(f"a mesh of one axis is needed, such as mesh['cp']; got {mesh!r}")


# The layouts of a block's buffers and of the blocks around it, by sequence length.
BlockLayouts = Mapping[int, Layouts]


class MeshBlock:
    """A block that gives layouts to the sequences of a mesh."""

    mesh_key: tuple[Any, ...]
    layouts: BlockLayouts


def innermost_block(mesh: DeviceMesh) -> BlockLayouts | None:
    """Return the layouts of the innermost block that this task has entered over the mesh; None if there is no block."""
    blocks = blocks_of_task(MeshBlock)
    if not blocks:
        return None
    key = mesh_key(mesh)
    return next((block.layouts for block in reversed(blocks) if block.mesh_key == key), None)


def mesh_key(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return what identifies a mesh: ``mesh["cp"]`` is a new object each time."""
    return (mesh.get_group(), *mesh.mesh.tolist())
