"""FlashAttention-4 (``flash_attn.cute.interface``): its entry points and where it keeps compiled kernels.

Does not import PyTorch.
"""

from __future__ import annotations

from operator import attrgetter

# interface module -> function (q, k, v, **options) -> (out, lse, …). Releases differ only in what follows these two.
forward_of = attrgetter("_flash_attn_fwd")
# interface module -> function (q, k, v, out, dout, lse, **options) -> (dq, dk, dv, …).
backward_of = attrgetter("_flash_attn_bwd")

# The attribute of the forward function that contains its compiled kernels.
COMPILE_CACHE = "compile_cache"
