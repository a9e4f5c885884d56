"""The version counter of a tensor, which counts in-place changes. Does not import PyTorch."""

from __future__ import annotations

from operator import attrgetter

# Raises RuntimeError for an inference tensor, which has no version.
tensor_version = attrgetter("_version")
