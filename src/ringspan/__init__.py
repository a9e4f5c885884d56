"""ringspan: exact attention over one sequence that is split across many devices.

    import ringspan as rs

    mask = rs.documents(lengths) & rs.window(left=4096)
    cp = rs.ContextParallel(mesh["cp"], mask)
    tokens, labels = cp.shard(tokens, labels, dim=1)
    with cp:
        logits = model(tokens, positions=cp.positions())

Without processes: ``rs.LocalWorld(4).attention(q, k, v, mask=mask)``.
Without tensors: ``rs.plan(mask, world=64, rank=17).explain()``.
"""

from typing import Any

from ringspan.caching import clear_caches
from ringspan.costs import Hardware
from ringspan.errors import (
    InputError,
    KernelError,
    LayoutError,
    MaskError,
    ParityError,
    PeerFailed,
    PeerLost,
    PeerMismatch,
    PeerTimeout,
    PlanError,
    RingspanError,
    TransportError,
    UnknownKernel,
    UnplannedAttention,
)
from ringspan.frontends import (
    ContextParallel,
    LocalWorld,
    Parity,
    Targets,
    Trie,
    activate,
    alibi,
    alibi_slopes,
    attention,
    available,
    check_parity,
    current,
    flex_attention,
    fold,
    interleave,
    local_attention,
    old_names,
    relative_bias,
    restore,
    sdpa,
    shift_labels,
    softcap,
    strict,
    tiled,
    with_sinks,
)
from ringspan.kernels import Partial, merge
from ringspan.layouts import Layout, Span
from ringspan.masks import (
    Band,
    Mask,
    block_mask,
    causal,
    chunked,
    documents,
    full,
    mask_mod,
    per_row,
    prefix,
    sliding_window,
    tree,
    window,
)
from ringspan.planner import Microbatch, Plan, best_on, pack, plan
from ringspan.plans import Shape
from ringspan.strategies import Exchange, Gather, Hierarchical, Hybrid, Interleave, PassQ, Ring, Ulysses
from ringspan.transports import FlightRecord, flight_record
from ringspan.version import __version__ as __version__

old_names.install()


def __getattr__(name: str) -> Any:
    """Import ``rs.compat`` on first use: it needs parts of PyTorch that most programs do not import."""
    if name == "compat":
        import importlib

        return importlib.import_module("ringspan.compat")
    raise AttributeError(f"module 'ringspan' has no attribute {name!r}")


__all__ = [
    "Band",
    "ContextParallel",
    "Exchange",
    "FlightRecord",
    "Gather",
    "Hardware",
    "Hierarchical",
    "Hybrid",
    "InputError",
    "Interleave",
    "KernelError",
    "Layout",
    "LayoutError",
    "LocalWorld",
    "Mask",
    "MaskError",
    "Microbatch",
    "Parity",
    "ParityError",
    "Partial",
    "PassQ",
    "PeerFailed",
    "PeerLost",
    "PeerMismatch",
    "PeerTimeout",
    "Plan",
    "PlanError",
    "Ring",
    "RingspanError",
    "Shape",
    "Span",
    "Targets",
    "TransportError",
    "Trie",
    "Ulysses",
    "UnknownKernel",
    "UnplannedAttention",
    "activate",
    "alibi",
    "alibi_slopes",
    "attention",
    "available",
    "best_on",
    "block_mask",
    "causal",
    "check_parity",
    "chunked",
    "clear_caches",
    "compat",
    "current",
    "documents",
    "flex_attention",
    "flight_record",
    "fold",
    "full",
    "interleave",
    "local_attention",
    "mask_mod",
    "merge",
    "pack",
    "per_row",
    "plan",
    "prefix",
    "relative_bias",
    "restore",
    "sdpa",
    "shift_labels",
    "sliding_window",
    "softcap",
    "strict",
    "tiled",
    "tree",
    "window",
    "with_sinks",
]
