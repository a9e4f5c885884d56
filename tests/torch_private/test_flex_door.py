"""The door: PyTorch's ``flex_attention`` has other code while any block is open, and its own again with the last."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import ringspan as rs
from ringspan.torch_private import flex_code
from ringspan.torch_private.flex_door import Answer, door

OWN = flex_attention.__code__  # type: ignore[attr-defined]


def is_swapped() -> bool:
    return flex_attention.__code__ is not OWN  # type: ignore[attr-defined]


def nobody() -> Answer | None:
    return None


@pytest.fixture(autouse=True)
def _starts_and_ends_shut() -> Iterator[None]:
    assert not is_swapped()
    yield
    assert not is_swapped()


# -- opening and closing -----------------------------------------------------------------------------------------------

# Upper case opens, lower case closes; and after each, whether the door is open.
SEQUENCES = {
    "once": ("Aa", "10"),
    "nested": ("AAaa", "1110"),
    "crossed": ("ABab", "1110"),
    "closed too often": ("AaaaBb", "100010"),
    "closed by one who did not open it": ("AbA.bba.a", "111111110"),
}


@pytest.mark.parametrize(("steps", "opened"), SEQUENCES.values(), ids=SEQUENCES)
def test_whoever_opened_it_closes_it(steps: str, opened: str) -> None:
    blocks = {"A": object(), "B": object()}
    for step, is_open in zip(steps, opened, strict=True):
        if step.isupper():
            door.open(blocks[step], nobody)
        elif step != ".":
            door.close(blocks[step.upper()])
        assert is_swapped() == (is_open == "1")


def test_threads_that_come_and_go() -> None:
    missed: list[int] = []

    def come_and_go(seed: int) -> None:
        block, dice = object(), random.Random(seed)
        for _ in range(300):
            times = dice.randint(1, 3)
            for _ in range(times):
                door.open(block, nobody)
                missed.extend([] if is_swapped() else [seed])
            for _ in range(times + dice.randint(0, 1)):
                door.close(block)

    threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missed == []


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def x() -> Tensor:
    return torch.arange(64.0).view(1, 1, 8, 8).sin()


def causal() -> Tensor:
    return F.scaled_dot_product_attention(x(), x(), x(), is_causal=True)


def full() -> Tensor:
    return F.scaled_dot_product_attention(x(), x(), x())


def inlines(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v)  # type: ignore[return-value]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("function", [flex_attention, inlines], ids=["itself", "inlined"])
def test_what_was_compiled_before_is_caught_and_is_still_there_afterwards(function: Callable[..., Any]) -> None:
    programs: list[Any] = []

    def counted(graph: torch.fx.GraphModule, example: Any) -> Any:
        programs.append(graph)
        return graph

    compiled = torch.compile(function, backend=counted)
    torch.testing.assert_close(compiled(x(), x(), x()), full())
    of_its_own = len(programs)
    with rs.ContextParallel(None, rs.causal(8)):
        torch.testing.assert_close(compiled(x(), x(), x()), causal())
    torch.testing.assert_close(compiled(x(), x(), x()), full())
    assert len(programs) == of_its_own > 0


def in_a_closure() -> Any:
    scale = None

    def made_inside(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flex_attention(query, key, value, scale=scale)

    return made_inside


STUCK = {
    "a function of another's variables": (in_a_closure(), "made inside another function and uses its scale"),
    "no function": (in_a_closure().__call__, "it is a method-wrapper and no function"),
}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(("other", "why"), STUCK.values(), ids=STUCK)
def test_a_function_that_cannot_have_other_code_is_refused_when_it_is_called(
    monkeypatch: pytest.MonkeyPatch, other: Any, why: str
) -> None:
    monkeypatch.setattr(flex_code, "_function", other)
    with rs.ContextParallel(None, rs.causal(8)) as cp:
        torch.testing.assert_close(F.scaled_dot_product_attention(x(), x(), x()), causal())
        torch.testing.assert_close(cp.flex_attention(x(), x(), x()), causal())
        # What it calls in the end is refused by name; the compiler that traces it there puts its own name before ours.
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=rf"UnplannedAttention.*cannot be caught \(.*{why}\): call cp\.flex_attention"
        ):
            other(x(), x(), x())
