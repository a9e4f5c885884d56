"""Device meshes for the jobs of worker processes, made once in each worker.

Every new mesh has process groups of its own, and each gloo group starts threads that poll until the process ends. A
suite that made a mesh for each test would end up with hundreds of them.
"""

from __future__ import annotations

from functools import cache

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@cache
def cpu_mesh(shape: tuple[int, ...], axes: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=axes)
