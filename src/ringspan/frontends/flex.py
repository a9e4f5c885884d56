"""FlexAttention over a process group: any score_mod, any mask_mod, with global indices.

Legend: B batch, H query heads, G key heads, S queries, T keys, D head dim, E value dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor

from ringspan.caching.registry import on_clear_caches
from ringspan.costs import Hardware
from ringspan.errors import InputError
from ringspan.frontends.attention import attention
from ringspan.frontends.groups import Group
from ringspan.frontends.validate import unequal_heads
from ringspan.kernels import Partial, ScoreMod
from ringspan.masks import Mask
from ringspan.masks import block_mask as as_mask
from ringspan.planner import Plan
from ringspan.planner import plan as make_plan
from ringspan.plans import Shape
from ringspan.strategies import Strategy
from ringspan.torch_private.tensor_version import tensor_version
from ringspan.user_functions.captures import captured_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, FlexKernelOptions

# What FlexAttention returns: out; out and lse; or out and the requested auxiliary outputs. Any of them may be followed
# by the largest logit of each head.
FlexResult: TypeAlias = (
    "Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput] | tuple[Tensor, Tensor, Tensor] | "
    "tuple[Tensor, AuxOutput, Tensor]"
)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
    return_max_logits: bool = False,
    plan: Plan,
    group: Group = None,
    backend: str = "auto",
    cuda_graphs: bool = False,
) -> FlexResult:
    """Compute ``torch.nn.attention.flex_attention.flex_attention`` of a sequence that is split over the ranks of a
    group.

    Tensors, ``plan`` and ``group`` are those of :func:`ringspan.attention`; everything else is FlexAttention's.
    ``score_mod`` and the ``mask_mod`` of a BlockMask are called with global indices. ``block_mask`` is of the whole
    sequence and replaces the plan's mask, on the plan's layout; None keeps the plan's mask. Tensors that the functions
    capture are the same on every rank. Those that are learned get a part of their gradient on each rank: sum it with
    ``cp.sum_gradients``. ``kernel_options`` are ignored: they tune kernels that are not used here, and change no
    result. ``return_max_logits=True`` adds the largest logit of each head to the results, as in
    :func:`ringspan.attention`.
    """
    request = check_arguments(query, key, enable_gqa=enable_gqa, return_lse=return_lse, return_aux=return_aux)
    if block_mask is not None:
        plan = plan_of(block_mask, plan, plan.strategy)
    options: dict[str, Any] = {"plan": plan, "group": group, "scale": scale, "score_mod": score_mod}
    options |= {"backend": backend, "cuda_graphs": cuda_graphs}
    if return_max_logits:
        out, lse, max_logits_H = attention(query, key, value, return_lse=True, return_max_logits=True, **options)
        return request.select(Partial(out, lse), max_logits_H)
    return request.select(attention(query, key, value, return_lse=True, **options))


class OutputRequest(NamedTuple):
    """The outputs to return beside out."""

    return_lse: bool
    return_aux: AuxRequest | None

    def select(self, result: Partial, max_logits_H: Tensor | None = None) -> FlexResult:
        """Return the requested outputs, followed by ``max_logits_H`` unless it is None."""
        if self.return_aux is not None:
            from torch.nn.attention.flex_attention import AuxOutput

            aux = AuxOutput(lse=result.lse if self.return_aux.lse else None, max_scores=None)
            return (result.out, aux) if max_logits_H is None else (result.out, aux, max_logits_H)
        if max_logits_H is not None:
            return (result.out, result.lse, max_logits_H) if self.return_lse else (result.out, max_logits_H)
        return (result.out, result.lse) if self.return_lse else result.out


def check_arguments(
    query: Tensor, key: Tensor, *, enable_gqa: bool, return_lse: bool, return_aux: AuxRequest | None
) -> OutputRequest:
    """Raise for arguments that FlexAttention rejects, and for outputs that are not available here."""
    if query.ndim == 4 and key.ndim == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        raise unequal_heads(query.shape[1], key.shape[1])
    if return_lse and return_aux is not None:
        raise InputError("return_lse=True and return_aux= exclude each other: pass return_aux=AuxRequest(lse=True)")
    if return_aux is not None and return_aux.max_scores:
        raise InputError(
            "max_scores is not available, because keys are computed in parts: use AuxRequest(lse=True). "
            "return_max_logits=True of rs.flex_attention and rs.attention gives the largest score of each head"
        )
    return OutputRequest(return_lse, return_aux)


class _ConvertedMask(NamedTuple):
    """A BlockMask converted to a mask, the versions of its tensors at that time, and the plans made for it."""

    versions: Any
    mask: Mask
    plans: dict[Any, Plan]


MAX_PLANS = 64  # cached plans of one BlockMask
_converted: WeakKeyDictionary[BlockMask, _ConvertedMask] = WeakKeyDictionary()
on_clear_caches(_converted.clear)


def plan_of(
    given: BlockMask,
    like: Plan,
    strategy: str | Strategy,
    *,
    hardware: str | Hardware | None = None,
    shape: Shape | None = None,
) -> Plan:
    """Return the plan of a BlockMask of the whole sequence on the layouts of another plan. It is made once."""
    known = _convert(given, like.mask.lengths)
    dkv_dtype = like.program.dkv_dtype
    wanted = (like.q_layout, like.kv_layout, like.rank, strategy, hardware, shape, dkv_dtype)
    found = known.plans.get(wanted)
    if found is None:
        found = make_plan(
            known.mask,
            world=like.world,
            rank=like.rank,
            strategy=strategy,
            layout=like.q_layout,
            kv_layout=like.kv_layout,
            hardware=hardware,
            shape=shape,
            dkv_dtype=dkv_dtype,
        )
        if len(known.plans) >= MAX_PLANS:
            known.plans.clear()
        known.plans[wanted] = found
    return found


def mask_of(given: BlockMask, lengths: tuple[int, int]) -> Mask:
    """Convert a BlockMask of the whole sequence to a mask. The result is cached until the BlockMask changes."""
    return _convert(given, lengths).mask


def _convert(given: BlockMask, lengths: tuple[int, int]) -> _ConvertedMask:
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(given, BlockMask):
        raise InputError(f"block_mask must be a BlockMask of FlexAttention, not {type(given).__name__}")
    if tuple(given.shape[-2:]) != lengths:
        raise InputError(
            f"this block_mask is over {given.shape[-2]} × {given.shape[-1]} (queries × keys), but the whole sequence is "
            f"{lengths[0]} × {lengths[1]}: make it with create_block_mask(…, Q_LEN={lengths[0]}, KV_LEN={lengths[1]}), "
            "and do not shard it"
        )
    versions = versions_of(given)
    known = _converted.get(given)
    if known is None or known.versions != versions:
        known = _converted[given] = _ConvertedMask(versions, as_mask(given), {})
    return known


def versions_of(given: BlockMask) -> list[tuple[int, int]]:
    """Return the tensors of a BlockMask and of its mask_mod, each with the counter of its in-place changes."""
    zero = given.kv_indices.new_zeros((), dtype=given.kv_indices.dtype).long()
    blocks = (given.kv_num_blocks, given.kv_indices, given.full_kv_num_blocks, given.full_kv_indices)
    tensors = [*(x for x in blocks if x is not None), *captured_tensors(given.mask_mod, zero, zero, zero, zero)]
    return [(id(x), 0 if x.is_inference() else tensor_version(x)) for x in tensors]
