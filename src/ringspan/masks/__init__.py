"""Masks as sets of bands: who sees whom, in O(bands) whatever the length."""

from ringspan.masks.band import Band
from ringspan.masks.causal import causal
from ringspan.masks.chunked import chunked
from ringspan.masks.documents import documents
from ringspan.masks.full import full
from ringspan.masks.mask import MAX_LENGTH, Mask
from ringspan.masks.prefix import prefix
from ringspan.masks.window import window

__all__ = ["MAX_LENGTH", "Band", "Mask", "causal", "chunked", "documents", "full", "prefix", "window"]
