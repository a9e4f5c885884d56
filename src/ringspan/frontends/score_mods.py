"""score_mods for ``flex_attention`` and ``attention``, and attention sinks, which are merged into the result instead.

A ``score_mod(score, b, h, q, k)`` is called with global indices, so none of these depends on ranks. A tensor given here
that requires a gradient gets it; on several ranks it gets a part of it on each (``cp.sum_gradients``).

Legend: B batch, H query heads, S queries, E value dim, R distances.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ringspan.engine import is_traced
from ringspan.errors import InputError
from ringspan.kernels import Partial, ScoreMod
from ringspan.kernels.partial import share_of_keys, triton_module


def softcap(cap: float) -> ScoreMod:
    """Limit scores to the range from ``-cap`` to ``cap``: ``cap · tanh(score / cap)``.

    >>> import ringspan as rs
    >>> q = torch.full((1, 1, 4, 8), 9.0)
    >>> out, lse = rs.LocalWorld(2).attention(q, q, q, mask=rs.causal(4), score_mod=softcap(2.0), return_lse=True)
    >>> lse[0, 0, 0].item()  # the first query sees one key; its score would be 229
    2.0
    """
    if not _is_positive(cap, Real, Tensor):
        raise InputError(f"a softcap is a positive number, not {cap!r}")

    def soft_capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return soft_capped


def alibi(slopes_H: Tensor) -> ScoreMod:
    """Make the score_mod of ALiBi, which subtracts a slope times the distance from each score, with one slope for each
    head (:func:`alibi_slopes`).

    >>> import ringspan as rs
    >>> q = torch.zeros(1, 2, 4, 8)
    >>> score_mod = alibi(torch.tensor([0.0, 1.0]))
    >>> out, lse = rs.LocalWorld(2).attention(q, q, q, mask=rs.causal(4), score_mod=score_mod, return_lse=True)
    >>> lse[0, :, 3].exp()  # of the last query: 1 + 1 + 1 + 1, and 1 + 1/e + 1/e² + 1/e³
    tensor([4.0000, 1.5530])
    """
    if not isinstance(slopes_H, Tensor) or slopes_H.ndim != 1:
        raise InputError(f"alibi takes a tensor of one slope for each head, as rs.alibi_slopes(heads); got {_kind(slopes_H)}")

    @_for_heads(slopes_H.shape[0])
    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - slopes_H[h] * (q - k).abs()

    return biased


def alibi_slopes(heads: int) -> Tensor:
    """Return the slopes of ALiBi for a number of heads: a geometric sequence from 2^(-8/heads) to 2^-8.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if not _is_positive(heads, Integral):
        raise InputError(f"alibi_slopes takes the number of query heads, at least 1; got {heads!r}")
    return torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads)


def relative_bias(bias_HR: Tensor) -> ScoreMod:
    """Add a bias for each head and each distance ``k - q`` from ``-reach`` to ``reach``; R is 2 · reach + 1.

    Distances beyond ``reach`` have the bias of ``reach``.

    >>> import ringspan as rs
    >>> bias = torch.zeros(1, 3, requires_grad=True)
    >>> q = torch.zeros(1, 1, 4, 8)
    >>> out, lse = rs.LocalWorld(2).attention(q, q, q, mask=rs.causal(4), score_mod=relative_bias(bias), return_lse=True)
    >>> lse.sum().backward()
    >>> bias.grad  # the weights of all keys before a query, at it, and behind it
    tensor([[1.9167, 2.0833, 0.0000]])
    """
    if not isinstance(bias_HR, Tensor) or bias_HR.ndim != 2 or bias_HR.shape[1] % 2 != 1:
        raise InputError(
            f"a relative bias is a tensor (heads, 2 · reach + 1), an odd number of distances; got {_kind(bias_HR)}"
        )
    reach = bias_HR.shape[1] // 2

    @_for_heads(bias_HR.shape[0])
    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias_HR[h, (k - q).clamp(-reach, reach) + reach]

    return biased


def with_sinks(out_BHSE: Tensor, lse_BHS: Tensor, sink_H: Tensor) -> Partial:
    """Add attention sinks: each head has one additional key that every query sees, with its own score and a value of
    zero.

    The key belongs to no rank, so it is merged into the result once. Differentiable in all three arguments.

    >>> import ringspan as rs
    >>> q, v = torch.zeros(1, 1, 3, 8), torch.ones(1, 1, 3, 8)
    >>> result = rs.LocalWorld(2).attention(q, q, v, mask=rs.full(3), return_lse=True)
    >>> with_sinks(*result, torch.zeros(1)).out[0, 0, :, 0]  # of four equal shares one is the sink's
    tensor([0.7500, 0.7500, 0.7500])
    """
    if not isinstance(sink_H, Tensor) or sink_H.shape != lse_BHS.shape[1:2]:
        raise InputError(
            f"the sinks are a tensor of one score for each of the {lse_BHS.shape[1]} query heads; got {_kind(sink_H)}"
        )
    if _can_fuse(out_BHSE, lse_BHS, sink_H):
        from ringspan.kernels.fused_sinks import AddSinks

        out, lse = AddSinks.apply(out_BHSE.movedim(2, 0), lse_BHS.movedim(2, 0), sink_H.float())
        return Partial(out.movedim(0, 2), lse.movedim(0, 2))
    sink_H1 = sink_H.to(lse_BHS.dtype)[:, None]
    share_BHS = share_of_keys(lse_BHS, sink_H1)
    return Partial(out_BHSE * share_BHS.unsqueeze(-1).to(out_BHSE.dtype), torch.logaddexp(lse_BHS, sink_H1))


def with_query_sinks(out_BHSE: Tensor, lse_BHS: Tensor, sink_BHS: Tensor) -> Tensor:
    """Add attention sinks whose score is another one for each query, and return the output."""
    share_BHS = share_of_keys(lse_BHS, sink_BHS.to(lse_BHS.dtype))
    return out_BHSE * share_BHS.unsqueeze(-1).to(out_BHSE.dtype)


def _can_fuse(*tensors: Tensor) -> bool:
    """Return whether the Triton kernels of sinks can be used. A compiler fuses the operations itself."""
    out, lse, _ = tensors
    if not out.is_cuda or lse.dtype != torch.float32 or is_traced():
        return False
    if any(x.device != out.device or type(x) not in (Tensor, torch.nn.Parameter) for x in tensors):
        return False
    return triton_module("fused_sinks") is not None


def _for_heads(heads: int) -> Callable[[ScoreMod], ScoreMod]:
    """Mark a function that indexes a tensor by the head, with the number of heads it was made for.

    Without the check, too few heads raise in the indexing (on a GPU, for the whole process), and too many go unnoticed.
    """

    def marked(score_mod: ScoreMod) -> ScoreMod:
        score_mod.ringspan_heads = heads  # type: ignore[attr-defined]
        return score_mod

    return marked


def _is_positive(given: Any, *kinds: Any) -> bool:
    return isinstance(given, kinds) and bool(given > 0)


def _kind(given: Any) -> str:
    return str(tuple(given.shape)) if isinstance(given, Tensor) else type(given).__name__
