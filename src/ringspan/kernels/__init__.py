"""Kernels: attention over a list of bands on one device. They know nothing of ranks, plans or transports.

:mod:`~ringspan.kernels.kernel` defines what a kernel is, :mod:`~ringspan.kernels.registry` lists them in order of
preference, :mod:`~ringspan.kernels.partial` merges partial results and :mod:`~ringspan.kernels.accumulators` collects
them.
"""

from __future__ import annotations

from ringspan.kernels.accumulators import OutputAccumulator
from ringspan.kernels.gradient_accumulator import GradientAccumulator, ReceivedRows
from ringspan.kernels.kernel import Gradients, Inputs, Kernel, PartialRows, Saved, accumulation_dtype, kernel_name
from ringspan.kernels.max_logits import max_logits
from ringspan.kernels.mods import IndexedMods, MaskMod, Mods, ScoreMod, mods_of
from ringspan.kernels.partial import Partial, merge
from ringspan.kernels.registry import KERNELS, availability, check_backend, missing_packages, select_kernel

__all__ = [
    "KERNELS",
    "GradientAccumulator",
    "Gradients",
    "IndexedMods",
    "Inputs",
    "Kernel",
    "MaskMod",
    "Mods",
    "OutputAccumulator",
    "Partial",
    "PartialRows",
    "ReceivedRows",
    "Saved",
    "ScoreMod",
    "accumulation_dtype",
    "availability",
    "check_backend",
    "kernel_name",
    "max_logits",
    "merge",
    "missing_packages",
    "mods_of",
    "select_kernel",
]
