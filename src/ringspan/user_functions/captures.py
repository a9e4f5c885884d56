"""The tensors that a function captures: document ids, slopes, a learned bias.

They are recorded during one call, so it does not matter how the function holds them: in its closure, as an argument of
a partial, as an attribute of an object or a module, or as a global. One call is enough: a ``mask_mod`` or ``score_mod``
is called for all pairs at once, and cannot branch on their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ringspan.torch_private.function_modes import enable_torch_function
from ringspan.torch_private.pytree import tree_leaves, tree_map_only


def captured_tensors(function: Callable[..., Any], *example: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that ``function(*example)`` uses but neither receives as arguments nor creates.

    >>> slopes = torch.tensor([0.5, 0.25])
    >>> captured_tensors(lambda h, q, k: slopes[h] * (k - q), *torch.zeros(3, dtype=torch.int64).unbind())
    (tensor([0.5000, 0.2500]),)
    """
    recorder = _CaptureRecorder(example)
    with torch.no_grad(), enable_function_mode(recorder):
        function(*example)
    return tuple(recorder.found.values())


@contextmanager
def enable_function_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Enter a torch function mode, even inside ``DisableTorchFunction``, which encloses calls of kernels."""
    with enable_torch_function(), mode:
        yield


class _CaptureRecorder(TorchFunctionMode):
    """Records the tensors among the arguments of all operations that were neither given nor created."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._given_or_created = {id(x): x for x in given}  # kept alive, so that ids stay unique
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self._given_or_created:
                self.found[id(x)] = x
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and id(x) not in self.found]
        self._given_or_created.update({id(x): x for x in made})
        return result


class SubstituteTensors(TorchFunctionMode):
    """While this mode is enabled, every operation uses ``new[i]`` in place of ``old[i]``.

    So a function is differentiated with respect to the tensors it captured: the new ones are leaves of a graph of their
    own, while the old ones may have a history, in which one was computed from the other.
    """

    def __init__(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        super().__init__()
        self._new = {id(x): y for x, y in zip(old, new, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda x: self._new.get(id(x), x), (args, kwargs or {}))
        return func(*args, **kwargs)
