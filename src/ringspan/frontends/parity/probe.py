"""Find out whether a tensor of a model mixes tokens: whether its values at one token depend on other tokens.

The step runs again in one process, up to the tensor. Every tensor that enters or leaves a module before that is cut
from the graph, so that only the code since then is tested, not the attention of earlier layers. Then the gradient of
the values at one token, with respect to the tensors before, is zero at all other tokens unless tokens are mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ringspan.frontends.parity.comparison import Cut
from ringspan.frontends.parity.trace import Key, Place, Recorder, leaves
from ringspan.torch_private.pytree import tree_map_only


class _Found(BaseException):
    """Ends the run at the tensor. Not an Exception, so that the step does not handle it."""


class Probe(Recorder):
    def __init__(
        self, model: nn.Module, tokens: tuple[int, int], *, widen: bool, target: Place, token: int, cuts: Mapping[Place, Cut]
    ) -> None:
        super().__init__(model, tokens, widen=widen)
        self._target, self._token, self._cuts = target, token, cuts
        self._sources: list[tuple[Tensor, Cut]] = []
        self.mixes: bool | None = None
        """None if the tensor depends on no tensor of an earlier module."""

    def passing(self, key: Key, labelled: dict[str, Any]) -> dict[str, Any]:
        for label, tree in labelled.items():
            for name, x in leaves(tree, label):
                if (key, name) == self._target:
                    self.mixes = self._depends_on_other_tokens(x)
                    raise _Found
        return {label: self._cut(key, label, tree) for label, tree in labelled.items()}

    def _cut(self, key: Key, label: str, tree: Any) -> Any:
        names = {id(x): name for name, x in leaves(tree, label)}

        def cut(x: Tensor) -> Tensor:
            where = self._cuts.get((key, names.get(id(x), "")))
            if where is None or not x.is_floating_point():
                return x
            source = x.detach().requires_grad_()
            self._sources.append((source, where))
            return source.clone()  # not the leaf itself, which must not be changed in place

        return tree_map_only(Tensor, cut, tree)

    def _depends_on_other_tokens(self, x: Tensor) -> bool | None:
        cut = self._cuts.get(self._target)
        if cut is None or not x.requires_grad or not self._sources:
            return None
        values = cut.unflattened(x)[self._token]
        weights = torch.arange(values.numel(), dtype=values.dtype, device=x.device).add(1).cos().view_as(values)
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            (values * weights).sum(), [source for source, _ in self._sources], allow_unused=True
        )
        found: bool | None = None
        for gradient, (_, where) in zip(gradients, self._sources, strict=True):
            if gradient is None:
                continue
            by_token = where.unflattened(gradient).flatten(1).abs().amax(1)
            by_token[self._token] = 0
            found = bool(found) or bool(by_token.any())
        return found


def mixes_tokens(
    run: Callable[[Probe], Any],
    model: nn.Module,
    tokens: tuple[int, int],
    *,
    widen: bool,
    target: Place,
    token: int,
    cuts: Mapping[Place, Cut],
) -> bool | None:
    """Return whether the target depends on other tokens than ``token``; None if it depends on no earlier tensor."""
    probe = Probe(model, tokens, widen=widen, target=target, token=token, cuts=cuts)
    with suppress(_Found):
        run(probe)
    return probe.mixes
