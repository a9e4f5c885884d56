"""Nodes of the autograd graph: the shapes of their forward results, and their metadata."""

from __future__ import annotations

from typing import Any

from torch.autograd.graph import Node


def output_shapes(node: Node) -> list[tuple[int, ...]]:
    """Return the shapes of a node's forward results. Unlike saved tensors, reading them runs no hooks."""
    return [tuple(metadata.shape) for metadata in node._input_metadata if metadata is not None]


def metadata_of(node: Node) -> dict[str, Any]:
    """Return the dict that belongs to a node. PyTorch declares a method, but it is a property."""
    found: Any = node.metadata
    return found
