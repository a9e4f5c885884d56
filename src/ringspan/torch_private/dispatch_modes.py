"""The stack of torch dispatch modes of this thread (FakeTensorMode, FlopCounterMode, CommDebugMode, …)."""

from __future__ import annotations

import torch
from torch.utils import _python_dispatch

dispatch_mode_depth = torch._C._len_torch_dispatch_stack
dispatch_mode_stack = _python_dispatch._get_current_dispatch_mode_stack
TorchDispatchMode = _python_dispatch.TorchDispatchMode
