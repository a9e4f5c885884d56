"""Find layers that combine the tokens of this rank where those of the whole sequence are meant, in strict mode.

Found are convolutions, recurrent layers, scans and shifts (``roll``, ``pad``) along the sequence, norms, pooling and
means over it, and a mean cross-entropy. A dim is taken for the sequence if it has as many elements as this rank has
tokens. Shifts that are written as slices or ``cat`` are not found: many computations slice the sequence for good
reasons.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ringspan.errors import InputError
from ringspan.frontends.handwritten_attention import tensors_in

CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
NORMS_OF_CHANNELS = frozenset({"batch_norm", "instance_norm", "group_norm"})
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
POOLS = frozenset({"avg_pool1d", "max_pool1d", "max_pool1d_with_indices", "adaptive_avg_pool1d", "adaptive_max_pool1d"})
# Functions of a tensor and dims: the name of the argument, and its place among the positional ones.
ALONG_DIMS = {
    **dict.fromkeys(["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "mean", "std", "var"], ("dim", 1)),
    "roll": ("dims", 2),
}
GATHER = "cp.shard(layer(cp.unshard(x, dim=1, grad='partial')), dim=1)"


def check_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int, advice: str) -> None:
    """Raise if a call combines this rank's tokens. ``advice`` ends the message."""
    x = next(tensors_in((args, kwargs)), None)
    if x is None or tokens < 2:
        return
    if name == "cross_entropy":
        _check_cross_entropy(*args, tokens=tokens, **kwargs)
    elif name in CONVOLUTIONS:
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        sizes = zip(x.shape[2 - weight.ndim :], weight.shape[2:], strict=True)
        if any(size == tokens and width > 1 for size, width in sizes):
            raise InputError(
                f"{name} over the {tokens} tokens of this rank: tokens at the edges of a shard need those of other ranks. Use "
                f"cp.halo, or {GATHER}, {advice}"
            )
    elif name in NORMS_OF_CHANNELS and tokens in x.shape[2:]:
        raise InputError(
            f"{name} of a {tuple(x.shape)} tensor has the mean and variance of this rank's {tokens} tokens, not of the whole "
            f"sequence. Use {GATHER}, {advice}"
        )
    elif name == "layer_norm" and tokens in (args[1] if len(args) > 1 else kwargs["normalized_shape"]):
        raise InputError(
            f"layer_norm over a dim of {tokens}, the number of this rank's tokens, normalizes over a part of the sequence. Use "
            f"{GATHER}, {advice}"
        )
    elif _is_along_tokens(name, x, args, kwargs, tokens):
        raise InputError(
            f"{name} along a dim of {tokens}, the number of this rank's tokens, of a {tuple(x.shape)} tensor: it does not see "
            f"those of other ranks. Use cp.roll for a shift, cp.mean for a mean, or {GATHER}, {advice}"
        )


def _is_along_tokens(name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> bool:
    if name == "pad":  # at the beginning: padding at the end, to a multiple of a block, moves no token
        before = (args[1] if len(args) > 1 else kwargs["pad"])[::2]
        return x.is_floating_point() and any(n and size == tokens for n, size in zip(before, reversed(x.shape), strict=False))
    if name in RECURRENT:
        return tokens in x.shape[:-1]
    if name in POOLS:
        return x.shape[-1] == tokens
    if name not in ALONG_DIMS or not x.is_floating_point():  # integers are indices, as those of documents in transformers
        return False
    keyword, place = ALONG_DIMS[name]
    dims = args[place] if len(args) > place else kwargs.get(keyword)
    dims = (dims,) if isinstance(dims, int) else dims if isinstance(dims, tuple | list) else ()
    return any(isinstance(dim, int) and -x.ndim <= dim < x.ndim and x.shape[dim] == tokens for dim in dims)


def _check_cross_entropy(input: Tensor, target: Tensor, *args: Any, tokens: int, reduction: str = "mean", **_: Any) -> None:
    if reduction == "mean" and isinstance(target, Tensor) and target.numel() and target.numel() % tokens == 0:
        raise InputError(
            f"F.cross_entropy inside the block is the mean over this rank's {tokens} tokens, which is not the mean over all "
            "ranks; and transformers' model(labels=...) shifts labels inside each shard. Shift with rs.shift_labels before "
            'cp.shard, call the model without labels, and compute cp.mean(F.cross_entropy(..., reduction="none"), labels >= 0) '
            "after the block"
        )
