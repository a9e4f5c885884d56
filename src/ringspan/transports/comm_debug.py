"""Torch's ``CommDebugMode`` counts sends and receives of exchanges.

The mode counts the operators in its ``comm_registry``, which has collectives only.
"""

from __future__ import annotations

import torch

from ringspan.torch_private.dispatch_modes import dispatch_mode_depth, dispatch_mode_stack


def count_messages_in_comm_debug_mode() -> None:
    """Add the operators of sends and receives to the registry of each CommDebugMode of this thread.

    From then on the mode counts the program's own sends and receives, too.
    """
    if dispatch_mode_depth() == 0:
        return
    for mode in dispatch_mode_stack():
        if type(mode).__name__ == "CommDebugMode":  # importing the class would import all of DTensor
            mode.comm_registry |= {torch.ops.c10d.send, torch.ops.c10d.recv_}  # type: ignore[attr-defined]
