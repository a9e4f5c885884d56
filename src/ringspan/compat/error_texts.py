"""Error messages of the rest of ringspan, with the names of torch's functions in their advice."""

from __future__ import annotations

from ringspan.errors import InputError, PeerMismatch
from ringspan.transports.handshake import SHARD_ADVICE

ADVICE = (
    "shard it with _context_parallel_shard, or make it one of the buffers of context_parallel(buffers=...); attention that is "
    "not split belongs in `with rs.local_attention():`"
)


def in_torchs_names(error: InputError | PeerMismatch) -> InputError | PeerMismatch | None:
    """Return the error with the advice for users of torch's functions, or None if it does not advise to shard."""
    text = str(error)
    return type(error)(text.replace(SHARD_ADVICE, ADVICE)) if SHARD_ADVICE in text else None
