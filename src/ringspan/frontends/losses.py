"""Losses and gradients of a sequence that is split over ranks. The methods are those of ContextParallel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ringspan.debugging.settings import settings
from ringspan.errors import InputError
from ringspan.frontends.cross_entropy import check_cross_entropy, summed_cross_entropy
from ringspan.frontends.dtensor import is_dtensor
from ringspan.frontends.groups import Group, groups_of
from ringspan.frontends.labels import IGNORED
from ringspan.frontends.rank_comparison import compare_parameters
from ringspan.frontends.reporting import reports_errors
from ringspan.frontends.sums import Grads, all_sum, sum_gradients, sum_of_shares
from ringspan.frontends.validate import check_parameters, check_weights
from ringspan.transports import ProcessGroupTransport


class Losses:
    """Means and sums over the tokens of all ranks of ``group``, and sums of gradients."""

    group: ProcessGroupTransport

    @reports_errors("cp.mean")
    def mean(self, x: Tensor, weights: Tensor | None = None, *, over: Group = None, grads: Grads = "summed") -> Tensor:
        """Return the (weighted) mean over the tokens of all ranks, the same number on every rank, however many tokens
        each has.

        ``over`` is the group or mesh to reduce over; by default the group of this object. With data parallelism, give
        the mesh of both (``over=mesh["dp", "cp"]``), so that every token has the same weight. The gradient on a rank is
        that of the global mean with respect to *this rank's* values. A parameter that all ranks use gets a part of its
        gradient on each: sum them (:meth:`sum_gradients`, or any all-reduce with SUM), or give ``grads="averaged"`` if
        DDP or FSDP averages them over these ranks.

        For gradient accumulation over several batches see :meth:`sum`.
        """
        x = self._checked(x)
        if weights is None and x.ndim == 0 and x.requires_grad:
            raise InputError(
                "the loss is one number, and the mean of the ranks' numbers is not the mean over all tokens: ranks have "
                'different numbers of labels. Give the losses of the tokens, cp.mean(F.cross_entropy(..., reduction="none"), '
                "labels >= 0), or the number of labels that this one is the mean of, as weights"
            )
        weights = torch.ones_like(x) if weights is None else check_weights(weights, x)
        groups = self._ranks(over)
        total = all_sum(weights.sum(), groups, "cp.mean, the weights")
        return sum_of_shares((x * weights).sum() / total, groups, grads, "cp.mean")

    @reports_errors("cp.sum")
    def sum(self, x: Tensor, *, over: Group = None, grads: Grads = "summed") -> Tensor:
        """Return the sum over the tokens of all ranks; ``over`` and ``grads`` as in :meth:`mean`.

        The mean over several batches is not the mean of their means if they have different numbers of tokens.
        Accumulate ``cp.sum(losses) / total`` instead, where ``total`` is the number of tokens with a label in all
        batches.
        """
        return sum_of_shares(self._checked(x).sum(), self._ranks(over), grads, "cp.sum")

    @reports_errors("cp.cross_entropy")
    def cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = IGNORED,
        tokens: int = 1024,
        total: Tensor | float | None = None,
        over: Group = None,
        grads: Grads = "summed",
    ) -> Tensor:
        """Return the mean cross-entropy of ``hidden @ weight.T`` over the tokens of all ranks that have a target.

        ``hidden`` is (…, D), ``weight`` (V, D), ``targets`` (…). The logits exist for ``tokens`` tokens at a time, in
        at least float32 for the softmax. ``over`` and ``grads`` are as in :meth:`mean`. For gradient accumulation give
        ``total``, the number of targets in all batches; the losses of the batches are then to be added.

        The gradient of the weights is computed in the forward pass and kept until the backward pass, in at least
        float32: V × D values. Call it under ``torch.no_grad()`` for evaluation.
        """
        check_cross_entropy(hidden, weight, targets, tokens)
        if settings.strict:
            self.check_graph(hidden)
        groups = self._ranks(over)
        if total is None:
            count = (targets != ignore_index).sum()
            count = count.to(torch.promote_types(hidden.dtype, torch.float32))
            total = all_sum(count, groups, "cp.cross_entropy, the targets")
        summed = summed_cross_entropy(hidden, weight, targets, ignore_index, tokens)
        return sum_of_shares(summed / total, groups, grads, "cp.cross_entropy")

    @reports_errors("cp.sum_gradients")
    def sum_gradients(self, parameters: Iterable[Tensor], *, over: Group = None) -> None:
        """Sum the gradients of parameters that all ranks share, in at least float32.

        A gradient that is None on this rank counts as zero. One that is None on all ranks stays None, so that an
        optimiser skips the parameter.
        """
        checked = check_parameters(parameters)
        if settings.debug:
            compare_parameters(checked, self.group)
        sum_gradients(checked, self._ranks(over))

    def check_graph(self, x: Tensor) -> None:
        """Raise if the autograd graph of x has attention that no block has intercepted. Called in strict mode."""

    def _checked(self, x: Tensor) -> Tensor:
        x = _at_least_float32(x)
        if settings.strict:
            self.check_graph(x)
        return x

    def _ranks(self, over: Group) -> list[ProcessGroupTransport]:
        return [self.group] if over is None else groups_of(over)


def _at_least_float32(x: Tensor) -> Tensor:
    """Validate x and cast it to at least float32: float16 and bfloat16 represent integers exactly only up to 2048 and
    256."""
    if not isinstance(x, Tensor):
        raise InputError(f"the values must be a tensor, of this rank's tokens; got {type(x).__name__}")
    if is_dtensor(x):
        raise InputError(f"the values are a DTensor with placements {tuple(x.placements)}: pass x.to_local()")
    return x.to(torch.promote_types(x.dtype, torch.float32))
