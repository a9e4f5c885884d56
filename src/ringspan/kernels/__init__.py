"""Kernels: attention over a list of bands on one device. They know nothing of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import cast

from ringspan.errors import KernelError, UnknownKernel
from ringspan.kernels.kernel import Gradients, Inputs, Kernel, Part, Saved, wide
from ringspan.kernels.mods import MaskMod, Mods, PlacedMods, ScoreMod, mods_of
from ringspan.kernels.partial import Accumulator, Partial, merge
from ringspan.kernels.sums import Sum
from ringspan.spelling import no_such

# In order of preference; each is imported only when its turn comes.
KERNELS: dict[str, str] = {
    name: f"ringspan.kernels.{name}" for name in ("fa4", "cudnn", "flash", "efficient", "flex", "cpu", "eager", "reference")
}

# Exact everywhere and slow everywhere: taken only by those who ask for it.
ONLY_IF_ASKED = {"reference"}


def check_backend(backend: str) -> None:
    """A name that no kernel has, before there is any tensor that it could be asked about."""
    if backend != "auto" and backend not in KERNELS:
        raise UnknownKernel(no_such("kernel", backend, [*KERNELS, "auto"]))


def pick(backend: str, inputs: Inputs) -> Kernel:
    """The kernel called ``backend``, or for ``"auto"`` the first that can serve. Says why if there is none."""
    check_backend(backend)
    if backend != "auto":
        reason = _load(backend).why_not(inputs)
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
            yield name, kernel.why_not(inputs) or rather_not(inputs)


def _load(name: str) -> Kernel:
    return cast(Kernel, importlib.import_module(KERNELS[name]))


__all__ = [
    "KERNELS",
    "Accumulator",
    "Gradients",
    "Inputs",
    "Kernel",
    "MaskMod",
    "Mods",
    "Part",
    "Partial",
    "PlacedMods",
    "Saved",
    "ScoreMod",
    "Sum",
    "check_backend",
    "merge",
    "mods_of",
    "pick",
    "reasons",
    "wide",
]
