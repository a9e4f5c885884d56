"""The user's functions of a call, in FlexAttention's words, and where the rows of a kernel stand in the whole sequence.

``score_mod(score, b, h, q, k)`` gives a pair another score, ``mask_mod(b, h, q, k)`` says whether the query sees the key. Both
are called with *global* indices, whatever rows a kernel was given: a look-up stands between the two.

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

# (score, b, h, q, k) -> score, and (b, h, q, k) -> bool; of one pair each
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
        """Those that get a gradient."""
        return tuple(x for x in self.captured if x.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedMods:
    """The functions, and of each row of a kernel its token; of its heads, the first."""

    mods: Mods
    q_tokens_S: Tensor
    k_tokens_T: Tensor
    first_head: int = 0

    def sliced(self, rows: slice, keys: slice) -> IndexedMods:
        return replace(self, q_tokens_S=self.q_tokens_S[rows], k_tokens_T=self.k_tokens_T[keys])

    def apply_score_mod(self, score_BHST: Tensor) -> Tensor:
        """What ``score_mod`` makes of the scores."""
        if self.mods.score_mod is None:
            return score_BHST
        return for_all_pairs(self.mods.score_mod, given=1)(score_BHST, *self._indices(*score_BHST.shape[:2]))

    def apply_mask_mod(self, batch: int, heads: int) -> Tensor | None:
        """What ``mask_mod`` shows, (B, H, S, T); None if that is everything."""
        if self.mods.mask_mod is None:
            return None
        return for_all_pairs(self.mods.mask_mod)(*self._indices(batch, heads))

    def _indices(self, batch: int, heads: int) -> tuple[Tensor, ...]:
        device = self.q_tokens_S.device
        b, h = torch.arange(batch, device=device), torch.arange(self.first_head, self.first_head + heads, device=device)
        return b, h, self.q_tokens_S, self.k_tokens_T


def for_all_pairs(function: Callable[..., Tensor], *, given: int = 0) -> Callable[..., Tensor]:
    """A function of one pair as one of all: of the indices (B,), (H,), (S,) and (T,), after ``given`` tensors (B, H, S, T)."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(*[0] * given, *dims))
    return function


def mods_of(score_mod: ScoreMod | None, mask_mod: MaskMod | None, like: Tensor) -> Mods | None:
    """The functions of a call on tensors like this one; None if there are none."""
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
            raise InputError(
                f"a score_mod gives another score, a tensor made of the one that it is given; {score_mod!r} gives {score!r}: "
                "let it return one"
            )
        return score

    try:
        return captured_tensors(checked, *example)
    except TypeError as error:
        if _takes(score_mod, len(example)):
            raise  # it went wrong inside, and knows best itself
        raise InputError(
            f"a score_mod takes (score, b, h, q, k), a score and the indices of its pair, and gives another score; "
            f"{score_mod!r} does not: {error}"
        ) from None


def _takes(function: Callable[..., Tensor], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True
