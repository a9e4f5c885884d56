"""Compare the tensors of a rank with those of one process.

A tensor of a rank is the expected one, cut along one dim by a layout, or whole. No tensor is sent: every rank has run
the whole model, and takes its own tokens from the expected tensor.

    expected  (batch, 8 tokens, dim)    rank 0 has (batch, tokens 0 1 6 7, dim)    rank 1 has (batch, tokens 2 3 4 5, dim)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.frontends.context_parallel import ContextParallel


class Cut(NamedTuple):
    """A dim that is split over ranks: ``rows`` × ``length`` tokens. ``rows`` > 1 if batch and tokens are one dim."""

    dim: int
    rows: int
    positions: Tensor
    length: int

    def unflattened(self, x: Tensor) -> Tensor:
        """Return a whole tensor with its tokens as dim 0."""
        return x.unflatten(self.dim, (self.rows, self.length)).movedim(self.dim + 1, 0)

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of a whole tensor, shaped as the rank has them."""
        whole = x.unflatten(self.dim, (self.rows, self.length))
        return whole.index_select(self.dim + 1, self.positions.to(x.device)).flatten(self.dim, self.dim + 1)

    def by_token(self, x: Tensor) -> Tensor:
        """Return the values of this rank's tensor as a matrix with a row for each token."""
        count = len(self.positions)
        return x.unflatten(self.dim, (self.rows, count)).movedim(self.dim + 1, 0).reshape(count, -1)


def cut_of(expected: Sequence[int], actual: Sequence[int], cp: ContextParallel) -> Cut | None:
    """Return how the tensor of a rank is cut from the expected one, given their shapes; None if it is not."""
    if len(expected) != len(actual):
        return None
    dims = [dim for dim, (a, b) in enumerate(zip(expected, actual, strict=True)) if a != b]
    if len(dims) != 1:
        return None
    (dim,) = dims
    for layout in dict.fromkeys((cp.plan.q_layout, cp.plan.kv_layout)):
        rows, count = expected[dim] // max(1, layout.length), layout.counts[cp.rank]
        if rows and (expected[dim], actual[dim]) == (rows * layout.length, rows * count):
            return Cut(dim, rows, torch.from_numpy(layout.positions(cp.rank)), layout.length)
    return None


class Difference(NamedTuple):
    """``error`` is the largest difference, relative to the largest expected value. ``token`` is where it is."""

    error: float
    token: int


def difference(actual: Tensor, expected: Tensor, cut: Cut | None) -> Difference:
    """Compare a tensor of this rank with the whole expected one. ``token`` is -1 if the tensor is not cut."""
    mine = expected if cut is None else cut.take(expected)
    apart = _apart(actual, mine)
    if not apart.numel():
        return Difference(0.0, -1)
    error = _relative(apart.max().item(), largest(expected))
    if cut is None:
        return Difference(error, -1)
    row = int(cut.by_token(apart).amax(1).argmax())
    return Difference(error, int(cut.positions[row]))


def largest(x: Tensor) -> float:
    """Return the largest finite absolute value."""
    finite = x.detach().double().abs()
    finite = finite[finite.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


class Multiple(NamedTuple):
    """A tensor as a multiple of the expected one: ``actual = ratio * expected``, up to ``rest`` (relative)."""

    error: float
    ratio: float
    rest: float


def multiple(actual: Tensor, expected: Tensor, scale: float) -> Multiple:
    """Return the best ratio by least squares. Errors are relative to ``scale``."""
    a, b = actual.detach().double().flatten(), expected.detach().double().flatten()
    if not a.numel():
        return Multiple(0.0, 1.0, 0.0)
    ratio = _ratio(a @ b, b @ b)
    error, rest = _apart(a, b).max().item(), _apart(a, ratio * b).max().item()
    return Multiple(_relative(error, scale), ratio, _relative(rest, scale))


class TokenMultiples(NamedTuple):
    """The gradients of the tokens as multiples of the expected ones.

    ``ratios`` are the smallest and the largest of the tokens. ``turned`` are the positions of the tokens whose
    gradients are no multiples.
    """

    ratios: tuple[float, float]
    turned: list[int]


def token_multiples(actual: Tensor, expected: Tensor, cut: Cut, tolerance: float) -> TokenMultiples:
    a, b = cut.by_token(actual.double()), cut.by_token(cut.take(expected).double())
    scale = largest(expected)
    ratios = (a * b).sum(1) / (b * b).sum(1)
    has_gradient = b.abs().amax(1) > tolerance * scale
    ratios = torch.where(has_gradient, ratios, 0.0)
    rest = (a - ratios[:, None] * b).abs().amax(1)
    turned = rest > tolerance * scale * ratios.abs().clamp(min=1.0)
    straight = ratios[has_gradient & ~turned]
    bounds = (straight.min().item(), straight.max().item()) if len(straight) else (1.0, 1.0)
    return TokenMultiples(bounds, cut.positions[turned.cpu()].tolist())


def is_positions(x: Tensor, cut: Cut) -> bool:
    """Return whether integers count along the tokens, starting at 0 or again at 0."""
    tokens = cut.unflattened(x).reshape(cut.length, -1)
    return bool(((tokens[1:] == tokens[:-1] + 1) | (tokens[1:] == 0)).all()) and not tokens[:1].any()


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Return ``|a - b|``, which is inf where only one of the two is NaN."""
    a, b = a.detach().double(), b.detach().double()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return apart.masked_fill(apart.isnan(), torch.inf)


def _relative(error: float, scale: float) -> float:
    return error / scale if scale else error


def _ratio(dot: Tensor, square: Tensor) -> float:
    return (dot / square).item() if square else 1.0
