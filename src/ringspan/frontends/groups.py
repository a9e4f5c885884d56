"""The argument ``group=`` of the public API, and ``over=``, which may be a mesh of several axes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringspan.transports import ProcessGroupTransport, as_transport

Group = ProcessGroupTransport | dist.ProcessGroup | DeviceMesh | None


def groups_of(over: Group) -> list[ProcessGroupTransport]:
    """Return the groups to sum over, one after the other: one for each axis of a mesh."""
    if isinstance(over, DeviceMesh) and over.ndim > 1:
        return [ProcessGroupTransport(over.get_group(axis)) for axis in range(over.ndim)]
    return [as_transport(over)]
