"""Nested containers of tensors."""

from __future__ import annotations

from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_map_with_path,
    tree_unflatten,
)

__all__ = ["keystr", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_map_with_path", "tree_unflatten"]
