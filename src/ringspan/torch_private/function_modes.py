"""The stack of torch function modes of this thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

# Context managers: no mode and no ``__torch_function__`` of a subclass is called; or no subclass's; or both are, again.
disable_torch_function = torch._C.DisableTorchFunction
disable_subclass_torch_function = torch._C.DisableTorchFunctionSubclass
enable_torch_function = torch._C._EnableTorchFunction

function_mode_depth = torch._C._len_torch_function_stack
# (n) -> the n-th mode of this thread; the innermost is the last.
function_mode_at = torch._C._get_function_stack_at
_pop_mode = overrides._pop_mode_temporarily


@contextmanager
def without_modes(down_to: TorchFunctionMode | None = None) -> Iterator[None]:
    """Remove all modes, or the innermost ones down to and including this one, while the context is open.

    They are removed rather than disabled, since Dynamo traces into modes that are on the stack.
    """
    with ExitStack() as removed:
        while function_mode_depth():
            mode = removed.enter_context(_pop_mode())
            if mode is down_to:
                break
        yield
