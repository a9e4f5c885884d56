"""How many Python functions of ringspan one call of attention runs, in how many files, and how deeply nested.

``sys.setprofile`` reports every call of a Python function whose code is in src/ringspan, this file excepted. As the
interpreter reports them, comprehensions, generator expressions and each resumption of a generator count as one call
(Python 3.12 reports no list comprehensions). Depth counts frames of ringspan on the stack.

The case: ``F.scaled_dot_product_attention``, or an eager ``flex_attention`` with a score_mod, inside ``with cp:``; gloo
ranks on this machine, causal mask of 256 tokens, strategy "ring", 4 heads of 32, float32; the third call of three,
since the first ones fill caches. One rank has 1 step, two ranks have 2.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import ringspan as rs

SOURCES = str(Path(rs.__file__).parent)


class CallFigures(NamedTuple):
    """The number of calls, of files that have the called functions, and of frames of the deepest stack."""

    calls: int
    files: int
    depth: int


class CallCounter:
    """A profile function that counts the calls of functions of ringspan."""

    def __init__(self) -> None:
        self._calls_of_file, self._depth, self._deepest = Counter[str](), 0, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(SOURCES) or file == __file__:
            return
        if event == "call":
            self._calls_of_file[file] += 1
            self._depth += 1
            self._deepest = max(self._deepest, self._depth)
        elif event == "return":
            self._depth -= 1

    def run(self, function: Callable[[], Any]) -> Any:
        """Call the function, and count while it runs. Return its result."""
        sys.setprofile(self)
        try:
            return function()
        finally:
            sys.setprofile(None)

    @property
    def figures(self) -> CallFigures:
        return CallFigures(self._calls_of_file.total(), len(self._calls_of_file), self._deepest)


def count_calls(rank: int, with_flex: bool) -> tuple[CallFigures, CallFigures]:
    """Return the figures of the forward and of the backward pass. A job for all workers of a pool."""
    cp = rs.ContextParallel(None, rs.causal(256), strategy="ring")
    q, k, v = (x.requires_grad_() for x in cp.shard(*torch.randn(3, 1, 4, 256, 32).unbind(), dim=2))

    def attend() -> Any:
        return flex_attention(q, k, v, score_mod=_add_distance) if with_flex else F.scaled_dot_product_attention(q, k, v)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that an eager flex_attention is slow
        for _ in range(3):
            forward, backward = CallCounter(), CallCounter()
            with cp:
                out = forward.run(attend)
            backward.run(partial(out.backward, torch.ones_like(out)))
    return forward.figures, backward.figures


def _add_distance(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (q - k)
