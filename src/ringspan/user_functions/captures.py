"""The tensors that a function uses without being given them: document ids, slopes, a learned bias.

They are found by watching one call, so it does not matter how the function holds them: in its closure, as an argument of a
partial, as an attribute of an object or a module, as a global. A function that branches on values could hide one from a single
call; but ``mask_mod`` and ``score_mod`` are called once for all pairs together, and cannot branch.
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
    """The tensors that ``function(*example)`` uses and neither gets as an argument nor makes.

    >>> slopes = torch.tensor([0.5, 0.25])
    >>> captured_tensors(lambda h, q, k: slopes[h] * (k - q), *torch.zeros(3, dtype=torch.int64).unbind())
    (tensor([0.5000, 0.2500]),)
    """
    watch = _Watch(example)
    with torch.no_grad(), enable_function_mode(watch):
        function(*example)
    return tuple(watch.found.values())


@contextmanager
def enable_function_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """The mode is on, even where modes were turned off: a kernel's own calls are nobody's business but the mode's."""
    with enable_torch_function(), mode:
        yield


class _Watch(TorchFunctionMode):
    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = {id(x): x for x in given}  # and kept, so that no other tensor gets the id of one that is gone
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self._known:
                self.found[id(x)] = x
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and id(x) not in self.found]
        self._known.update({id(x): x for x in made})
        return result


class SubstituteTensors(TorchFunctionMode):
    """Where this is seen by, ``old[i]`` means ``new[i]`` to every function: how one is differentiated in what it captured.

    New ones are leaves of a graph of their own. The old ones may have a history, in which one is made of the other.
    """

    def __init__(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        super().__init__()
        self._new = {id(x): y for x, y in zip(old, new, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda x: self._new.get(id(x), x), (args, kwargs or {}))
        return func(*args, **kwargs)
