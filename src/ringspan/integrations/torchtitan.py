"""Run the context parallelism of ``torchtitan`` on ringspan.

::

    torchrun ... -m torchtitan.train ... --parallelism.context_parallel_degree 8 \\
        --override.imports ringspan.integrations.torchtitan.flex

``flex``, ``varlen`` and ``sdpa`` are overrides of torchtitan: each replaces the inner attention of that name by one
that attends over the ranks of the ``cp`` axis. Activating one also replaces ``prepare_context_parallel_input``, which
shards the batch, and ``apply_cp_to_forward``. Packed documents, sliding windows, ``score_mod`` and sinks
(``out_transform``) are exact, and the ranks need not divide the sequence. Without context parallelism the modules
compute what torchtitan's do.

torchtitan gathers keys and values over the ``cp`` axis before inner attention, by its ``sharding_config``. The
overrides remove this: inner attention gets the tokens of this rank. A model that shards its batch in another way (Flux)
raises.

Legend: B batch, L tokens of this rank, N heads, H head dim; as in torchtitan.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.errors import UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.flex import mask_of
from ringspan.masks import Mask, causal, documents, mask_mod, window

# -- masks: one for each kind of layer, on one layout ------------------------------------------------------------------


class LayerBlock:
    """The mask of a kind of layer and the layout of the batch, in place of a BlockMask or VarlenMetadata."""

    def __init__(self, block: ContextParallel) -> None:
        self.block = block
        self._windows: dict[tuple[int, int], ContextParallel] = {}

    def narrowed(self, size: tuple[int, int]) -> ContextParallel:
        """Return the block whose queries see ``size`` = (left, right) tokens; -1 is all. As in ``varlen_attn``."""
        if size not in self._windows:
            left, right = (None if n < 0 else n for n in size)
            has_window = left is not None or right is not None
            self._windows[size] = self.block.with_mask(self.block.mask & window(left, right)) if has_window else self.block
        return self._windows[size]


def prepare_context_parallel_input(
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: DeviceMesh,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Shard the batch, and replace the masks of the model by those of the plan.

    The arguments are those of torchtitan. The layout is that of ringspan's planner: ``load_balancer_type`` and
    ``ptrr_mask_key`` are not used.
    """
    positions_BL: Tensor = extra_kwargs["positions"]
    given = extra_kwargs.get("attention_masks")
    masks = {key: _mask(x, positions_BL) for key, x in _items(given)}
    widest = max(masks.values(), key=lambda mask: mask.area)
    cp = ContextParallel(cp_mesh, widest)
    blocks = {key: LayerBlock(cp if mask is widest else cp.with_mask(mask)) for key, mask in masks.items()}
    inputs, labels, positions = cp.shard(inputs, labels, positions_BL, dim=1)
    changed = {**extra_kwargs, "positions": positions, "attention_masks": blocks if isinstance(given, Mapping) else blocks[""]}
    return inputs, labels, changed


def _items(given: Any) -> list[tuple[str, Any]]:
    return list(given.items()) if isinstance(given, Mapping) else [("", given)]


def _mask(given: Any, positions_BL: Tensor) -> Mask:
    """Return the mask of the whole sequence that a model has made for a kind of layer; None for one it does not use.

    VarlenMetadata has the documents of all rows in one list, and no causality: that is part of the layer's window. The
    documents are found in the positions, as torchtitan does. A model without masks (SDPA) is causal.
    """
    from torch.nn.attention.flex_attention import BlockMask
    from torchtitan.models.common.attention import VarlenMetadata

    length = positions_BL.shape[1]
    if isinstance(given, BlockMask):
        return mask_of(given, (length, length))
    if isinstance(given, VarlenMetadata):
        return _documents(positions_BL)
    if given is None:
        return causal(length)
    raise UnplannedAttention(
        f"the attention mask of this model is a {type(given).__name__}: under context parallelism it must be a BlockMask, "
        "VarlenMetadata, or None for causal attention"
    )


def _documents(positions_BL: Tensor) -> Mask:
    """Return the mask of the documents, each of which starts where the positions are 0."""
    ids_BL = (positions_BL == 0).cumsum(dim=1)
    if bool((ids_BL == ids_BL[:1]).all()):
        starts = torch.nonzero(positions_BL[0] == 0).flatten().tolist()
        ends = [*starts[1:], positions_BL.shape[1]]
        lengths = [end - start for start, end in zip(starts, ends, strict=False)]  # without starts, no lengths
        before_the_first = positions_BL.shape[1] - sum(lengths)
        return documents([before_the_first, *lengths] if before_the_first else lengths, causal=False)
    return mask_mod(lambda b, h, q, k: ids_BL[b, q] == ids_BL[b, k], positions_BL.shape[1], batch=len(ids_BL))


# -- inner attention ---------------------------------------------------------------------------------------------------


@cache
def context_parallel_class(base: Any) -> Any:
    """Return a subclass of an inner attention of torchtitan that attends over the ranks of the ``cp`` axis."""

    class RingspanAttention(base):
        is_context_parallel = False

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            pass

        def parallelize(self, parallel_dims: Any) -> None:
            super().parallelize(parallel_dims)
            self.is_context_parallel = parallel_dims.cp_enabled

        def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any = None, **kwargs: Any) -> Any:
            if isinstance(attention_masks, LayerBlock):
                block = attention_masks.narrowed(tuple(getattr(self, "window_size", (-1, -1))))
                return _attend(q_BLNH, k_BLNH, v_BLNH, block, **kwargs)
            if self.is_context_parallel:
                raise UnplannedAttention(
                    f"{type(self).__name__} is context-parallel, but its batch was not sharded by "
                    "prepare_context_parallel_input of ringspan.integrations.torchtitan. This model shards in another way, "
                    "which is not supported"
                )
            return super().forward(q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, **kwargs)

    RingspanAttention.__name__ = RingspanAttention.__qualname__ = f"Ringspan{base.__name__}"
    return RingspanAttention


def _attend(
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    v_BLNH: Tensor,
    block: ContextParallel,
    *,
    scale: float | None = None,
    score_mod: Any = None,
    out_transform: Any = None,
    is_causal: bool = True,
    enable_gqa: bool = False,
) -> Tensor:
    import spmd_types

    if not is_causal:
        raise UnplannedAttention("this layer is not causal, but the batch was sharded for causal attention")
    q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    if score_mod is None and out_transform is None:
        with spmd_types.no_typecheck():
            out_BNLH = block.attention(q_BNLH, k_BNLH, v_BNLH, scale=scale)
        return _typed_as(out_BNLH.transpose(1, 2), q_BLNH)
    with spmd_types.no_typecheck():
        found: Any = block.flex_attention(q_BNLH, k_BNLH, v_BNLH, score_mod, scale=scale, enable_gqa=True, return_lse=True)
    out_BNLH, lse_BNL = found
    out_BLNH = _typed_as(out_BNLH.transpose(1, 2), q_BLNH)
    return out_BLNH if out_transform is None else out_transform(out_BLNH, lse_BNL.transpose(1, 2))


def _typed_as(out: Tensor, q: Tensor) -> Tensor:
    """Give a result the SPMD type of the queries, if torchtitan checks types."""
    import spmd_types
    from spmd_types.runtime import get_partition_spec
    from torchtitan.distributed.utils import get_spmd_backend

    if get_spmd_backend() == "spmd_types" and spmd_types.is_type_checking():
        spmd_types.assert_type(out, spmd_types.get_local_type(q), get_partition_spec(q))
    return out


# -- overrides ---------------------------------------------------------------------------------------------------------


def apply_cp_to_forward(attention_modules: Sequence[Any], cp_mesh: DeviceMesh) -> None:
    """Mark the inner attention modules of a model as context-parallel. Called by torchtitan when it builds a model."""
    others = {type(module).__name__ for module in attention_modules if not hasattr(module, "is_context_parallel")}
    if others:
        raise UnplannedAttention(
            f"this model has inner attention that no override of ringspan replaces: {', '.join(sorted(others))}. Add "
            "ringspan.integrations.torchtitan.flex, .varlen or .sdpa to --override.imports"
        )
    for module in attention_modules:
        module.is_context_parallel = True


def flex(config: Any) -> Any:
    """Replace FlexAttention. An override of torchtitan."""
    return _replaced(config, "FlexAttention")


def varlen(config: Any) -> Any:
    """Replace VarlenAttention. An override of torchtitan."""
    return _replaced(config, "VarlenAttention")


def sdpa(config: Any) -> Any:
    """Replace ScaledDotProductAttention. An override of torchtitan."""
    return _replaced(config, "ScaledDotProductAttention")


def _replaced(config: Any, name: str) -> Any:
    """Return the config of ringspan's attention, in which keys and values are not gathered over the ``cp`` axis."""
    from torchtitan.config.override import derive
    from torchtitan.models.common import attention

    install()
    changed: Any = derive(config, context_parallel_class(getattr(attention, name)).Config)
    sharding = getattr(changed, "sharding_config", None)
    if sharding is not None and sharding.in_src_shardings is not None:
        kept = dict(sharding.in_src_shardings)
        local_map = sharding.local_map
        if local_map is not None:
            local_map = replace(local_map, in_grad_placements=tuple(kept.values()))
        changed.sharding_config = replace(sharding, in_dst_shardings=kept, local_map=local_map)
    return changed


def install() -> None:
    """Replace torchtitan's functions of context parallelism, in every module that has imported them by name."""
    from torchtitan.distributed.context_parallel import api

    for ours in (prepare_context_parallel_input, apply_cp_to_forward):
        original = getattr(api, ours.__name__)
        for module in list(sys.modules.values()):
            is_titan = getattr(module, "__name__", "").startswith("torchtitan") and module is not api
            if is_titan and getattr(module, ours.__name__, None) is original:
                setattr(module, ours.__name__, ours)


def register() -> None:
    """Register the overrides with torchtitan, under the names of this module."""
    from torchtitan.config.override import override
    from torchtitan.models.common import attention

    about = "attention over the cp axis by ringspan"
    override(target=attention.FlexAttention.Config, description=about)(flex)
    override(target=attention.VarlenAttention.Config, description=about)(varlen)
    override(target=attention.ScaledDotProductAttention.Config, description=about)(sdpa)


if find_spec("torchtitan") is not None:  # torchtitan imports this module to find its overrides
    register()
