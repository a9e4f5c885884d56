"""Containers of sequences: what ``cp.shard`` looks into for tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from enum import Enum
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.errors import InputError
from ringspan.torch_private.pytree import keystr, tree_map_with_path

# Values that hold no tokens.
PLAIN = (Number, str, bytes, Enum, torch.dtype, torch.device, np.generic, type(None))


def map_sequences(take: Callable[[Tensor], Tensor], tree: Any, length: int) -> Any:
    """Return a copy of nested containers with every tensor and array ``x`` replaced by ``take(x)``.

    A mapping that is neither a dict nor a UserDict becomes a dict. ``length`` is the number of tokens of the whole
    sequence: a list of that many numbers is refused, because it looks like tokens.
    """

    def is_token_list(x: Any) -> bool:
        return type(x) in (list, tuple) and len(x) == length > 1 and all(isinstance(n, Number) for n in x)

    def inside(x: Any, at: str = "") -> Any:
        """Map the leaves of nested containers. ``at`` is where they are, for errors: ``['batch'].labels``."""
        return tree_map_with_path(lambda path, y: named_leaf(y, at + keystr(path)), x, is_leaf=is_token_list)

    def named_leaf(x: Any, at: str) -> Any:
        try:
            return leaf(x, at)
        except InputError as error:
            if not at or str(error).startswith(("[", ".")):
                raise
            raise InputError(f"{at}: {error}") from None

    def of_dataclass(x: Any, at: str) -> Any:
        fields = [f for f in dataclasses.fields(x) if hasattr(x, f.name)]
        made = dataclasses.replace(x, **{f.name: inside(getattr(x, f.name), f"{at}.{f.name}") for f in fields if f.init})
        for f in fields:
            if not f.init:  # replace() gives it its default, or __post_init__ computes it from this rank's tokens
                object.__setattr__(made, f.name, inside(getattr(x, f.name), f"{at}.{f.name}"))
        return made

    def leaf(x: Any, at: str) -> Any:
        if isinstance(x, Tensor):
            return take(x)
        if isinstance(x, np.ndarray):
            if x.dtype.kind not in "biufc":
                raise InputError(f"an array of {x.dtype} cannot be sharded: give numbers")
            return take(torch.from_numpy(x)).numpy()
        if isinstance(x, PLAIN):
            return x
        if is_token_list(x):
            raise InputError(f"a list of {length} numbers looks like tokens: make it a tensor, with torch.tensor(...)")
        if isinstance(x, UserDict):  # BatchEncoding of transformers is one
            sharded = copy.copy(x)  # with a dict of its own, which copies of other mappings may share with the original
            for key in x:
                sharded[key] = inside(x[key], f"{at}[{key!r}]")
            return sharded
        if isinstance(x, Mapping):
            return {key: inside(value, f"{at}[{key!r}]") for key, value in x.items()}
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return of_dataclass(x, at)
        raise InputError(
            f"{type(x).__name__} is not a tensor, an array, or a container that is looked into (list, tuple, dict, mapping, "
            "dataclass): shard its tensors, and leave out what is not split over the ranks"
        )

    return inside(tree)
