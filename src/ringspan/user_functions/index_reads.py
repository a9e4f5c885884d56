"""Find out whether a ``mask_mod(b, h, q, k)`` reads the index of the batch or of the head.

A function that ignores ``b`` and ``h`` has one mask for the whole batch and all heads. Two checks decide, and either
one is enough to count an index as read:

1. The function is called once with tensors that record every access. Only a list of accesses that cannot reveal the
   value (``b.shape``, ``b.new_ones(…)``) does not count.
2. It is called for a sample of pairs with other indices, and the results are compared. This finds reads that PyTorch
   does not report, such as those of a C++ extension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.errors import MaskError
from ringspan.torch_private.function_modes import disable_subclass_torch_function
from ringspan.torch_private.pytree import tree_leaves
from ringspan.user_functions.captures import captured_tensors

# Methods and attributes of a tensor that do not depend on its values.
_VALUELESS_METHODS = {
    *("new_ones", "new_zeros", "new_full", "new_empty", "new_tensor", "ones_like", "zeros_like", "full_like", "empty_like"),
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous"),
}
_VALUELESS_ATTRIBUTES = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "is_cuda",
    "is_cpu",
    "itemsize",
    "nbytes",
}

# The second check calls the function for this many queries, and as many keys.
SAMPLED = 32


class InputsRead(NamedTuple):
    """What a function reads besides the indices of a pair."""

    batch: bool
    heads: bool
    captured: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        """The device to call the function on: that of its tensors."""
        return next((x.device for x in self.captured if x.device.type != "cpu"), torch.device("cpu"))


def inputs_read(function: Callable[..., Any], lengths: tuple[int, int]) -> InputsRead:
    """Find what the function reads. It must be callable for every pair of these lengths."""
    b, h = (torch.tensor(0).as_subclass(_RecordingIndex) for _ in range(2))
    q, k = torch.zeros(2, dtype=torch.int64).unbind()
    try:
        captured = captured_tensors(function, b, h, q, k)
    except TypeError as error:
        raise MaskError(f"a mask_mod takes (b, h, q, k), the indices of a pair; {function!r} does not: {error}") from None
    found = InputsRead(b.is_read, h.is_read, captured)
    if found.device.type != "cpu" or 0 in lengths:  # on a GPU an index out of range would end the process
        return found
    return found._replace(
        batch=found.batch or _results_differ(function, (1, 0), lengths),
        heads=found.heads or _results_differ(function, (0, 1), lengths),
    )


def _results_differ(function: Callable[..., Any], member: tuple[int, int], lengths: tuple[int, int]) -> bool:
    """Return whether the function gives other results for this (b, h) than for (0, 0)."""
    over_pairs = torch.vmap(torch.vmap(function, in_dims=(None, None, None, 0)), in_dims=(None, None, 0, None))
    q, k = (torch.linspace(0, n - 1, min(n, SAMPLED)).long() for n in lengths)
    first = over_pairs(torch.tensor(0), torch.tensor(0), q, k)
    try:
        other = over_pairs(*map(torch.tensor, member), q, k)
    except Exception:
        return True  # (0, 0) raised nothing, so it depends on the index: one out of range, most likely
    return not torch.equal(first, other)


class _RecordingIndex(Tensor):
    """An index that records whether its value was read."""

    is_read: bool = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In x.new_full(size, value) only x is known not to be read.
        ignored = 1 if _is_valueless(func) and args and isinstance(args[0], Tensor) else 0
        for x in tree_leaves((args[ignored:], kwargs)):
            if isinstance(x, _RecordingIndex):
                x.is_read = True
        with disable_subclass_torch_function():
            return func(*args, **(kwargs or {}))


def _is_valueless(func: Any) -> bool:
    if func.__name__ == "__get__":  # of the descriptor of an attribute
        return getattr(func.__self__, "__name__", None) in _VALUELESS_ATTRIBUTES
    return func.__name__ in _VALUELESS_METHODS
