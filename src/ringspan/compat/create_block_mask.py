"""``_create_cp_block_mask``: the BlockMask of a function of the whole sequence, sharded."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ringspan.compat.balancers import _HeadTailLoadBalancer, _LoadBalancer
from ringspan.compat.call_settings import settings_of
from ringspan.compat.options import _cp_options
from ringspan.compat.sharding import shard_mask
from ringspan.compat.shardings import shardings_of
from ringspan.masks.predicate import MaskMod

BLOCK = 128  # torch's default


def _with_block_size(
    mask_mod: MaskMod,
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    BLOCK_SIZE: tuple[int, int],
    device_mesh: DeviceMesh,
    load_balancer: _LoadBalancer | None = None,
) -> BlockMask:
    """Return the mask of this rank's queries over all keys. It carries the layout of the balancer.

    Without a balancer the tokens are in head-tail order if ``_cp_options.enable_load_balance`` is on, else contiguous.
    ``mask_mod`` is evaluated for the whole sequence, once on every rank.
    """
    balancer, is_balanced = load_balancer, settings_of(shardings_of(device_mesh.get_group())).is_balanced
    if balancer is None and is_balanced:
        balancer = _HeadTailLoadBalancer(Q_LEN, device_mesh.size(), device_mesh.device_type)
    whole = create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=device_mesh.device_type, BLOCK_SIZE=BLOCK_SIZE)
    return shard_mask(device_mesh, whole, balancer)


def _with_default_block_size(
    mask_mod: MaskMod,
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    device_mesh: DeviceMesh,
    load_balancer: _LoadBalancer | None = None,
) -> BlockMask:
    """Do the same with blocks of 128 × 128, with the arguments that torch has before 2.15."""
    return _with_block_size(mask_mod, B, H, Q_LEN, KV_LEN, (BLOCK, BLOCK), device_mesh, load_balancer)


_create_cp_block_mask = _with_block_size if torch.__version__ >= "2.15" else _with_default_block_size


def _create_default_load_balancer(seq_length: int, world_size: int, device: str | torch.device) -> _LoadBalancer | None:
    """Return a head-tail balancer if ``_cp_options.enable_load_balance`` is on, for any length; else None."""
    return _HeadTailLoadBalancer(seq_length, world_size, device) if _cp_options.enable_load_balance else None
