"""``--mask`` and ``--seq-len`` together."""

from __future__ import annotations

import pytest

import ringspan as rs
from ringspan.cli.mask_argument import mask_at


@pytest.mark.parametrize(
    ("text", "meant"),
    [("causal()", rs.causal(8)), ("full()", rs.full(8)), ("causal() & window(3)", rs.causal(8) & rs.window(3))],
)
def test_a_relation_takes_the_length(text: str, meant: rs.Mask) -> None:
    assert mask_at(text, 8) == (meant, ())
    with pytest.raises(rs.MaskError, match="give it with --seq-len"):
        mask_at(text, None)


def test_remark_on_a_window_that_hides_no_later_key() -> None:
    mask, notes = mask_at("window(3)", 8)
    assert mask == rs.full(8) & rs.window(left=3)
    assert notes == ("window(left=3) hides no later key; a causal window is `causal() & window(3)`",)
    assert mask_at("window(3, 0)", 8).notes == ()


def test_two_different_lengths_are_an_error() -> None:
    assert mask_at("causal(8)", 8).mask == mask_at("causal(8)", None).mask == rs.causal(8)
    with pytest.raises(rs.MaskError, match=r"a mask of 8 tokens, but --seq-len is 9"):
        mask_at("causal(8)", 9)
