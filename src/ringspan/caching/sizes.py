"""Estimate how much memory a cached result holds, so that caches can be bounded by bytes."""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

# At most this many objects of a result are counted. The size of a larger result is underestimated.
MAX_OBJECTS = 100_000
SIMPLE = (int, float, str, bytes, bool, type(None))


def approximate_bytes(result: object) -> int:
    """Estimate the memory of plain data: numbers, containers, dataclasses, arrays and tensors. Other objects count little.

    An object that is referred to twice counts once.

    >>> approximate_bytes(np.zeros(1000))
    8112
    """
    total, seen, stack = 0, set[int](), [result]
    while stack and len(seen) < MAX_OBJECTS:
        x: Any = stack.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        total += sys.getsizeof(x, 64)
        if isinstance(x, SIMPLE):
            continue
        if isinstance(x, torch.Tensor):
            total += x.nbytes
        elif isinstance(x, np.ndarray):
            if x.base is not None:
                stack.append(x.base)
        elif isinstance(x, tuple | list | set | frozenset):
            stack.extend(x)
        elif isinstance(x, dict):
            stack.extend(x.keys())
            stack.extend(x.values())
        elif is_dataclass(x) and not isinstance(x, type):
            stack.extend(getattr(x, f.name, None) for f in fields(x))
            stack.extend(getattr(x, "__dict__", {}).values())
    return total
