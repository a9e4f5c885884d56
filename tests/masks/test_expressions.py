"""Masks as text: an expression means what it means in Python, and nothing else is evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringspan as rs
from ringspan.masks.expressions import parse_mask, read_lengths


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("causal(6)", rs.causal(6)),
        ("causal(6) & window(2)", rs.causal(6) & rs.window(left=2)),
        ("full(4, 6) - window(left=1)", rs.full(4, 6) - rs.window(left=1)),
        ("~(chunked(8, 3) | prefix(8, 2))", ~(rs.chunked(8, 3) | rs.prefix(8, 2))),
        (" documents([2, 3], causal=False) ", rs.documents([2, 3], causal=False)),
        ("full(5) & full()", rs.full(5)),
    ],
)
def test_an_expression_means_what_it_means_in_python(text: str, meant: rs.Mask) -> None:
    assert parse_mask(text) == meant


@pytest.mark.parametrize(
    "text",
    ["", "causal(", "3", "nosuch(3)", "rs.causal(3)", "causal(3) and full(3)", "causal(*x)", "causal(open('x'))", "full(-1)"],
)
def test_other_expressions_are_rejected(text: str) -> None:
    with pytest.raises(rs.MaskError):
        parse_mask(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "casual(1024)",
            "no mask is called 'casual' (did you mean causal?); there are full, causal, window, sliding_window, documents, ",
        ),
        ("windw(3) & causal(8)", "no mask is called 'windw' (did you mean window?)"),
        ("spiral", "no mask is called 'spiral'; there are "),
        ("causal & window(3)", "a mask is written with brackets: causal(), or causal(…) with what it takes"),
        ("causal(", "cannot read 'causal(': it has 1 ( and 0 ). A mask looks like `documents([700, 324]) & window(128)`"),
        ("documents([2, 3)", "cannot read 'documents([2, 3)': it has 1 [ and 0 ]"),
        ("causal(3) causal(4)", "cannot read 'causal(3) causal(4)'. A mask looks like"),
        ("(" * 5000, "cannot read"),
        ("~" * 50_000 + "full()", "cannot read"),
        ("3", "not a mask: '3'. Masks are full, causal, window, sliding_window, documents, "),
        ("causal(3) & 4", "not a mask: '4' in 'causal(3) & 4'. Masks are full, causal"),
        ("window(x)", "window takes plain values, as 4096 or [700, 324]; not 'x'"),
        ("window(left=y)", "window takes plain values, as 4096 or [700, 324]; not 'y'"),
        ("documents(5)", "lengths must be a list of lengths, one per document, not 5"),
        ("documents([5], file=x)", "documents() takes lengths or file=, not both"),
        ("tree(2, 1)", "lengths must be a list of lengths, one per document, not 2"),
        ("window('a')", "window's left must be an integer number of tokens, not 'a'"),
        ("full(k_len=3)", "full() without q_len is a relation"),
        ("from_bands([1], 8)", "a band is six integers (q0, q1, k0, k1, lo, hi), not 1"),
    ],
    ids=lambda x: x[:20],
)
def test_messages(text: str, said: str) -> None:
    with pytest.raises(rs.MaskError) as raised:
        parse_mask(text)
    assert str(raised.value).startswith(said)
    assert "line 1" not in str(raised.value), "Python's parser speaks of lines"


TOO_MANY = "too many positional arguments"
WRONG_CALLS = [
    ("documents(5, 7)", TOO_MANY, "documents([5, 7])"),
    ("documents([5], casual=True)", "got an unexpected keyword argument 'casual'", "documents([700, 324]), with"),
    ("chunked(8)", "missing a required argument: 'chunk'", "chunked(1024, 128), with"),
    ("prefix()", "missing a required argument: 'n'", "prefix(1024, 128), with"),
    ("prefix(8, 2, 1)", TOO_MANY, "prefix(1024, 128), with"),
    ("tree([2, 1])", "missing a required argument: 'parents'", "tree([700, 200, 124], [-1, 0, 0]), with"),
    ("window(1, 2, 3)", TOO_MANY, "window(left=128), or"),
    ("sliding_window()", "missing a required argument: 'size'", "sliding_window(4096)"),
    ("full(1, 2, 3)", TOO_MANY, "full(1024), or"),
    ("causal(4, 4, 4)", TOO_MANY, "causal(1024), or"),
    ("from_bands(5, 8)", "'int' object is not iterable", "from_bands([(0, 8, 0, 8, -8, 0)], 8), with"),
]


@pytest.mark.parametrize(("text", "reason", "form"), WRONG_CALLS)
def test_a_wrong_call_is_answered_with_a_right_one(text: str, reason: str, form: str) -> None:
    name = text.partition("(")[0]
    with pytest.raises(rs.MaskError) as raised:
        parse_mask(text)
    assert str(raised.value).startswith(f"{text!r} does not fit what {name} takes: {reason}. Write {form}")
    right = str(raised.value).partition("Write ")[2].partition(", with")[0].partition(", or")[0]
    assert parse_mask(right).name.startswith(name)


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_lengths_from_a_file(quote: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths-1.txt"
    path.write_text("# three documents\n3 1\n\n4, 2  # and a fourth\n")
    assert read_lengths(str(path)) == [3, 1, 4, 2]
    assert parse_mask(f"documents(file={quote}{path}{quote}) & window(2)") == rs.documents([3, 1, 4, 2]) & rs.window(left=2)
    assert parse_mask(f"documents(file={quote}{path}{quote}, causal=False)") == rs.documents([3, 1, 4, 2], causal=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"3\n4.5\n", r"line 2: a length is an integer number of tokens, not '4.5'"),
        (b"-1", "not '-1'"),
        (b"# nothing", "holds no length"),
        (b"0, 3, 5, 9", r"look like cumulative lengths \(0, 3, 5, …\): write the length of each document"),
        (b"\xff\xfe", "is not a text file"),
        (None, "cannot read the lengths in .*No such file"),
    ],
)
def test_files_without_lengths(text: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(rs.MaskError, match=said):
        parse_mask(f"documents(file={path})")
