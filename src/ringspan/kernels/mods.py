"""``score_mod`` and ``mask_mod`` of a call, as FlexAttention defines them, and the global indices they are called with.

``score_mod(score, b, h, q, k)`` returns the new score of a pair, ``mask_mod(b, h, q, k)`` whether the query sees the
key. Both are called with *global* indices. A kernel has local rows, and looks up the token of each.

Legend: B batch, H query heads, S queries, T keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringspan.errors import InputError
from ringspan.user_functions.captures import captured_tensors

# (score, b, h, q, k) -> score, and (b, h, q, k) -> bool, both for one pair
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mods:
    """The functions of a call and the tensors that they captured."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    captured: tuple[Tensor, ...] = ()

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """Return the captured tensors that require a gradient."""
        return tuple(x for x in self.captured if x.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedMods:
    """The functions with the global indices of a kernel's inputs: the token of each row, and the first of the heads."""

    mods: Mods
    q_tokens_S: Tensor
    k_tokens_T: Tensor
    first_head: int = 0

    def sliced(self, rows: slice, keys: slice) -> IndexedMods:
        """Return the functions with the indices of some rows and keys."""
        return replace(self, q_tokens_S=self.q_tokens_S[rows], k_tokens_T=self.k_tokens_T[keys])

    def apply_score_mod(self, score_BHST: Tensor) -> Tensor:
        """Return the scores after ``score_mod``."""
        if self.mods.score_mod is None:
            return score_BHST
        return for_all_pairs(self.mods.score_mod, given=1)(score_BHST, *self._indices(*score_BHST.shape[:2]))

    def apply_mask_mod(self, batch: int, heads: int) -> Tensor | None:
        """Return which pairs ``mask_mod`` allows, (B, H, S, T), or None if there is no ``mask_mod``."""
        if self.mods.mask_mod is None:
            return None
        return for_all_pairs(self.mods.mask_mod)(*self._indices(batch, heads))

    def _indices(self, batch: int, heads: int) -> tuple[Tensor, ...]:
        device = self.q_tokens_S.device
        b, h = torch.arange(batch, device=device), torch.arange(self.first_head, self.first_head + heads, device=device)
        return b, h, self.q_tokens_S, self.k_tokens_T


def for_all_pairs(function: Callable[..., Tensor], *, given: int = 0) -> Callable[..., Tensor]:
    """Vectorise a function of one pair.

    It then takes ``given`` tensors (B, H, S, T) and indices (B,), (H,), (S,), (T,).
    """
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(*[0] * given, *dims))
    return function


def mods_of(score_mod: ScoreMod | None, mask_mod: MaskMod | None, like: Tensor) -> Mods | None:
    """Collect the functions of a call and the tensors that they capture; None if there are no functions."""
    if score_mod is None and mask_mod is None:
        return None
    score = torch.zeros((), dtype=like.dtype, device=like.device)
    b, h, q, k = torch.zeros(4, dtype=torch.int64, device=like.device).unbind()
    found = [] if score_mod is None else [*_captured_by_score_mod(score_mod, score, b, h, q, k)]
    found += [] if mask_mod is None else captured_tensors(mask_mod, b, h, q, k)
    once = {id(x): x for x in found}
    return Mods(score_mod=score_mod, mask_mod=mask_mod, captured=tuple(once.values()))


def _captured_by_score_mod(score_mod: ScoreMod, *example: Tensor) -> tuple[Tensor, ...]:
    def checked(*given: Tensor) -> Tensor:
        score = score_mod(*given)
        if not isinstance(score, Tensor):
            raise InputError(f"a score_mod must return the new score, a tensor; {score_mod!r} returns {score!r}")
        return score

    try:
        return captured_tensors(checked, *example)
    except TypeError as error:
        if _takes(score_mod, len(example)):
            raise  # the function takes these arguments, so the error comes from inside it
        raise InputError(
            f"a score_mod takes (score, b, h, q, k), a score and the indices of its pair, and returns the new score; "
            f"{score_mod!r} does not: {error}"
        ) from None


def _takes(function: Callable[..., Tensor], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True
