"""``_ContextParallel``: a style for ``parallelize_module`` that makes a module's attention context-parallel."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ringspan.compat.attention import MaskFromCallMode
from ringspan.compat.context_cache import ContextCache
from ringspan.compat.meshes import innermost_block
from ringspan.compat.style_hooks import StyleHooks
from ringspan.compat.traced_style import TracedStyleMode
from ringspan.errors import InputError


class _ContextParallel(StyleHooks, ParallelStyle):
    """Every attention call in the module's ``forward`` is context-parallel over shards of ``_context_parallel_shard``.

    The module receives its arguments unchanged; they need not be queries, keys and values. Attention always has its
    tokens on dim -2, so ``seq_dim`` is stored and not used. torch's style has hooks that gather keys or make DTensors
    before the module is called. Here a torch function mode intercepts the attention calls inside the module instead.
    """

    class AttentionType(Enum):
        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"

    def __init__(self, seq_dim: int, attention_type: AttentionType) -> None:
        super().__init__()
        # torch's own members have the same names.
        if not isinstance(attention_type, Enum) or attention_type.name not in self.AttentionType.__members__:
            raise InputError(f"attention_type must be one of {', '.join(map(str, self.AttentionType))}, not {attention_type!r}")
        self.seq_dim = seq_dim
        self.attention_type = self.AttentionType[attention_type.name]

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        contexts = ContextCache(mesh)
        traced, inner = TracedStyleMode(contexts), _function_of(module)

        def eager() -> MaskFromCallMode:
            return MaskFromCallMode(contexts, traced, block=innermost_block(mesh))

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with traced if torch.compiler.is_dynamo_compiling() else eager():
                return inner(self, *args, **kwargs)

        # Not hooks: after a graph break Dynamo takes a mode that a hook has entered off the stack. A method, so that a
        # copy of the module has its own.
        module.forward = MethodType(forward, module)
        return module


def _function_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function of ``module.forward``, which takes the module as its first argument."""
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return forward.__func__
    return lambda self, *args, **kwargs: forward(*args, **kwargs)
