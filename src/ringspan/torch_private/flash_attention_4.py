"""FlashAttention-4 (``flash_attn.cute.interface``): its entry points and where it keeps compiled kernels.

Does not import PyTorch.
"""

from __future__ import annotations

from operator import attrgetter

# interface module -> function (q, k, v, **options) -> (out, lse, …). Releases differ only in what follows these two.
forward_of = attrgetter("_flash_attn_fwd")
# interface module -> function (q, k, v, out, dout, lse, **options) -> (dq, dk, dv, …).
backward_of = attrgetter("_flash_attn_bwd")

# The attribute of a function that contains the compiled kernels that it launches, by key.
COMPILE_CACHE = "compile_cache"
# The functions whose kernels a forward and a backward pass launch. Long lists of sequences need the last one as well.
COMPILED_FUNCTIONS = (
    "_flash_attn_fwd",
    "_bwd_preprocess",
    "_flash_attn_bwd",
    "_bwd_postprocess_convert",
    "_compute_tile_cumsum",
)
