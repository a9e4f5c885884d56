"""The names and signatures of ``torch.distributed.tensor.experimental``'s context parallelism, implemented by ringspan.

To migrate, change the import::

    from ringspan.compat import context_parallel, context_parallel_unshard, set_rotate_method

    with context_parallel(mesh["cp"], buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
        loss = model(tokens, labels)
        loss.backward()
"""

from ringspan.compat.balancers import (
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from ringspan.compat.block import (
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    context_parallel,
)
from ringspan.compat.causal_behavior import _CausalBehavior, _is_causal_behavior
from ringspan.compat.gather import flex_cp_allgather
from ringspan.compat.options import _cp_options, _RotateMethod, set_rotate_method
from ringspan.compat.sharding import _context_parallel_shard, context_parallel_unshard
from ringspan.compat.style import _ContextParallel

__all__ = [
    "_CausalBehavior",
    "_ContextParallel",
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_PTRRLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer",
    "_RotateMethod",
    "_context_parallel_shard",
    "_cp_options",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "_is_causal_behavior",
    "context_parallel",
    "context_parallel_unshard",
    "flex_cp_allgather",
    "set_rotate_method",
]
