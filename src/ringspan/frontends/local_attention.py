"""``local_attention``: attention to this rank's keys only, inside a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch

from ringspan.debugging.settings import settings
from ringspan.errors import UnplannedAttention
from ringspan.frontends.attention_block import AttentionCatcher, mark_as_used, treatment_of
from ringspan.frontends.graph_attention import MarkLocal
from ringspan.frontends.recompute import Entry, check_no_other_task, check_not_suspended, note_entry, note_exit
from ringspan.torch_private.flex_interception import FlexInterceptor, intercepted_flex_attention
from ringspan.torch_private.function_modes import function_mode_stack, remove_mode, without_modes


class local_attention:  # noqa: N801 (used as `with local_attention():`)
    """Disable the ``with cp:`` blocks of this thread, for layers that are not part of the split sequence.

    It removes the blocks from this thread's stack of torch function modes. Other modes, such as that of
    ``torch.set_default_device``, stay on it. One instance may be entered again, and by several threads.
    """

    def __enter__(self) -> Self:
        # Not is_compiling(), which is True in every thread while one of them compiles (from torch 2.13 on).
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            # The program would call attention inside the block, which intercepts it. Raising makes the compiler leave
            # the function to eager code, or report that it cannot.
            raise UnplannedAttention(
                "local_attention() inside a compiled function: open it around the call of the compiled function, or compile "
                "without this layer"
            )
        check_no_other_task()
        mark_as_used()  # that this attention is local is intended
        has_blocks = any(isinstance(mode, AttentionCatcher) for mode in function_mode_stack())
        entry = note_entry(self, hides_others=True)
        removed = _without_blocks(entry if has_blocks and entry.generators else None)  # which may be suspended
        removed.__enter__()
        _entered.contexts.append(removed)
        return self

    def __exit__(self, *raised: Any) -> None:
        note_exit(self)
        _entered.contexts.pop().__exit__(*raised)


@contextmanager
def _without_blocks(entry: Entry | None) -> Iterator[None]:
    with (
        without_modes(of=AttentionCatcher),
        MarkLocal() if settings.strict else nullcontext(),
        nullcontext() if entry is None else _RefusesCallers(entry),
    ):
        yield


class _RefusesCallers(FlexInterceptor):
    """Raises for attention of the caller of a suspended generator, which is not inside ``local_attention()``."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self._entry = entry

    def __exit__(self, *raised: Any) -> None:
        remove_mode(self)  # the caller may have entered a mode since

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_dynamo_compiling() and treatment_of(func) in ("attention", "multi-head"):
            check_not_suspended(self._entry)
        return func(*args, **(kwargs or {}))

    def intercept_flex_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_not_suspended(self._entry)
        with without_modes(down_to=self):
            return intercepted_flex_attention(*args, **kwargs)


class _EnteredContexts(threading.local):
    """The contexts that the current thread has entered for ``local_attention``, the innermost last.

    Each holds the modes that it took off the stack of its own thread, and must put them back there. It is made once for
    the module, because Dynamo cannot trace the making of a ``threading.local``.
    """

    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[None]] = []


_entered = _EnteredContexts()
