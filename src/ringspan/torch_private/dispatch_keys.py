"""The dispatch keys that this thread includes and excludes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

# Read when this module is imported, outside any operator.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


def default_dispatch_keys() -> AbstractContextManager[Any]:
    """Dispatch calls as outside any operator: autograd, vmap and modes are active again inside an operator's kernel."""
    return torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
