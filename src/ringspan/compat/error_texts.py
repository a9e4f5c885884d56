"""Error messages of the rest of ringspan, with the names of torch's functions in their advice."""

from __future__ import annotations

from ringspan.errors import RingspanError
from ringspan.frontends.attention_block import MASK_ADVICE
from ringspan.transports.handshake import SHARD_ADVICE

_SHARD_ADVICE = (
    "shard it with _context_parallel_shard, or make it one of the buffers of context_parallel(buffers=...); attention that is "
    "not split belongs in `with rs.local_attention():`"
)
_MASK_ADVICE = "Use `with rs.ContextParallel(mesh, mask):` instead of context_parallel"
_ADVICE = {SHARD_ADVICE: _SHARD_ADVICE, MASK_ADVICE: _MASK_ADVICE}


def in_torchs_names(error: RingspanError) -> RingspanError | None:
    """Return the error with the advice for users of torch's functions, or None if it has no advice to replace."""
    text = str(error)
    for advice, in_torchs in _ADVICE.items():
        if advice in text:
            return type(error)(text.replace(advice, in_torchs))
    return None
