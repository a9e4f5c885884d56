"""The arguments ``group=`` (a process group, a mesh of one axis, or None for all processes) and ``timeout=``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringspan.errors import InputError

DESTROYED = "the process group was destroyed: make a ContextParallel, or a transport, for a new group"


def group_and_ranks(group: dist.ProcessGroup | DeviceMesh | None) -> tuple[dist.ProcessGroup, list[int]]:
    """Return the process group, and the global ranks of its members in the order of a mesh or of the group."""
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "torch.distributed is not initialised: start with torchrun and call dist.init_process_group(), "
            "or use ringspan.LocalWorld(n), which needs no processes"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            axes = " and ".join(map(repr, group.mesh_dim_names)) if group.mesh_dim_names else f"{group.ndim} axes"
            raise InputError(f"a mesh of one axis is needed, this one has {axes}: pass mesh[axis], as in mesh['cp']")
        return group.get_group(), group.mesh.tolist()
    # new_group returns an integer instead of a group to processes that are not members.
    given: Any = dist.group.WORLD if group is None else group
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError(f"global rank {dist.get_rank()} is not a member of this group")
    if not isinstance(given, dist.ProcessGroup):
        raise InputError(f"group must be a process group, a one-axis DeviceMesh, or None for all processes; not {group!r}")
    try:
        return given, dist.get_process_group_ranks(given)
    except KeyError:
        raise InputError(DESTROYED) from None


def is_destroyed(group: dist.ProcessGroup | None) -> bool:
    """Return whether ``destroy_process_group`` has ended the group. None: nothing holds it any more."""
    if group is None:
        return True
    try:
        dist.get_backend(group)
    except (AssertionError, RuntimeError, ValueError):
        return True
    return False


def time_limit(seconds: float | None) -> timedelta | None:
    """Return the argument ``timeout=`` as a time."""
    if seconds is not None and not 0 < seconds < 1e9:
        raise InputError(f"timeout must be a positive number of seconds, or None for that of the group; not {seconds!r}")
    return None if seconds is None else timedelta(seconds=seconds)
