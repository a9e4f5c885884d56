"""Kernels: attention over a list of bands on one device. They know nothing of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import cast

from ringspan.caching.by_digest import cache_by_digest
from ringspan.errors import KernelError, UnknownKernel, unknown_name
from ringspan.kernels.accumulators import GradientAccumulator, OutputAccumulator
from ringspan.kernels.kernel import Gradients, Inputs, Kernel, Part, Saved, wide
from ringspan.kernels.mods import MaskMod, Mods, PlacedMods, ScoreMod, mods_of
from ringspan.kernels.partial import Partial, merge

# In order of preference; each is imported only when its turn comes.
KERNELS: dict[str, str] = {
    name: f"ringspan.kernels.{name}"
    for name in ("fa4", "cudnn", "flash", "efficient", "flex", "flex_flash", "cpu", "eager", "reference")
}

# Exact everywhere and slow everywhere: taken only by those who ask for it.
ONLY_IF_ASKED = {"reference"}


def check_backend(backend: str) -> None:
    """A name that no kernel has, before there is any tensor that it could be asked about."""
    if not isinstance(backend, str) or backend not in (*KERNELS, "auto"):
        raise UnknownKernel(unknown_name("kernel", backend, [*KERNELS, "auto"]))


def pick(backend: str, inputs: Inputs) -> Kernel:
    """The kernel called ``backend``, or for ``"auto"`` the first that can serve. Says why if there is none."""
    check_backend(backend)
    if backend != "auto":
        reason = _why_not(_load(backend), inputs)
        if reason:
            raise KernelError(f'backend="{backend}" {reason}; use backend="auto" to have one chosen')
        return _load(backend)
    said = []
    for name, reason in reasons(inputs):
        if reason is None:
            return _load(name)
        said.append(f"{name} {reason}")
    raise KernelError(
        f"no fast kernel can serve {inputs.dtype} on {inputs.device}: {'; '.join(said)}. "
        f'backend="reference" is exact on any device, dense and slow'
    )


def reasons(inputs: Inputs) -> Iterator[tuple[str, str | None]]:
    """What each kernel that ``"auto"`` may choose says of these inputs, in order of preference; None: it can serve."""
    for name in KERNELS:
        if name not in ONLY_IF_ASKED:
            kernel = _load(name)
            rather_not = getattr(kernel, "rather_not", lambda _: None)
            yield name, _why_not(kernel, inputs) or rather_not(inputs)


def lacking(inputs: Inputs) -> dict[str, str]:
    """The kernels that could serve these inputs if their package were installed, each with that package."""
    able = {name: kernel for name in KERNELS if (kernel := _load(name)).why_not(inputs) is None}
    return {name: package for name, kernel in able.items() if (package := _missing(kernel))}


def _why_not(kernel: Kernel, inputs: Inputs) -> str | None:
    reason = kernel.why_not(inputs)
    if reason is None and (package := _missing(kernel)):
        return f"needs a package that is not installed: pip install {package}"
    return reason


def _missing(kernel: Kernel) -> str | None:
    is_installed = getattr(kernel, "is_installed", lambda: True)
    return None if is_installed() else kernel.PACKAGE


def _load(name: str) -> Kernel:
    return cast(Kernel, _imported(KERNELS[name]))


# importlib takes a microsecond even for a module that is already imported.
_imported = cache_by_digest(64, plain=True)(importlib.import_module)


__all__ = [
    "KERNELS",
    "GradientAccumulator",
    "Gradients",
    "Inputs",
    "Kernel",
    "MaskMod",
    "Mods",
    "OutputAccumulator",
    "Part",
    "Partial",
    "PlacedMods",
    "Saved",
    "ScoreMod",
    "check_backend",
    "lacking",
    "merge",
    "mods_of",
    "pick",
    "reasons",
    "wide",
]
