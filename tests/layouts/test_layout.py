"""The Layout type: valid and invalid spans, and its properties."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from math import nan
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.errors import LayoutError, MaskError, RingspanError
from ringspan.layouts import LAYOUTS, Layout, Span, check_world, make_layout, zigzag
from ringspan.layouts.layout import even_cuts
from tests.hypothesis_strategies import bijections

Spans = list[list[tuple[int, int, int]]]

own_spans = st.tuples(st.integers(0, 40), st.integers(1, 6)).flatmap(lambda x: bijections(*x))


def tokens_of(spans: Spans) -> list[list[int]]:
    return [[token for span in of_rank for token in range(*span)] for of_rank in spans]


@given(own_spans)
def test_spans_given_by_the_user(spans: Spans) -> None:
    expected = tokens_of(spans)
    layout = Layout(spans)
    assert layout.world == len(spans)
    assert [layout.positions(rank).tolist() for rank in range(layout.world)] == expected
    assert layout.counts == tuple(map(len, expected))
    assert layout.length == sum(layout.counts)
    assert layout.order().tolist() == [token for held in expected for token in held]


@given(own_spans)
def test_spans_of_numpy_integers_are_those_of_python_integers(spans: Spans) -> None:
    given = [[tuple(map(np.int64, span)) for span in of_rank] for of_rank in spans]
    assert Layout(given).spans == Layout(spans).spans


@given(own_spans, st.randoms(use_true_random=False))
def test_a_renumbered_layout_has_the_ranks_in_another_order(spans: Spans, random: Random) -> None:
    order = random.sample(range(len(spans)), len(spans))
    renumbered = Layout(spans, name="some").renumbered(order)
    expected = Layout([spans[rank] for rank in order])
    assert renumbered == expected
    assert renumbered.name == "some"
    assert (renumbered.counts, renumbered.length) == (expected.counts, expected.length)
    assert Layout(spans).renumbered(order, "other").name == "other"


@given(own_spans)
def test_order_shards_and_restores(spans: Spans) -> None:
    layout = Layout(spans)
    x = np.arange(layout.length) * 10
    assert (x[layout.order()][np.argsort(layout.order())] == x).all()


@given(own_spans)
def test_pieces_are_the_spans_as_columns(spans: Spans) -> None:
    layout = Layout(spans)
    held = [np.full(count, -1) for count in layout.counts]
    for owner, start, count, step, at in zip(*(column.tolist() for column in layout.pieces), strict=True):
        held[owner][at : at + count] = start + np.arange(count) * step
    for rank, rows in enumerate(held):
        assert rows.tolist() == layout.positions(rank).tolist()
        assert set(layout.pieces.of(rank).owner.tolist()) <= {rank}
        assert layout.pieces.of(rank).size.sum() == layout.counts[rank]


@given(own_spans, st.data())
def test_a_layout_is_accepted_exactly_when_it_is_a_bijection(spans: Spans, data: st.DataObject) -> None:
    """Valid spans with one of them moved, stretched, thinned, dropped or doubled: sometimes still valid, mostly not."""
    owned = [(rank, i) for rank, of_rank in enumerate(spans) for i in range(len(of_rank))]
    rank, i = data.draw(st.sampled_from(owned))
    start, stop, step = spans[rank][i]
    nudge = st.integers(-2, 2)
    start, stop = max(0, start + data.draw(nudge)), stop + data.draw(nudge)
    new = (start, max(start, stop), max(1, step + data.draw(nudge)))
    spans[rank][i : i + 1] = data.draw(st.sampled_from([[new], [], [new, new], [spans[rank][i]]]))
    tokens = sorted(token for held in tokens_of(spans) for token in held)
    length = data.draw(st.sampled_from([None, len(tokens), len(tokens) + 1]))
    n = max(tokens, default=-1) + 1 if length is None else length
    if tokens == list(range(n)):
        assert Layout(spans, length=length).length == len(tokens)
        return
    without_owner = [token for token in range(n) if token not in tokens]
    gap = rf"|token {without_owner[0]} has no owner" if without_owner else ""
    with pytest.raises(LayoutError, match=rf"owned twice|token {max(tokens, default=-1)} has an owner, but{gap}"):
        Layout(spans, length=length)


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "at least one rank"),
    ([[(0, 4)], [(2, 6)]], {}, "token 2 is owned twice, by rank 0 and by rank 1"),
    ([[(0, 4), (0, 4)]], {}, "token 0 is owned twice, by rank 0 and by rank 0"),
    ([[(0, 9, 2)], [(0, 9, 3), (1, 9, 6)]], {}, r"token \d is owned twice"),
    ([[(0, 9, 2)], [(1, 9, 4), (3, 9, 8), (8, 9)]], {}, "token 8 is owned twice, by rank 0 and by rank 1"),
    ([[(0, 9, 2)], [(1, 9, 4)]], {}, "token 3 has no owner: the spans hold 7 of 9 tokens, and every token needs exactly one"),
    ([[(0, 9, 2)], []], {}, "token 1 has no owner: the spans hold 5 of 9 tokens"),
    ([[(0, 2)], [(3, 4)]], {}, "token 2 has no owner: the spans hold 3 of 4 tokens"),
    ([[(1, 4)]], {}, "token 0 has no owner: the spans hold 3 of 4 tokens"),
    ([[(0, 4)]], {"length": 5}, "token 4 has no owner: the spans hold 4 of 5 tokens"),
    ([[(0, 4)]], {"length": 3}, "token 3 has an owner, but the sequence has 3 tokens: its last is 2"),
    ([[]], {"length": 1}, "token 0 has no owner: the spans hold 0 of 1 tokens"),
    ([[(-1, 4)]], {}, r"rank 0: span \(-1, 4, 1\) must have 0 <= start <= stop and step >= 1"),
    ([[(0, 2)], [(4, 2)]], {}, r"rank 1: span \(4, 2, 1\) must have"),
    ([[(0, 4, 0)]], {}, r"span \(0, 4, 0\) must have .* step >= 1"),
    ([[(3, 0, -1)]], {}, r"span \(3, 0, -1\) must have"),
    ([[(0, 4.0)]], {}, r"rank 0: a span is \(start, stop\) or \(start, stop, step\) in whole tokens, not \(0, 4\.0\)"),
    ([[(0, nan)]], {}, "a span is"),
    ([[(0,)]], {}, r"a span is .* not \(0,\)"),
    ([[(0, 4, 1, 1)]], {}, "a span is"),
    ([[4]], {}, "a span is .* not 4"),
    ([["ab"]], {}, "a span is .* not 'ab'"),
    ([[None]], {}, "a span is .* not None"),
    ([[]] * 4097, {}, "a layout has at most 4,096 ranks; got spans of more"),
    ([[(0, 2**31)]], {}, r"rank 0: span \(0, 2147483648, 1\) must end at token 2147483647 or before it"),
    ([[(0, 2**70)]], {}, "must end at token 2147483647"),
    ([[(0, 4), (4, 5, 2**70)]], {}, "with a step up to 2147483648"),
    (
        [[(0, 2**31 - 1, 2)], [(1, 2**30, 2)], [(2**30 + 1, 2**31 - 1, 2**29)]],
        {},
        "compared in their common step 536,870,912, as 536,870,913 spans of this step; at most 1,048,576 are possible",
    ),
]


@pytest.mark.parametrize(
    ("spans", "options", "message"), BAD, ids=[f"{spans!s:.60} {options or ''}" for spans, options, _ in BAD]
)
def test_invalid_spans_raise_a_layout_error(spans: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as raised:
        Layout(spans, **options)
    assert isinstance(raised.value, RingspanError)


@pytest.mark.parametrize("spans", [5, [5], [None]], ids=repr)
def test_what_is_not_a_list_of_lists(spans: Any) -> None:
    with pytest.raises(LayoutError):
        Layout(spans)


def test_steps_with_a_huge_common_multiple() -> None:
    """Spans of one token, whose steps do not matter. The common multiple of the steps is above 2⁶³."""
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53]
    assert Layout([[(i, i + 1, step)] for i, step in enumerate(primes)]).length == 16


def test_ranks_may_own_nothing() -> None:
    layout = Layout([[], [(0, 3), (3, 3)], [(7, 7)]])
    assert layout.counts == (0, 3, 0)
    assert layout.spans == ((), (Span(0, 3),), ())
    assert layout.positions(0).tolist() == []
    assert layout.positions(0).dtype == np.int64
    assert layout.ascii() == "rank 0:\nrank 1: [0,3)\nrank 2:"


def test_equal_exactly_for_equal_spans_in_equal_order() -> None:
    one = Layout([[(0, 2), (6, 8)], [(2, 6)]])
    same = Layout([[[0, 2, 1], np.array([6, 8])], [(2, 6), (8, 8)]], name="another name")
    assert one == same
    assert (hash(one), one.digest) == (hash(same), same.digest)
    for other in (Layout([[(6, 8), (0, 2)], [(2, 6)]]), Layout([[(2, 6)], [(0, 2), (6, 8)]]), Layout([[(0, 8)], []])):
        assert one != other
        assert one.digest != other.digest
    assert one != "spans"
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_layout_cannot_be_changed() -> None:
    layout = Layout(HALVES)
    for field in ("spans", "name", "world", "counts", "length"):
        with pytest.raises(AttributeError, match=field):
            setattr(layout, field, None)
    assert layout == Layout(HALVES)


def test_repr_and_ascii() -> None:
    layout = Layout([[(0, 2), (6, 8)], [(2, 6, 2), (3, 6, 2)]], name="mine")
    assert repr(layout) == "<Layout mine: 8 tokens over 2 ranks>"
    assert repr(Layout([[(0, 1)]])) == "<Layout spans: 1 tokens over 1 rank>"
    assert layout.ascii() == "rank 0: [0,2) [6,8)\nrank 1: [2,6):2 [3,6):2"
    assert (Span(1, 8, 3).size, repr(Span(1, 8, 3)), repr(Span(1, 8))) == (3, "[1,8):3", "[1,8)")


@given(st.integers(0, 100), st.integers(1, 20))
def test_even_cuts_differ_by_at_most_one(length: int, parts: int) -> None:
    sizes = np.diff(even_cuts(length, parts))
    assert (len(sizes), sizes.sum()) == (parts, length)
    assert sizes.max() - sizes.min() <= 1


# -- the layout= argument ----------------------------------------------------------------------------------------------

HALVES = [[(0, 4)], [(4, 8)]]

GIVEN: list[tuple[Any, Layout, str]] = [
    ("zigzag", zigzag(rs.causal(8), 2), "layout zigzag: as given"),
    (zigzag, zigzag(rs.causal(8), 2), "layout zigzag: as given"),
    (lambda mask, world: Layout(HALVES), Layout(HALVES), "layout <lambda>: as given"),
    (HALVES, Layout(HALVES), "layout spans: as given"),
    (Layout(HALVES, name="mine"), Layout(HALVES), "layout mine: as given"),
    ("auto", zigzag(rs.causal(8), 2), "layout zigzag: first with balance"),
]


@pytest.mark.parametrize(("given", "layout", "note"), GIVEN, ids=["name", "function", "lambda", "spans", "layout", "auto"])
def test_make_layout(given: Any, layout: Layout, note: str) -> None:
    made, why = make_layout(given, rs.causal(8), 2)
    assert made == layout
    assert why.startswith(note)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_known_by_its_name(name: str) -> None:
    layout, note = make_layout(name, rs.causal(9), 2)
    assert layout.name == name == LAYOUTS[name].__name__
    assert note == f"layout {name}: as given"


REFUSED: list[tuple[Any, int, str]] = [
    ("spiral", 2, "no layout is called 'spiral'; there are contiguous, .* and auto, or give a list of spans"),
    ("contigous", 2, r"no layout is called 'contigous' \(did you mean contiguous\?\)"),
    (Layout(HALVES), 3, "8 tokens over 2 ranks> does not fit: the mask has 8 tokens here and the group 3 ranks"),
    (Layout([[(0, 4)], [(4, 9)]]), 2, "9 tokens over 2 ranks> does not fit"),
    (HALVES, 4, "does not fit"),
    ([[(0, 4)], [(4, 9)]], 2, "token 8 has an owner, but the sequence has 8 tokens"),
    (lambda mask, world: Layout([[(0, 8)]]), 2, "does not fit"),
    ("zigzag", 0, "world must be at least 1 rank, not 0"),
    ("zigzag", -1, "world must be at least 1 rank, not -1"),
    ("zigzag", 2.0, r"world must be an integer number of ranks, not 2\.0"),
    ("zigzag", None, "world must be an integer number of ranks, not None"),
    ("zigzag", 4097, "world must be at most 4,096 ranks, not 4,097"),
    ("contiguous", 10**9, "world must be at most 4,096 ranks, not 1,000,000,000: plan for fewer ranks"),
    ([[(0, 8)], *[[]] * 4096], 4096, "a layout has at most 4,096 ranks"),
]


@pytest.mark.parametrize(("given", "world", "message"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_make_layout_rejects(given: Any, world: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_layout(given, rs.causal(8), world)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("balanced(8)", r"cannot read layout 'balanced\(8\)': balanced takes \(block=128, slack=0, per_node=None\)"),
        ("balanced(nodes=8)", r"balanced takes \(block=128, slack=0, per_node=None\)"),
        ("balanced(per_node=open('x'))", r"balanced takes \(block=128"),
        ("balanced(per_node='8')", "per_node must be an integer number of ranks, at least 1; got '8'"),
        ("zigzag(block=8)", "zigzag takes no options"),
        ("spiral(block=8)", r"no layout is called 'spiral\(block=8\)'"),
    ],
)
def test_options_that_cannot_be_read_are_named(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_layout(text, rs.causal(8), 2)


def test_a_type_error_inside_a_layout_is_not_an_option_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(mask: rs.Mask, world: int) -> Layout:
        return Layout(len(mask.lengths[0]))  # type: ignore[arg-type]

    monkeypatch.setitem(LAYOUTS, "broken", broken)
    with pytest.raises(TypeError, match="has no len"):
        make_layout("broken", rs.causal(8), 2)


def test_check_world_takes_any_whole_number() -> None:
    assert [check_world(n) for n in (1, np.int64(3), True)] == [1, 3, 1]


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_a_relation_has_no_layout(make: Callable[[rs.Mask, int], Layout]) -> None:
    with pytest.raises(MaskError, match="any length"):
        make(rs.window(left=1), 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: rs.plan(rs.causal(64), world=10**5, strategy="ring", layout="contiguous"),
        lambda: rs.plan(rs.causal(64), world=10**9),
        lambda: rs.pack([9, 1], 10**9, tokens_per_rank=3),
        lambda: rs.LocalWorld(10**9),
        lambda: rs.best_on(rs.causal(64), world=10**9, hardware="h200x8"),
    ],
    ids=["plan", "plan auto", "pack", "LocalWorld", "best_on"],
)
def test_more_ranks_than_can_be_planned_are_refused_at_once(call: Callable[[], object]) -> None:
    with pytest.raises(LayoutError, match=r"world must be at most 4,096 ranks, not 1\d*,"):
        call()


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("world", [0, -1, 1.5, 10**9, None])
def test_every_layout_rejects_an_invalid_world(make: Callable[[rs.Mask, int], Layout], world: Any) -> None:
    with pytest.raises(LayoutError, match=f"world must be .* not {world if world != 10**9 else '1,000,000,000'}"):
        make(rs.causal(8), world)
