"""Process-wide settings, and torch's table of what each ring step computes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

import ringspan as rs
from ringspan.compat import _CausalBehavior, _cp_options, _is_causal_behavior, _RotateMethod, set_rotate_method
from ringspan.layouts import Layout, contiguous, zigzag


@pytest.fixture(autouse=True)
def restore_options() -> Iterator[None]:
    before = dict(vars(_cp_options))
    yield
    for name, value in before.items():
        setattr(_cp_options, name, value)


@pytest.mark.parametrize(
    ("word", "method", "strategy"),
    [("allgather", _RotateMethod.ALL_GATHER, "gather"), ("alltoall", _RotateMethod.ALL_TO_ALL, "ring")],
)
def test_rotate_methods_are_strategies(word: str, method: _RotateMethod, strategy: str) -> None:
    set_rotate_method(word)
    assert _cp_options.rotate_method is method
    assert _cp_options.strategy == strategy


def test_an_unknown_rotate_method_is_refused_and_changes_nothing() -> None:
    set_rotate_method("alltoall")
    with pytest.raises(NotImplementedError, match='use "allgather" or "alltoall"'):
        set_rotate_method("carousel")
    assert _cp_options.rotate_method is _RotateMethod.ALL_TO_ALL


def test_summing_in_the_dtype_of_the_inputs_is_refused_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"convert_to_f32=False does not change attention.*at least float32"):
        _cp_options.convert_to_f32 = False
    assert _cp_options.convert_to_f32 is False  # what code that reads it, such as a merger of the user, obeys
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _cp_options.convert_to_f32 = True


def visible_pairs(layout: Layout, rank: int, source: int) -> int:
    """How many pairs of a rank's queries and another rank's keys a causal mask allows, by counting them."""
    q, k = layout.positions(rank), layout.positions(source)
    return int((q[:, None] >= k[None, :]).sum())


@pytest.mark.parametrize("world", [1, 2, 4, 5])
@pytest.mark.parametrize("balanced", [False, True])
def test_the_causal_table_agrees_with_the_layouts(world: int, balanced: bool) -> None:
    _cp_options.enable_load_balance = balanced
    size = 4
    layout = (zigzag if balanced else contiguous)(rs.causal(2 * size * world), world)
    pairs = (2 * size) ** 2
    expected = {
        0: _CausalBehavior.SKIP,
        pairs: _CausalBehavior.NOT_IS_CAUSAL,
        pairs // 2: _CausalBehavior.NOT_IS_CAUSAL,  # zigzag: all pairs of one half
        pairs // 2 + size: _CausalBehavior.IS_CAUSAL,  # a triangle with its diagonal
    }
    for rank in range(world):
        for i in range(world):
            got = _is_causal_behavior(rank=rank, world_size=world, i=i, is_causal=True)
            assert got is expected[visible_pairs(layout, rank, (rank - i) % world)], (rank, i)
            assert _is_causal_behavior(rank, world, i, is_causal=False) is _CausalBehavior.NOT_IS_CAUSAL


def test_enum_values() -> None:
    assert [b.value for b in _CausalBehavior] == [None, False, True]
