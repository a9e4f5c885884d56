"""The block that is open in this thread, for adapters that compute attention themselves."""

from __future__ import annotations

from ringspan.errors import UnplannedAttention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.recompute import check_no_suspended_generator, entered_blocks
from ringspan.torch_private.dynamo import dynamo_disable


@dynamo_disable
def current_block() -> ContextParallel | None:
    """Return the innermost ``with cp:`` block of this thread; None outside of blocks and in ``local_attention()``.

    Raises if a generator is suspended inside it.
    """
    check_no_suspended_generator()
    blocks = entered_blocks()
    if not blocks:
        return None
    if not isinstance(blocks[-1], ContextParallel):
        raise UnplannedAttention(
            f"this call needs a block of rs.ContextParallel, and the innermost open block is a {type(blocks[-1]).__name__}"
        )
    return blocks[-1]
