"""``_ContextParallel``: a style for ``parallelize_module``, by which a module's attention sees all ranks' keys."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ringspan.compat.attention import MaskFromTheCall
from ringspan.compat.contexts import Contexts
from ringspan.errors import InputError


class _ContextParallel(ParallelStyle):
    """Every attention call in the module's ``forward`` is context-parallel, over the shards of ``_context_parallel_shard``.

    Arguments reach the module as they were passed, by position or by keyword, and need not be queries, keys and values.
    Attention always has its tokens on the last dim but one, so ``seq_dim`` is only kept. (torch's style is made of hooks that
    exchange keys, or make DTensors, before the module is called. There are none here: the calls inside are caught.)
    """

    class AttentionType(Enum):
        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"

    def __init__(self, seq_dim: int, attention_type: AttentionType) -> None:
        super().__init__()
        if not isinstance(attention_type, self.AttentionType):
            raise InputError(f"attention_type must be one of {', '.join(map(str, self.AttentionType))}, not {attention_type!r}")
        self.seq_dim = seq_dim
        self.attention_type = attention_type

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        contexts = Contexts(mesh)
        opened: list[MaskFromTheCall] = []

        def open_block(module: nn.Module, args: Any) -> None:
            opened.append(MaskFromTheCall(contexts, {}))
            opened[-1].__enter__()

        def close_block(module: nn.Module, args: Any, result: Any) -> None:
            opened.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(open_block)
        module.register_forward_hook(close_block, always_call=True)  # whatever way forward is left
        return module
