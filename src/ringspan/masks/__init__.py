"""Masks: which query sees which key, as sets of bands. Operations cost O(bands), independent of the length."""

from ringspan.masks.band import Band
from ringspan.masks.batch import BatchMask, per_row
from ringspan.masks.block_mask import block_mask
from ringspan.masks.causal import causal
from ringspan.masks.chunked import chunked
from ringspan.masks.documents import documents
from ringspan.masks.full import full
from ringspan.masks.mask import Mask
from ringspan.masks.mask_mod import mask_mod
from ringspan.masks.predicate import Predicate
from ringspan.masks.prefix import prefix
from ringspan.masks.table import MAX_LENGTH
from ringspan.masks.tree import tree
from ringspan.masks.window import sliding_window, window

__all__ = [
    "MAX_LENGTH",
    "Band",
    "BatchMask",
    "Mask",
    "Predicate",
    "block_mask",
    "causal",
    "chunked",
    "documents",
    "full",
    "mask_mod",
    "per_row",
    "prefix",
    "sliding_window",
    "tree",
    "window",
]
