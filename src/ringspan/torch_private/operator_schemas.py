"""The schema of an operator: which of its arguments it writes to."""

from __future__ import annotations

from typing import Any


def written_arguments(operator: Any) -> list[int]:
    """Return the indices of the arguments of a ``torch.ops`` overload that it writes to."""
    arguments = operator._schema.arguments
    return [index for index, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]
