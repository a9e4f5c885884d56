"""The names and signatures of ``torch.distributed.tensor.experimental``'s context parallelism, implemented by ringspan.

To migrate, change the import::

    from ringspan.compat import context_parallel, context_parallel_unshard, set_rotate_method

    with context_parallel(mesh["cp"], buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
        loss = model(tokens, labels)
        loss.backward()

``docs/compat.md`` lists every name of torch's modules, what it is here, and what differs.
"""

from ringspan.compat.balancers import (
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from ringspan.compat.block import context_parallel
from ringspan.compat.causal_behavior import _CausalBehavior, _is_causal_behavior
from ringspan.compat.create_block_mask import _create_cp_block_mask, _create_default_load_balancer
from ringspan.compat.dispatch import (
    _disable_context_parallel_dispatcher,
    _dispatch_mode,
    _DispatchMode,
    _enable_context_parallel_dispatcher,
    register_cp_sharding_rules,
    unregister_cp_sharding_rules,
)
from ringspan.compat.gather import flex_cp_allgather, flex_cp_allgather_backward
from ringspan.compat.options import _ContextParallelOptions, _cp_options, _RotateMethod, set_rotate_method
from ringspan.compat.ring_attention import _templated_ring_attention, _templated_ring_attention_backward
from ringspan.compat.rotaters import _AllGatherRotater, _AllToAllRotater, _create_rotater, _RingRotater, _SDPAMerger
from ringspan.compat.sharding import _context_parallel_shard, context_parallel_unshard
from ringspan.compat.style import _ContextParallel

__all__ = [
    "_AllGatherRotater",
    "_AllToAllRotater",
    "_CausalBehavior",
    "_ContextParallel",
    "_ContextParallelOptions",
    "_DispatchMode",
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_PTRRLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer",
    "_RingRotater",
    "_RotateMethod",
    "_SDPAMerger",
    "_context_parallel_shard",
    "_cp_options",
    "_create_cp_block_mask",
    "_create_default_load_balancer",
    "_create_rotater",
    "_disable_context_parallel_dispatcher",
    "_dispatch_mode",
    "_enable_context_parallel_dispatcher",
    "_is_causal_behavior",
    "_templated_ring_attention",
    "_templated_ring_attention_backward",
    "context_parallel",
    "context_parallel_unshard",
    "flex_cp_allgather",
    "flex_cp_allgather_backward",
    "register_cp_sharding_rules",
    "set_rotate_method",
    "unregister_cp_sharding_rules",
]
