"""The kernels by name, and the choice of one for the inputs of a call.

In order of preference:

    ==========  ======================================================  =========================================
    name        what it is                                              ``"auto"`` takes it
    ==========  ======================================================  =========================================
    fa4         FlashAttention-4, the package flash-attn-4              if installed
    cudnn       cuDNN's attention, part of PyTorch                      unless the mask has windows or documents
    flash       FlashAttention-2, part of PyTorch
    efficient   memory-efficient attention, part of PyTorch
    flex        FlexAttention, compiled by Triton                       if Triton is installed
    flex_flash  FlexAttention, compiled into FlashAttention-4           never
    cpu         PyTorch's flash attention for CPUs
    eager       plain operations, block of rows by block of rows        only for a ``score_mod`` or ``mask_mod``
    reference   dense attention in float64                              never
    ==========  ======================================================  =========================================

``"auto"`` takes the first available kernel in this order that supports the inputs. flex_flash and reference are used
only when named: the first is experimental in PyTorch, the second is slow.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import cast

from ringspan.caching.by_digest import cache_by_digest
from ringspan.errors import KernelError, UnknownKernel, unknown_name
from ringspan.kernels.kernel import Inputs, Kernel

# name -> module, in order of preference. A module is imported when it is first considered.
KERNELS: dict[str, str] = {
    name: f"ringspan.kernels.{name}"
    for name in ("fa4", "cudnn", "flash", "efficient", "flex", "flex_flash", "cpu", "eager", "reference")
}

# Not considered by "auto" at all. flex_flash is considered, and says why it is skipped.
ONLY_BY_NAME = {"reference"}


def check_backend(backend: str) -> None:
    """Raise ``UnknownKernel`` if there is no kernel of this name."""
    if not isinstance(backend, str) or backend not in (*KERNELS, "auto"):
        raise UnknownKernel(unknown_name("kernel", backend, [*KERNELS, "auto"]))


def select_kernel(backend: str, inputs: Inputs) -> Kernel:
    """Return the kernel called ``backend``, or the one that ``"auto"`` takes.

    The ``KernelError`` says why there is none.
    """
    check_backend(backend)
    if backend != "auto":
        reason = _unavailable_reason(_load(backend), inputs)
        if reason:
            raise KernelError(f'backend="{backend}" {reason}; use backend="auto" to have one chosen')
        return _load(backend)
    rejected = []
    for name, reason in availability(inputs):
        if reason is None:
            return _load(name)
        rejected.append(f"{name} {reason}")
    raise KernelError(
        f"no fast kernel can serve {inputs.dtype} on {inputs.device}: {'; '.join(rejected)}. "
        f'backend="reference" is exact on any device, dense and slow'
    )


def availability(inputs: Inputs) -> Iterator[tuple[str, str | None]]:
    """Yield the kernels that ``"auto"`` considers, in order, each with the reason why it is not taken, or None."""
    for name in KERNELS:
        if name not in ONLY_BY_NAME:
            kernel = _load(name)
            auto_skip_reason = getattr(kernel, "auto_skip_reason", lambda _: None)
            yield name, _unavailable_reason(kernel, inputs) or auto_skip_reason(inputs)


def missing_packages(inputs: Inputs) -> dict[str, str]:
    """Return the kernels that support these inputs but need a package that is not installed, each with that package."""
    supporting = {name: kernel for name in KERNELS if (kernel := _load(name)).unsupported_reason(inputs) is None}
    return {name: package for name, kernel in supporting.items() if (package := _missing_package(kernel))}


def _unavailable_reason(kernel: Kernel, inputs: Inputs) -> str | None:
    reason = kernel.unsupported_reason(inputs)
    if reason is None and (package := _missing_package(kernel)):
        return f"needs a package that is not installed: pip install {package}"
    return reason


def _missing_package(kernel: Kernel) -> str | None:
    is_installed = getattr(kernel, "is_installed", lambda: True)
    return None if is_installed() else kernel.PACKAGE


def _load(name: str) -> Kernel:
    return cast(Kernel, _import(KERNELS[name]))


# import_module takes a microsecond even for a module that is already imported, and _load runs in every call.
_import = cache_by_digest(64, plain=True)(importlib.import_module)
