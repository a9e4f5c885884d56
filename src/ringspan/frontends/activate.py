"""Another flash attention behind plain ``F.scaled_dot_product_attention``, from ``activate`` to ``restore``.

Nothing is patched: the dispatcher is given another kernel for the operators of SDPA's flash back end, and loses it again. So
everything that comes through the dispatcher follows, on every thread: eager calls, autograd, compiled graphs, those compiled
before included.
"""

from __future__ import annotations

import importlib
import warnings
from typing import cast

from torch.library import Library

from ringspan.errors import UnknownKernel, unknown_name
from ringspan.frontends.flash_operators import Flash, FlashOperators

# name -> the module that is a Flash, imported when it is first asked about. Another implementation is another line.
IMPLEMENTATIONS: dict[str, str] = {"FA4": "ringspan.kernels.fa4"}

# The active one and its kernels, if any: there is one dispatcher in a process, so there is one of these.
_active: dict[str, Library] = {}


def activate(name: str) -> None:
    """Let the flash back end of SDPA run ``name`` until ``restore()``, or until another is activated.

    What cannot be activated raises, and leaves active what was. Inputs that it does not take raise ``KernelError`` when they
    come. Which back end SDPA chooses remains PyTorch's decision; ``torch.nn.attention.sdpa_kernel`` makes it yours.
    """
    flash = _load(name)
    flash.load()
    if name == current():
        return
    library = Library("aten", "IMPL", flash.DISPATCH_KEY)
    with warnings.catch_warnings():
        # PyTorch warns that a kernel of its own is overridden, which is what we were asked for.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for operator, kernel in FlashOperators(name=name, flash=flash).by_name().items():
            library.impl(operator, kernel, allow_override=True)
    restore()  # only now: had anything above failed, the one before would still be active
    _active[name] = library


def restore() -> None:
    """Give the flash back end back what it ran before; nothing happens if nothing is active."""
    _active.clear()  # nobody else holds the library, and its kernels go with it


def current() -> str | None:
    """The name of what is active; None is PyTorch's own."""
    return next(iter(_active), None)


def available() -> list[str]:
    """The names that ``activate`` takes on this machine: those whose package is installed."""
    return [name for name in IMPLEMENTATIONS if _load(name).is_installed()]


def missing() -> dict[str, str]:
    """The names that ``activate`` knows and cannot take on this machine, each with the package to install."""
    return {name: _load(name).PACKAGE for name in IMPLEMENTATIONS if not _load(name).is_installed()}


def _load(name: str) -> Flash:
    if name not in IMPLEMENTATIONS:
        raise UnknownKernel(unknown_name("flash attention", name, [*IMPLEMENTATIONS]))
    return cast(Flash, importlib.import_module(IMPLEMENTATIONS[name]))
