"""Tell the other ranks of a group about an error that this rank raises before it communicates.

The others may be in the call already and wait for this rank. They read its error from the store of the process group
and raise :class:`~ringspan.errors.PeerFailed`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from ringspan.errors import InputError
from ringspan.frontends.groups import groups_of
from ringspan.transports import CallDescription, ProcessGroupTransport

F = TypeVar("F", bound=Callable[..., Any])


def report_error(group: Any, kind: str, error: Exception, *, plan: str = "") -> None:
    """Tell the other ranks of ``group``, unless they know the error. ``plan`` is the digest of the plan."""
    # The compiler leaves a function that raises to eager code, which comes here again.
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return
    with suppress(InputError):  # the group may be what the error is about
        for ranks in [group] if isinstance(group, ProcessGroupTransport) else groups_of(group):
            ranks.refuse(CallDescription(kind, plan), error)


def reports_errors(kind: str) -> Callable[[F], F]:
    """Decorate a method of ContextParallel that communicates over its group, or over those given as ``over=``."""

    def decorate(method: F) -> F:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                over = kwargs.get("over")
                report_error(self.group if over is None else over, kind, error)
                raise

        return cast(F, call)

    return decorate
