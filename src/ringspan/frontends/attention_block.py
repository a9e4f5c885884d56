"""The ``with`` block: PyTorch's own attention calls become context-parallel, by a torch function mode.

A mode belongs to the thread that entered it, nests, and is removed however the block is left. It passes on the calls of
other tasks of its thread: a block belongs to the task that entered it. PyTorch is not patched, except for
``flex_attention``, which no mode can intercept (:mod:`ringspan.torch_private.flex_interception`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.engine import before_operator
from ringspan.errors import InputError, UnplannedAttention
from ringspan.frontends.handwritten_attention import USE_RINGSPAN
from ringspan.frontends.multihead import multi_head_attention
from ringspan.frontends.recompute import (
    check_no_other_task,
    entered_blocks,
    is_entered_here,
    keep_blocks,
    keep_entered_blocks,
    note_entry,
    note_exit,
    was_absent_in_forward,
)
from ringspan.frontends.treatments import (
    REFUSED,
    Treatment,
    find_treatment,
    is_attention_of_another_package,
    is_varlen_attention,
    name_of,
    treatments,
)
from ringspan.frontends.validate import unequal_heads
from ringspan.frontends.varlen import VarlenCall
from ringspan.masks import Mask
from ringspan.torch_private.checkpoints import innermost_hooks
from ringspan.torch_private.dynamo import dynamo_constant
from ringspan.torch_private.flex_interception import (
    FlexInterceptor,
    flex_attention,
    flex_interception_unsupported_reason,
    install_flex_interception,
    intercepted_flex_attention,
    replace_code_if_imported,
)
from ringspan.torch_private.function_modes import (
    function_mode_at,
    function_mode_depth,
    function_mode_stack,
    remove_mode,
    without_modes,
)
from ringspan.torch_private.script_calls import ScriptWatcher, install_script_watching


@dynamo_constant
def treatment_of(func: Any) -> Treatment:
    try:
        return treatments[func]
    except (KeyError, TypeError):  # a new function, or one that is not hashable
        return find_treatment(func)


class AttentionCatcher(FlexInterceptor, ScriptWatcher):
    """Passes every attention call in the block to :meth:`caught`, except those within ``local_attention()``.

    Dynamo traces the methods of this class along with the model.
    """

    was_used = False
    """Whether attention was intercepted in the block, or in a block inside it, since the object was made."""

    def __enter__(self) -> Self:
        if not torch.compiler.is_dynamo_compiling():
            install_flex_interception()
            install_script_watching()
            note_entry(self)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            note_exit(self)
            if function_mode_at(function_mode_depth() - 1) is not self:
                remove_mode(self)  # another task, or a generator, has entered a block since and is suspended inside it
                return
        super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        treatment = treatment_of(func)
        if treatment is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if treatment == "unflatten":
            return torch.unflatten(*args, **kwargs)  # the method calls super(), which Dynamo cannot trace under a mode
        if treatment == "watched":
            result = func(*args, **kwargs)
            if not torch.compiler.is_dynamo_compiling() and is_entered_here(self) and not self._was_absent_in_forward():
                self.watch(func, args, kwargs, result)
            return result
        if not torch.compiler.is_dynamo_compiling() and not is_entered_here(self):
            return func(*args, **kwargs)  # reaches the blocks of this task
        if treatment != "runs functions":
            if self._was_absent_in_forward():
                return func(*args, **kwargs)
            self._note_call()
            try:
                if treatment == "attention":
                    return self.caught(func, args, kwargs)
                return multi_head_attention(self._sdpa, *args, **kwargs)
            except Exception as error:
                self.refuse(error)
                raise
        with self:
            pass  # Dynamo lets a traced function enter the mode only if it has been entered before
        args = tuple(self._inside(x) if callable(x) else x for x in args)
        return func(*args, **kwargs)

    def _sdpa(self, *args: Any, **kwargs: Any) -> Any:
        return self.caught(F.scaled_dot_product_attention, args, kwargs)

    def _inside(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that it runs inside the block. PyTorch disables a mode during its
        ``__torch_function__``."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return body(*args, **kwargs)

        return inside

    def intercept_flex_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with without_modes(down_to=self):
            if not is_entered_here(self) or self._was_absent_in_forward():
                return intercepted_flex_attention(*args, **kwargs)  # by the blocks of this task, if any
            self._note_call()
            try:
                return self.caught(flex_attention, args, kwargs)
            except Exception as error:
                self.refuse(error)
                raise

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks of a call that this rank has refused, if the block has a group. They would wait for its
        messages."""

    def _was_absent_in_forward(self) -> bool:
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            return False
        return was_absent_in_forward(self)

    def _note_call(self) -> None:
        """Mark the blocks around an attention call as used, and let a checkpoint around it run again inside them."""
        # A compiled checkpoint recomputes the traced operators, not the function.
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            mark_as_used()
            return
        if not self.was_used:
            mark_as_used()
        if torch.is_grad_enabled() and innermost_hooks(True) is None:  # the common case: no checkpoint is around the call
            return
        # A mode is off the stack while it handles a call.
        keep_blocks([*(mode for mode in function_mode_stack() if isinstance(mode, AttentionCatcher)), self])
        self.keep_settings()

    def before_script_call(self, name: str, operators: tuple[str, ...]) -> None:
        """Raise if a TorchScript function computes attention, which no mode can intercept."""

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Inspect a call of a function that is not attention, and raise if it needs the tokens of other ranks."""

    def keep_settings(self) -> None:
        """Store settings of the process that :meth:`caught` reads, for the recomputation of a checkpoint around the
        call."""

    def mark_as_used(self) -> None:
        """Mark the blocks around a call of one of this object's own methods as used."""
        if not torch.compiler.is_dynamo_compiling() and not self.was_used:
            mark_as_used()
            self.was_used = True

    @abstractmethod
    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an attention call. The mode is disabled meanwhile: calling ``func`` reaches the
        enclosing block."""


@dynamo_constant  # in traced code it is called once, while tracing
def mark_as_used() -> None:
    for block in entered_blocks():
        if isinstance(block, AttentionCatcher):
            block.was_used = True


def _before_compiled_call() -> None:
    """Note the call for the blocks. Compiled code calls the operator without passing through a block, and without
    modes."""
    check_no_other_task()
    mark_as_used()
    keep_entered_blocks()


before_operator(_before_compiled_call)


class AttentionMode(AttentionCatcher):
    """Passes ``F.scaled_dot_product_attention`` to :meth:`attention`, if its arguments agree with the plan's mask.

    Passes ``flex_attention``, with all its arguments, to :meth:`flex_attention`, and ``varlen_attn`` to
    :meth:`varlen_attention`.
    """

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self._mask, self._mask_name, self._mask_has_predicate = mask, mask.name, mask.predicate is not None
        # For a mask_mod this is computed on first use, because it may evaluate many pairs.
        self._mask_is_causal = None if self._mask_has_predicate else mask.is_causal

    @abstractmethod
    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """Compute attention under the plan's mask, of q, k and v (batch, heads, tokens, dim)."""

    @abstractmethod
    def flex_attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute FlexAttention under the call's mask or, if it has none, the plan's."""

    @abstractmethod
    def varlen_attention(self, call: VarlenCall) -> tuple[Tensor, Tensor]:
        """Attention of packed documents: out and lse."""

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k, v, scale = self._checked_sdpa(*args, **kwargs)
            if q.ndim == 4:
                return self.attention(q, k, v, scale=scale)
            out = self.attention(_four_dims(q), _four_dims(k), _four_dims(v), scale=scale)
            return out.reshape(*q.shape[:-1], v.shape[-1])
        if func is flex_attention:
            return self.flex_attention(*args, **kwargs)
        name = name_of(func)
        if is_varlen_attention(func):
            # The operator's third result is the state of the random generator. varlen_attn does not return it.
            return *self.varlen_attention(VarlenCall(*args, **kwargs)), None
        if is_attention_of_another_package(func):
            raise UnplannedAttention(
                f"the operator {func} of another package would see only the keys of this rank: let the model call "
                f"F.scaled_dot_product_attention ({USE_RINGSPAN}), or wrap it in {_WRAP}"
            )
        instead = REFUSED.get(name, "call F.scaled_dot_product_attention")
        obstacle = flex_interception_unsupported_reason()
        if name == "flex_attention" and obstacle is not None:
            instead = f"this PyTorch's cannot be intercepted ({obstacle}): call cp.flex_attention with the same arguments"
        raise UnplannedAttention(f"{name} would see only the keys of this rank: {instead}, or wrap it in {_WRAP}")

    def _checked_sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, float | None]:
        """Return q, k and v, under autocast in its dtype, and the scale. Raise if the call does not agree with the
        plan."""
        if attn_mask is not None:
            raise UnplannedAttention(
                f"this call has an attn_mask of shape {tuple(attn_mask.shape)} that is not part of the plan "
                f"(its mask is {self._mask_name}). "
                f"{MASK_ADVICE}, and call without attn_mask (for a model of transformers, import "
                f'ringspan.integrations.transformers and set_attn_implementation("ringspan")); or wrap the call in {_WRAP}'
            )
        if dropout_p:
            raise UnplannedAttention(
                f"this call has dropout_p={dropout_p}, but the ranks cannot drop the same pairs as one process. Set it to 0"
            )
        if is_causal and self._mask_is_causal is None:
            self._mask_is_causal = self._mask.is_causal
        if is_causal and not self._mask_is_causal:
            raise UnplannedAttention(
                f"this call has is_causal=True, but the plan's mask {self._mask_name} lets queries see later keys. "
                "Give ContextParallel a mask with & rs.causal(), or call with is_causal=False"
            )
        if query.ndim < 3 or key.ndim != query.ndim or value.ndim != query.ndim:
            raise InputError(
                f"q, k and v must be (..., heads, tokens, dim): got {query.ndim}, {key.ndim} and {value.ndim} dims"
            )
        if query.ndim > 3 and query.shape[-3] != key.shape[-3] and not enable_gqa:
            raise unequal_heads(query.shape[-3], key.shape[-3])
        return *under_autocast(query, key, value), scale


MASK_ADVICE = "Give the mask to ContextParallel"
_WRAP = "`with rs.local_attention():` if this layer is not part of the split sequence"


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the tensors as autocast does for PyTorch's own attention."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) if x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def _four_dims(x: Tensor) -> Tensor:
    """Reshape (…, heads, tokens, dim) to (batch, heads, tokens, dim)."""
    return x.unsqueeze(1) if x.ndim == 3 else x.flatten(0, -4)


# Before anything is compiled, if possible: replacing the code later costs a recompilation.
replace_code_if_imported()
