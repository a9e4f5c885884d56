"""What a ``with cp:`` block does with each function of PyTorch that is called inside it."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from types import BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any, Literal, cast

import torch.nn.functional as F
from torch import Tensor

from ringspan.caching.registry import on_clear_caches
from ringspan.debugging.settings import settings
from ringspan.frontends.handwritten_attention import PRODUCTS, SOFTMAX
from ringspan.torch_private.attention_operators import (
    NATIVE_MULTI_HEAD_ATTENTION,
    TRANSFORMER_ENCODER_LAYER,
    VARLEN_ATTENTION,
    VARLEN_ATTENTION_OUT,
)
from ringspan.torch_private.dynamo import dynamo_constant
from ringspan.torch_private.higher_order import HigherOrderOperator

# Other attention functions, which would attend only to this rank's keys: name -> what to call instead.
REFUSED = {
    # Chosen for evaluation by eager code outside blocks and by compiled code.
    NATIVE_MULTI_HEAD_ATTENTION: "turn fused layers off with torch.backends.mha.set_fastpath_enabled(False)",
    TRANSFORMER_ENCODER_LAYER: "turn fused layers off with torch.backends.mha.set_fastpath_enabled(False)",
    "flex_attention": "call torch.nn.attention.flex_attention.flex_attention itself, uncompiled",
    "flex_attention_backward": "call torch.nn.attention.flex_attention.flex_attention itself, uncompiled",
    VARLEN_ATTENTION_OUT: "call varlen_attn, without out",
}

# Operators of other packages, "flash_attn._flash_attn_forward": those whose own name says attention, and the forward
# pass of a package that does. Their backward passes are only called for a forward pass.
OTHER_ATTENTION = re.compile(r"\.\w*(attn|attention|fmha)|(attn|attention|fmha)\w*\.\w*fwd", re.IGNORECASE)
BACKWARD = re.compile(r"bwd|backward", re.IGNORECASE)

# The first function of a model: its tokens are the result of ``cp.shard``, which knows their layout.
EMBEDDING = "embedding"

# Functions and methods of compiled classes.
BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)

# The treatment of a call in a block: intercept it; run its function arguments inside the block; replace the method by
# the function of the same name; compute it around the attention of the block; inspect its result. None: call it
# unchanged, as almost all functions. In strict mode these are inspected, too.
Treatment = Literal["attention", "runs functions", "unflatten", "multi-head", "watched"] | None

# function -> its treatment. Looked up in every torch operation of a block, so names are only read the first time. It
# has functions of torch only: a closure of the user could hold tensors, and be made anew for every call.
treatments: dict[Any, Treatment] = {}
on_clear_caches(treatments.clear)
MAX_TREATMENTS = 10_000


def find_treatment(func: Any) -> Treatment:
    """Return the treatment of a function, and keep it if the function is one of PyTorch's own."""
    name, treatment = name_of(func), cast(Treatment, None)
    is_sdpa = "scaled_dot_product" in name and not name.endswith("backward")
    if is_sdpa or name in REFUSED or name == VARLEN_ATTENTION or is_attention_of_another_package(func):
        treatment = "attention"
    elif isinstance(func, HigherOrderOperator):  # torch.cond, and checkpoint in compiled code
        treatment = "runs functions"
    elif func is Tensor.unflatten:
        treatment = "unflatten"
    elif func is F.multi_head_attention_forward:
        treatment = "multi-head"
    elif settings.strict or name in SOFTMAX or name == EMBEDDING:
        treatment = "watched"
    if _is_of_torch(func) and isinstance(func, Hashable) and len(treatments) < MAX_TREATMENTS:
        treatments[func] = treatment
    return treatment


def _is_of_torch(func: Any) -> bool:
    """Return whether a function is one of PyTorch's own, or a built-in method of its classes."""
    return isinstance(func, BUILT_IN) or str(getattr(func, "__module__", "")).partition(".")[0] == "torch"


def is_attention_of_another_package(func: Any) -> bool:
    """Return whether a function is an operator that computes attention, registered by a package other than PyTorch."""
    if type(func).__name__ not in ("OpOverload", "OpOverloadPacket"):
        return False
    name = str(func)  # package.operator.overload
    is_ours = name.startswith(("aten.", "prims.", "torch_attn.", "ringspan"))
    return not is_ours and OTHER_ATTENTION.search(name) is not None and BACKWARD.search(name) is None


def attention_in_script(operators: Sequence[str]) -> str | None:
    """Return the attention among the operators of a TorchScript function, or None if there is none.

    >>> attention_in_script(["prim::Constant", "aten::scaled_dot_product_attention"])
    'aten::scaled_dot_product_attention'
    >>> attention_in_script(["aten::matmul", "aten::softmax", "aten::matmul"])
    'attention written as aten::matmul and aten::softmax'
    >>> attention_in_script(["aten::linear", "aten::softmax"])
    """
    for operator in operators:
        name = operator.rpartition("::")[2]
        if "scaled_dot_product" in name or name in REFUSED or OTHER_ATTENTION.search(operator.replace("::", ".")):
            return operator
    names = [operator.rpartition("::")[2] for operator in operators]
    softmax = next((n for n, name in enumerate(names) if name in SOFTMAX), None)
    if softmax is None or not any(name in PRODUCTS - {"linear"} for name in names[:softmax]):
        return None
    after = next((n for n in range(softmax, len(names)) if names[n] in PRODUCTS - {"linear"}), None)
    return None if after is None else f"attention written as {operators[after]} and {operators[softmax]}"


@dynamo_constant
def name_of(func: Any) -> str:
    """Return the name of a function, without that of an overload."""
    name: str = getattr(func, "__name__", "").split(".")[0]
    return name


def is_varlen_attention(func: Any) -> bool:
    """Return whether a function is the operator that ``torch.nn.attention.varlen.varlen_attn`` calls."""
    return name_of(func) == VARLEN_ATTENTION
