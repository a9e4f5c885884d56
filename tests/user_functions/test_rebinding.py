"""Copies of functions with other tensors: the same values, shared variables and references to themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringspan.user_functions.rebinding import rebind_tensors

TWO, THREE = torch.tensor(2.0), torch.tensor(3.0)
TO_THREE = {id(TWO): THREE}


def scaled(by: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


class Scale(nn.Module):
    def __init__(self, by: Tensor) -> None:
        super().__init__()
        self.register_buffer("by", by)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by

    def method(self, x: Tensor) -> Tensor:
        return self(x)  # type: ignore[no-any-return]


def through_first_item(held: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * held[0]


def through_function(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: inner(x)


HOLDERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "closure": lambda: scaled(TWO),
    "partial": lambda: partial(torch.mul, TWO),
    "partial keyword": lambda: partial(torch.mul, other=TWO),
    "module": lambda: Scale(TWO),
    "method": lambda: Scale(TWO).method,
    "module in a module": lambda: nn.Sequential(Scale(TWO)),
    "list in a closure": lambda: through_first_item([TWO]),
    "tuple in a closure": lambda: through_first_item((TWO,)),
    "closure in a closure": lambda: through_function(scaled(TWO)),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_the_copy_uses_the_new_tensor_and_the_original_the_old(name: str) -> None:
    original, x = HOLDERS[name](), torch.tensor(5.0)
    copied = rebind_tensors(original, TO_THREE)
    assert (copied(x), original(x)) == (15.0, 10.0)


def recursive_power(by: Tensor) -> Callable[[Tensor, int], Tensor]:
    def power(x: Tensor, n: int) -> Tensor:
        return x if n == 0 else power(x, n - 1) * by

    return power


def test_a_closure_that_refers_to_itself() -> None:
    copied = rebind_tensors(recursive_power(TWO), TO_THREE)
    assert copied(torch.tensor(1.0), 3) == 27
    assert copied.__closure__[1].cell_contents is copied


def test_two_closures_that_refer_to_each_other() -> None:
    def pair(by: Tensor) -> Callable[[Tensor, int], Tensor]:
        def even(x: Tensor, n: int) -> Tensor:
            return x if n == 0 else odd(x, n - 1)

        def odd(x: Tensor, n: int) -> Tensor:
            return even(x, n - 1) * by

        return even

    assert rebind_tensors(pair(TWO), TO_THREE)(torch.tensor(1.0), 4) == 9


def test_shared_variables_stay_shared() -> None:
    def counter(by: Tensor) -> tuple[Callable[[], None], Callable[[], Tensor]]:
        count = 0

        def increment() -> None:
            nonlocal count
            count += 1

        return increment, lambda: by * count

    _, value = original = counter(TWO)
    new_increment, new_value = rebind_tensors(original, TO_THREE)
    new_increment()
    assert (new_value(), value()) == (3.0, 0.0)


def test_an_object_that_is_held_twice_is_copied_once() -> None:
    inner = scaled(TWO)
    first, second = rebind_tensors([inner, inner], TO_THREE)
    assert first is second is not inner


def test_a_list_and_a_module_that_hold_themselves() -> None:
    items: list[Any] = [TWO]
    items.append(items)
    copied = rebind_tensors(items, TO_THREE)
    assert copied[0] is THREE
    assert copied[1] is copied
    module = Scale(TWO)
    module._modules["itself"] = module
    other = rebind_tensors(module, TO_THREE)
    assert other.by is THREE
    assert other._modules["itself"] is other


def test_a_tuple_that_is_reached_through_a_closure_of_its_own() -> None:
    def make(by: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            return x * both[1]

        both = (function, by)
        return both

    both = rebind_tensors(make(TWO), TO_THREE)
    assert both[0](torch.tensor(5.0)) == 15


def test_a_variable_without_a_value_stays_so() -> None:
    def make() -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            return x * (TWO if x.sum() > 0 else late)

        if torch.is_tensor(function):
            late = TWO
        return function

    copied = rebind_tensors(make(), TO_THREE)
    with pytest.raises(NameError, match="late"):
        copied(torch.tensor(-1.0))
