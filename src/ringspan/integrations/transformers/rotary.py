"""RoPE whose frequencies depend on the largest position of the batch: dynamic NTK and LongRoPE.

The largest position of this rank can be another one. So that of all ranks is appended to the positions of this rank, and
the row that is made from it is cut off::

    2 ranks, contiguous, 8 tokens      positions of rank 0: 0 1 2 3     embeddings of: 0 1 2 3 7, without the last

Legend: S tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ringspan.errors import InputError, UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.integrations.transformers.model_block import block_of_model
from ringspan.integrations.transformers.refusals import is_prepared, named_refusals
from ringspan.plans.data import Side


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module is RoPE of such a type. Models with several kinds of layers have a type for each."""
    kinds = getattr(module, "rope_type", None)
    return any(_is_dynamic(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def refuse_rotary(config: Any, tokens: int) -> None:
    """Raise if a model that was not given to ``prepare`` has such a RoPE, and the sequence is long enough for it."""
    if config is None or is_prepared(config):
        return
    for parameters in _parameters(getattr(config, "rope_parameters", None)):
        kind = parameters.get("rope_type")
        if not _is_dynamic(kind):
            continue
        limits = parameters if kind == "longrope" else vars(config)
        limit = limits.get("original_max_position_embeddings" if kind == "longrope" else "max_position_embeddings", 0)
        if tokens > limit:
            raise UnplannedAttention(
                f"{config.model_type} has RoPE of the type {kind!r}, whose frequencies above {limit} tokens depend on the "
                "largest position, and this rank has its own: call ringspan.integrations.transformers.prepare(model) first"
            )


def rotary_of_sequence(
    self: Any, original: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run the forward of RoPE. In a block, the largest position is that of all ranks."""
    block = block_of_model()
    if block is None:
        return original(self, x, position_ids, *args, **kwargs)
    with named_refusals(self, block.refuse):
        wide = _with_largest(position_ids, block)
    found = original(self, x, wide, *args, **kwargs)
    return tuple(part[..., :-1, :] for part in found) if isinstance(found, tuple) else found[..., :-1, :]


@torch.compiler.disable
def _with_largest(position_ids: Tensor, block: ContextParallel) -> Tensor:
    """Append the largest position of all ranks to position ids (..., S)."""
    count = position_ids.shape[-1]
    layouts: dict[Side, Any] = {"q": block.plan.q_layout, "kv": block.plan.kv_layout}
    sides = [side for side, layout in layouts.items() if layout.counts[block.rank] == count]
    if not sides or (len(sides) == 2 and layouts["q"] != layouts["kv"]):
        raise InputError(
            f"RoPE of this model depends on the largest position, and got {count} positions on rank {block.rank}, which has "
            f"{layouts['q'].counts[block.rank]} tokens of the sequence"
        )
    largest = block.unshard(position_ids, dim=position_ids.ndim - 1, of=sides[0]).max()
    return torch.cat([position_ids, largest.expand(*position_ids.shape[:-1], 1)], dim=-1)


def _is_dynamic(kind: Any) -> bool:
    """Return whether transformers makes the frequencies of this type of RoPE anew for a larger position."""
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def _parameters(of_config: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of RoPE in a config: one dict, or one for each kind of layer."""
    if isinstance(of_config, dict):
        if "rope_type" in of_config:
            yield of_config
        else:
            for part in of_config.values():
                yield from _parameters(part)
