"""Data of all ranks: JSON values, and digests of tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ringspan.transports import ProcessGroupTransport
from ringspan.user_functions.values import values_digest


def gather(value: Any, group: ProcessGroupTransport, device: torch.device) -> list[Any]:
    """Return the values of all ranks, in rank order. A value is what JSON can represent."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    counts = [n for (n,) in group.all_gather_ints([len(data)], device, label="check_parity")]
    parts = group.all_gather_rows(data, counts, label="check_parity")
    return [json.loads(bytes(part.tolist())) for part in parts]


def first_difference(tensors: Iterable[tuple[str, Tensor]], group: ProcessGroupTransport, device: torch.device) -> list[str]:
    """Return the names of the tensors that differ between ranks, or that some ranks do not have."""
    by_rank = gather({name: values_digest([], [x]) for name, x in tensors}, group, device)
    names = dict.fromkeys(name for digests in by_rank for name in digests)
    return [name for name in names if len({digests.get(name) for digests in by_rank}) > 1]
