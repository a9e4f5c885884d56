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
    assert mask_at(text, 8) == meant
    with pytest.raises(rs.MaskError, match="give it with --seq-len"):
        mask_at(text, None)


@pytest.mark.parametrize("text", ["window(3)", "window(left=3)", "window(3, 9)", "window(3) & window(5)"])
def test_a_window_that_hides_no_later_key_must_say_so(text: str) -> None:
    with pytest.raises(rs.MaskError, match=r"hides no later key.*`causal\(\) & window\("):
        mask_at(text, 8)
    assert mask_at(f"full() & {text}", 8).area > mask_at(f"causal() & {text}", 8).area


def test_a_window_that_hides_later_keys_is_a_mask() -> None:
    assert mask_at("window(3, 1)", 8) == rs.full(8) & rs.window(left=3, right=1)


def test_two_different_lengths_are_an_error() -> None:
    assert mask_at("causal(8)", 8) == mask_at("causal(8)", None) == rs.causal(8)
    with pytest.raises(rs.MaskError, match=r"a mask of 8 tokens, but --seq-len is 9"):
        mask_at("causal(8)", 9)
