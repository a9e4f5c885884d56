"""The torch function mode of a ``_ContextParallel`` style in compiled code.

The layouts of a call are not known while it is traced: they depend on the BlockMask, on open ``context_parallel``
blocks and on options. So the graph has an operator that finds the plans when it runs, as eager code does, and returns
one plan id for each row of the batch (a balancer can order each row differently)::

    plan_ids = ringspan::plans_of_call(q, k, ids of the BlockMask, the style and the options, is_causal)
    out, lse = ringspan::attend_rows(q, k, v, plan_ids, scale)
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.compat.attention import MaskFromCallMode
from ringspan.compat.attention_calls import FlexCall, SdpaCall
from ringspan.compat.block_masks import MaskOrigin, number_of, origin_of_number
from ringspan.compat.call_settings import hold_settings, settings_at
from ringspan.compat.context_cache import ContextCache
from ringspan.compat.meshes import innermost_block
from ringspan.compat.row_operator import attend_rows, ids_of
from ringspan.compat.shardings import STATES
from ringspan.engine import is_exporting
from ringspan.errors import InputError
from ringspan.frontends.attention_block import AttentionMode, under_autocast
from ringspan.frontends.flex import check_arguments
from ringspan.frontends.reporting import report_error
from ringspan.frontends.validate import check_scale
from ringspan.frontends.varlen import VarlenCall
from ringspan.masks import causal
from ringspan.torch_private.dispatch_keys import default_dispatch_keys
from ringspan.torch_private.flex_interception import install_flex_interception
from ringspan.torch_private.function_modes import disable_torch_function

_contexts: WeakValueDictionary[int, ContextCache] = WeakValueDictionary()
_numbers = count()


class TracedStyleMode(AttentionMode):
    """Traces attention calls as operators. What runs eagerly after a graph break is passed on to a MaskFromCallMode."""

    def __init__(self, contexts: ContextCache) -> None:
        super().__init__(causal(0))
        install_flex_interception()
        self._mask_name = "that of each call"
        self._contexts, number = contexts, next(_numbers)
        self._number = torch.tensor(number)
        _contexts[number] = contexts

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return MaskFromCallMode(self._contexts, block=innermost_block(self._contexts.mesh)).caught(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            q, k, v, scale = self._checked_sdpa(*args, **kwargs)
            if q.ndim != 4:
                raise InputError(f"compiled attention takes (batch, heads, tokens, dim), not {q.ndim} dims")
            return self._attend(q, k, v, None, SdpaCall(*args, **kwargs).is_causal, scale).out
        return super().caught(func, args, kwargs)

    def refuse(self, error: Exception) -> None:
        report_error(self._contexts.group, "forward", error)

    def keep_settings(self) -> None:
        hold_settings(self._contexts.shardings)

    def trace_flex_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = FlexCall(*args, **kwargs)
        number = None if call.block_mask is None else number_of(call.block_mask)
        if call.score_mod is not None or (number is None and call.block_mask is not None):
            return None  # an operator takes no function, and only a sharded BlockMask has a number
        q, k, v = under_autocast(call.query, call.key, call.value)
        request = check_arguments(q, k, enable_gqa=call.enable_gqa, return_lse=call.return_lse, return_aux=call.return_aux)
        return request.select(self._attend(q, k, v, number, False, call.scale))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Any:
        state = None if is_exporting() else STATES.number
        plan_ids = torch.ops.ringspan.plans_of_call(q, k, mask, self._number, state, is_causal)
        return attend_rows(q, k, v, plan_ids, check_scale(scale, q.shape[-1]))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        raise NotImplementedError  # caught() does not call it

    def flex_attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def varlen_attention(self, call: VarlenCall) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class TracedCall(NamedTuple):
    """What the layouts of a call depend on."""

    query: Tensor
    key: Tensor
    is_causal: bool
    mask_origin: MaskOrigin | None

    @property
    def has_block_mask(self) -> bool:
        return self.mask_origin is not None

    @property
    def depends_on_order(self) -> bool:
        return self.is_causal or self.has_block_mask


torch.library.define(
    "ringspan::plans_of_call",
    "(Tensor q, Tensor k, Tensor? mask_number, Tensor style_number, Tensor? state_number, bool is_causal) -> Tensor",
)


@torch.library.impl("ringspan::plans_of_call", "CompositeExplicitAutograd")
def _plans_of_call(
    q: Tensor, k: Tensor, mask_number: Tensor | None, style_number: Tensor, state_number: Tensor | None, is_causal: bool
) -> Tensor:
    contexts = _contexts.get(int(style_number))
    if contexts is None:
        raise InputError("the module that this program was compiled from was deleted: keep it")
    origin = None if mask_number is None else origin_of_number(mask_number)
    settings = nullcontext() if state_number is None else settings_at(int(state_number), contexts.shardings)
    hold_settings(contexts.shardings)
    block = innermost_block(contexts.mesh)
    if state_number is not None:
        call = (int(style_number), None if mask_number is None else int(mask_number), is_causal, q.shape[2], k.shape[2])
        block = STATES.block_of_call(int(state_number), call, block)
    # Planning evaluates the user's mask_mod by torch.vmap, which the dispatcher has turned off inside an operator.
    with settings, disable_torch_function(), default_dispatch_keys(), torch.inference_mode(torch.is_inference_mode_enabled()):
        return ids_of(MaskFromCallMode(contexts, block=block).handles_of(TracedCall(q, k, is_causal, origin)), q.shape[0])


@torch.library.register_fake("ringspan::plans_of_call")
def _(
    q: Tensor, k: Tensor, mask_number: Tensor | None, style_number: Tensor, state_number: Tensor | None, is_causal: bool
) -> Tensor:
    return style_number.new_empty((q.shape[0],))
