"""ALiBi biases on two processes against one, in float64."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.testing.float64 import Float64
from tests.conftest import Pools
from tests.integrations.small_models import small_model

if find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install 'ringspan[hf]'", allow_module_level=True)

from tests.integrations.test_transformers import TOLERANCE, WITHOUT_POSITIONS, B, check, compare, difference, message, tokens

# name -> padding of the first row of 30 tokens, and the layout
PADDED: dict[str, tuple[slice, str]] = {
    "left": (slice(0, 3), "zigzag"),
    "right": (slice(27, 30), "zigzag"),
    "left, all of a rank": (slice(0, 15), "contiguous"),
    "left, all of a rank and more": (slice(0, 17), "contiguous"),
}


def padded(
    rank: int, name: str, n: int, padding: slice, layout: str, strategy: str = "auto", whole: bool = False
) -> dict[str, float]:
    """A batch whose first row has padding, with the mask of this rank's tokens or of the whole sequence."""
    cp = rs.ContextParallel(None, rs.causal(n), layout=layout, strategy=strategy)
    keep = torch.ones(B, n, dtype=torch.bool)
    keep[0, padding] = False
    inputs = {"input_ids": tokens(n), "attention_mask": keep.long()}
    mine: dict[str, Any] = cp.shard(inputs, dim=1)
    if whole:
        mine["attention_mask"] = inputs["attention_mask"]
    if name not in WITHOUT_POSITIONS:
        mine["position_ids"] = cp.positions()[None]
    return compare(name, cp, inputs, mine, keep=keep)


@pytest.mark.parametrize("whole", [False, True], ids=["own mask", "whole mask"])
@pytest.mark.parametrize("case", PADDED)
@pytest.mark.parametrize("name", ["bloom", "falcon with alibi", "mpt"])
def test_padding_is_exact(name: str, case: str, whole: bool, pools: Pools) -> None:
    check(pools(2).run(padded, name, 30, *PADDED[case], "auto", whole))


def test_padding_between_tokens_is_exact_where_biases_count_it(pools: Pools) -> None:
    check(pools(2).run(padded, "mpt", 30, slice(5, 9), "zigzag"))


@pytest.mark.parametrize("strategy", ["auto", "pass_q"])
def test_one_padded_key_of_many_does_not_change_the_slope(strategy: str, pools: Pools) -> None:
    """The biases of 150 keys are numbers of bfloat16, so that a line with a bend could be taken for a rounded one."""
    check(pools(2).run(padded, "bloom", 300, slice(0, 1), "contiguous", strategy))


def all_padding_of_one_row(rank: int) -> float:
    """The only row of the batch has padding alone on the first rank, and the model gets the mask of the whole sequence."""
    from ringspan.integrations.transformers import prepare

    cp = rs.ContextParallel(None, rs.causal(30), layout="contiguous")
    ids, keep = tokens(30)[:1], torch.arange(30).ge(15)[None]
    model = small_model("bloom")
    with torch.no_grad(), Float64():
        wanted = model(input_ids=ids, attention_mask=keep.long(), use_cache=False).logits
        prepare(model)
        with cp:
            found = model(input_ids=cp.shard(ids, dim=1), attention_mask=keep.long(), use_cache=False).logits
    mine = cp.shard(keep, dim=1)
    return difference(found[mine], cp.shard(wanted, dim=1)[mine]) if mine.any() else 0.0


def test_a_rank_with_padding_alone_takes_the_slope_of_the_whole_sequence(pools: Pools) -> None:
    assert max(pools(2).run(all_padding_of_one_row)) < TOLERANCE


def in_float32(rank: int) -> float:
    """Attention that is written out, in float32 against float64. The biases of the last keys are up to 512."""
    from ringspan.integrations.transformers import ringspan_mask
    from ringspan.integrations.transformers.written_out import WrittenOut

    n = 1024
    cp = rs.ContextParallel(None, rs.causal(n), layout="zigzag")
    q_BSD, k_BSD, v_BSD = cp.shard(torch.randn(3, 1, n, 8, generator=torch.Generator().manual_seed(1)), dim=2)
    bias_B1T = 0.5 * torch.arange(k_BSD.shape[1])[None, None]
    found: list[Tensor] = []
    for dtype in (torch.float64, torch.float32):
        q, k, v, bias = (x.to(dtype) for x in (q_BSD, k_BSD, v_BSD, bias_B1T))
        with cp:
            mask: Any = ringspan_mask(1, q.shape[1], k.shape[1])
            with WrittenOut(mask, batch=1, position_ids=None, buffer=None, needs_mask=False):
                found.append(torch.bmm(torch.softmax(torch.baddbmm(bias, q, k.mT), dim=-1), v))
    return difference(found[1].double(), found[0])


def test_large_positions_do_not_round_the_scores_of_near_keys(pools: Pools) -> None:
    assert max(pools(2).run(in_float32)) < 1e-6


def rounded(rank: int, name: str, n: int, dtype: torch.dtype) -> dict[str, float]:
    """One process, which rounds biases to bfloat16, and two against a model without rounding."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    from ringspan.integrations.transformers import prepare

    cp, ids = rs.ContextParallel(None, rs.causal(n), layout="zigzag"), tokens(n)[:1]
    model: Any = small_model(name).float()
    given = {} if name in WITHOUT_POSITIONS else {"position_ids": cp.positions()[None]}
    with torch.no_grad():
        with mock.patch("transformers.models.falcon.modeling_falcon.build_alibi_tensor", build_alibi_tensor):
            wanted = cp.shard(model(input_ids=ids, use_cache=False).logits, dim=1)
        model.to(dtype)
        one = model(input_ids=ids, use_cache=False).logits.float()
        prepare(model)
        with cp:
            found = model(input_ids=cp.shard(ids, dim=1), use_cache=False, **given).logits.float()
    of_one = difference(cp.shard(one, dim=1), wanted)
    return {"ranks, in differences of one process": difference(found, wanted) / of_one, "one process": of_one}


@pytest.mark.parametrize(
    ("name", "n", "dtype"),
    [
        ("bloom", 1100, torch.bfloat16),
        # 350 keys on each rank: more than the 256 whole numbers of bfloat16, divided by the root of 128
        ("falcon with wide heads", 700, torch.float32),
    ],
)
def test_rounded_biases_are_as_near_as_one_process(name: str, n: int, dtype: torch.dtype, pools: Pools) -> None:
    for found in pools(2).run(rounded, name, n, dtype):
        assert found["one process"] < 0.02
        assert found["ranks, in differences of one process"] < 1.5


# name -> a bias of 600 keys for each of 3 heads, and whether it is linear in the key
SLOPES = torch.tensor([0.5, 0.0884, 0.004])[:, None]
KEYS = torch.arange(600)
LINEAR: dict[str, tuple[Tensor, bool]] = {
    "exact": (SLOPES * KEYS, True),
    "in bfloat16": ((SLOPES * KEYS).bfloat16(), True),
    "in float16": ((SLOPES * KEYS).half(), True),
    "of bfloat16, as in Falcon": ((SLOPES.bfloat16() * KEYS).double(), True),
    "from a negative number on": (SLOPES * (KEYS - 600), True),
    "after padding": (SLOPES * (KEYS - 100).clamp_min(0), False),
    "before padding, in bfloat16": ((SLOPES * KEYS * (KEYS < 590)).bfloat16(), False),
    "of logarithms, in bfloat16": ((SLOPES * (KEYS + 1).log()).bfloat16(), False),
    "with one step left out": (SLOPES * (KEYS + (KEYS > 300)), False),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_bias_is_linear_up_to_its_rounding(name: str) -> None:
    from ringspan.integrations.transformers.alibi import slope_of

    bias_HT, is_linear = LINEAR[name]
    slope = slope_of(bias_HT[None])
    assert (slope is not None) == is_linear
    if slope is not None:
        error = (slope[:, None] / SLOPES - 1).abs().max()
        assert error < (1e-6 if bias_HT.dtype == torch.float32 else 4e-3 if "Falcon" in name else 2e-4)


@pytest.mark.parametrize("pads", [(0, 0), (1, 0), (0, 1), (3, 200)], ids=str)
def test_padding_does_not_change_a_slope(pads: tuple[int, int]) -> None:
    """Each of two rows has padding, on the left and on the right."""
    from ringspan.integrations.transformers.alibi import slope_of

    keys, slopes_H = torch.arange(200), torch.tensor([0.5, 0.25, 2.0**-8])
    valid_BT = torch.stack([keys >= pads[0], keys < 200 - pads[1]])
    bias_BHT = slopes_H[:, None] * ((valid_BT.cumsum(-1) - 1) * valid_BT)[:, None]
    slope_H = slope_of(bias_BHT, valid_BT)
    assert slope_H is not None
    assert (slope_H / slopes_H - 1).abs().max() < 1e-12


def test_rows_of_different_slopes_are_not_linear() -> None:
    from ringspan.integrations.transformers.alibi import slope_of

    assert slope_of(torch.tensor([[[0.0, 0.5, 1.0]], [[0.0, 0.25, 0.5]]])) is None


def message_with_tokens(*kept: slice) -> str:
    """The error of Bloom if all other tokens are padding. The first rank has tokens 0 to 7 and 24 to 31, the second the
    rest."""
    cp = rs.ContextParallel(None, rs.causal(32), layout="zigzag")
    keep = torch.zeros(1, 32, dtype=torch.long)
    for part in kept:
        keep[0, part] = 1
    mine = {"input_ids": cp.shard(tokens(32)[:1], dim=1), "attention_mask": cp.shard(keep, dim=1)}
    return message("bloom", cp, prepared=True, position_ids=None, **mine)


def refused(rank: int) -> dict[str, str]:
    return {
        "padding between tokens": message_with_tokens(slice(0, 8), slice(24, 32)),
        "padding between tokens of a rank": message_with_tokens(slice(0, 2), slice(4, 32)),
        "a single token on each rank": message_with_tokens(slice(7, 9)),
    }


REFUSED = {
    "padding between tokens": "the batch has padding between the tokens of a row",
    "padding between tokens of a rank": "the batch has padding between the tokens of a row",
    "a single token on each rank": "this rank has only padding or a single token",
}


def test_what_is_not_exact_is_refused(pools: Pools) -> None:
    found = pools(2).run(refused)
    for case, said in REFUSED.items():
        assert any(said in x[case] for x in found), case
        assert all(x[case] for x in found), case
