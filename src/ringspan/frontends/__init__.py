"""Front ends: the functions and classes through which users call the engine."""

from ringspan.frontends import sdpa
from ringspan.frontends.attention import attention
from ringspan.frontends.context_parallel import ContextParallel
from ringspan.frontends.flex import flex_attention
from ringspan.frontends.interleaving import interleave
from ringspan.frontends.labels import shift_labels
from ringspan.frontends.local_attention import local_attention
from ringspan.frontends.local_world import LocalWorld
from ringspan.frontends.parity import Parity, check_parity
from ringspan.frontends.score_mods import alibi, alibi_slopes, relative_bias, softcap, with_sinks
from ringspan.frontends.sdpa import activate, available, current, restore
from ringspan.frontends.tiled import tiled
from ringspan.frontends.tries import Targets, Trie, fold
from ringspan.frontends.watched_block import strict

__all__ = [
    "ContextParallel",
    "LocalWorld",
    "Parity",
    "Targets",
    "Trie",
    "activate",
    "alibi",
    "alibi_slopes",
    "attention",
    "available",
    "check_parity",
    "current",
    "flex_attention",
    "fold",
    "interleave",
    "local_attention",
    "relative_bias",
    "restore",
    "sdpa",
    "shift_labels",
    "softcap",
    "strict",
    "tiled",
    "with_sinks",
]
