"""Find attention that is written as matrix products and a softmax over this rank's keys, in strict mode::

    scores = q @ k.mT               a product of (…, queries, keys) of this rank: marked as scores
    weights = scores.softmax(-1)    a softmax of that shape, or exp or sigmoid of scores: marked as weights
    out = weights @ v               a product of weights raises

Results of marked tensors that still have both dims are marked as well: dropout, to, mul, view, index, transpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ringspan.errors import UnplannedAttention

PRODUCTS = frozenset(
    {"matmul", "__matmul__", "__rmatmul__", "linalg_matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "einsum"}
    | {"tensordot", "inner", "linear", "chain_matmul", "linalg_multi_dot"}
)
SOFTMAX = frozenset({"softmax", "special_softmax", "softmax_", "_softmax", "softmin", "gumbel_softmax"})
EXPONENTIALS = frozenset({"exp", "exp_", "exp2", "exp2_", "sigmoid", "sigmoid_"})
# What to do about a model of transformers. "sdpa" would be right for some models, but not for those with sliding windows.
USE_RINGSPAN = 'in transformers, `import ringspan.integrations.transformers` and model.set_attn_implementation("ringspan")'
# An attribute of tensors, "scores" or "weights".
MARK = "_ringspan_local_attention"


def is_local_softmax(name: str, result: Any, local_shape: tuple[int, int]) -> bool:
    """Return whether a call was a softmax of (…, queries, keys), where ``local_shape`` has the numbers of this rank."""
    return name in SOFTMAX and isinstance(result, Tensor) and tuple(result.shape[-2:]) == local_shape


def follow_attention(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, local_shape: tuple[int, int], advice: str
) -> None:
    """Mark the results of a call, and raise if it is a product of attention weights. ``advice`` ends the message."""
    given = list(tensors_in((args, kwargs)))
    marks = {getattr(x, MARK, None) for x in given}
    if name in PRODUCTS and "weights" in marks:
        shape = next(tuple(x.shape) for x in given if getattr(x, MARK, None) == "weights")
        raise UnplannedAttention(
            f"attention written as matmul and softmax: {name} of the softmax of a {shape} tensor would see only the keys of "
            f"this rank: call F.scaled_dot_product_attention ({USE_RINGSPAN}), {advice}"
        )
    if is_local_softmax(name, result, local_shape) or (name in EXPONENTIALS and "scores" in marks) or "weights" in marks:
        mark = "weights"
    elif "scores" in marks or (name in PRODUCTS and not any(isinstance(x, Parameter) for x in given)):
        mark = "scores"
    else:
        return
    for x in tensors_in(result):
        if tuple(x.shape[-2:]) in (local_shape, local_shape[::-1]):
            setattr(x, MARK, mark)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from tensors_in(x)
    elif isinstance(tree, dict):
        yield from tensors_in(tuple(tree.values()))
