"""Run another flash attention behind plain ``F.scaled_dot_product_attention``: ``rs.sdpa``.

    rs.sdpa.available()           # ["FA4"]: what is installed on this machine
    rs.sdpa.activate("FA4")       # SDPA's flash backend now runs FlashAttention-4
    rs.sdpa.current()             # "FA4"
    rs.sdpa.restore()             # PyTorch's own kernel again

The same functions are available as ``rs.activate``, ``rs.restore``, ``rs.current`` and ``rs.available``. They need no
plan, no process group and no block.

No function is patched. ``activate`` registers another kernel with the dispatcher for the operators of SDPA's flash back
end, and ``restore`` removes it. So every call that goes through the dispatcher uses it, in all threads: eager calls,
autograd, and compiled programs, including those compiled before.
"""

from __future__ import annotations

import importlib
import warnings
from typing import cast

from torch.library import Library

from ringspan.errors import UnknownKernel, unknown_name
from ringspan.frontends.flash_operators import Flash, FlashOperators

__all__ = ["activate", "available", "current", "missing", "restore"]

# name -> the module that implements Flash, imported when it is first used.
IMPLEMENTATIONS: dict[str, str] = {"FA4": "ringspan.kernels.fa4"}

# The active implementation, if any, and its registered kernels. A process has one dispatcher, so it has one of these.
_active: dict[str, Library] = {}


def activate(name: str) -> None:
    """Let the flash backend of SDPA run ``name`` until ``restore()``, or until another is activated.

    If it cannot be activated, this raises and the active implementation stays active. Calls with inputs that it does
    not support raise ``KernelError``. PyTorch still chooses SDPA's backend; ``torch.nn.attention.sdpa_kernel`` forces
    the flash backend.
    """
    flash = _load(name)
    flash.load()
    if name == current():
        return
    library = Library("aten", "IMPL", flash.DISPATCH_KEY)
    with warnings.catch_warnings():
        # PyTorch warns that one of its own kernels is overridden, which is the purpose here.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for operator, kernel in FlashOperators(name=name, flash=flash).by_name().items():
            library.impl(operator, kernel, allow_override=True)
    restore()  # not earlier: if anything above raises, the previous implementation is still active
    _active[name] = library


def restore() -> None:
    """Let the flash backend run PyTorch's own kernel again. Does nothing if no implementation is active."""
    _active.clear()  # the only reference to the library: its kernels are unregistered with it


def current() -> str | None:
    """Return the name of the active implementation, or None for PyTorch's own."""
    return next(iter(_active), None)


def available() -> list[str]:
    """Return the names that ``activate`` takes on this machine: those whose package is installed."""
    return [name for name in IMPLEMENTATIONS if _load(name).is_installed()]


def missing() -> dict[str, str]:
    """Return the names that ``activate`` would take if their package were installed: name -> package."""
    return {name: _load(name).PACKAGE for name in IMPLEMENTATIONS if not _load(name).is_installed()}


def _load(name: str) -> Flash:
    if name not in IMPLEMENTATIONS:
        raise UnknownKernel(unknown_name("flash attention", name, [*IMPLEMENTATIONS]))
    return cast(Flash, importlib.import_module(IMPLEMENTATIONS[name]))
