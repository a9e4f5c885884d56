"""``_ContextParallel``: a style for ``parallelize_module`` that makes a module's attention context-parallel."""

from __future__ import annotations

import threading
from enum import Enum
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ringspan.compat.attention import MaskFromCallMode
from ringspan.compat.context_cache import ContextCache
from ringspan.compat.style_hooks import StyleHooks
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
        contexts, entered = ContextCache(mesh), _EnteredModes()

        def enter_mode(module: nn.Module, args: Any) -> None:
            mode = MaskFromCallMode(contexts)
            mode.__enter__()
            entered.modes.append(mode)

        def exit_mode(module: nn.Module, args: Any, result: Any) -> None:
            entered.modes.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter_mode)
        module.register_forward_hook(exit_mode, always_call=True)  # also if forward raises
        return module


class _EnteredModes(threading.local):
    """The modes that the current thread has entered for one module: several if the module calls itself.

    A torch function mode belongs to the thread that entered it, and must be exited there.
    """

    def __init__(self) -> None:
        self.modes: list[MaskFromCallMode] = []
