"""Calls of PyTorch's ``flex_attention`` are intercepted in the threads that have a block open, and in no other."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import ringspan as rs
from ringspan.torch_private import flex_interception, flex_original

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("world_of_one")]


def x() -> Tensor:
    return torch.arange(64.0).view(1, 1, 8, 8).sin()


def causal() -> Tensor:
    return F.scaled_dot_product_attention(x(), x(), x(), is_causal=True)


def full() -> Tensor:
    return F.scaled_dot_product_attention(x(), x(), x())


def inlines(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v)  # type: ignore[return-value]


def never_compiled_before() -> Callable[..., Tensor]:
    """A function that inlines flex_attention. Dynamo caches programs by code object, and this one's is new."""
    return FunctionType(inlines.__code__.replace(), globals())


# -- the wrapper -------------------------------------------------------------------------------------------------------


def test_the_code_is_the_same_inside_and_outside_of_blocks() -> None:
    with rs.ContextParallel(None, rs.causal(8), expect_attention=False) as cp:
        code = flex_attention.__code__  # type: ignore[attr-defined]
        with cp:
            assert flex_attention.__code__ is code  # type: ignore[attr-defined]
    assert flex_attention.__code__ is code  # type: ignore[attr-defined]


def test_the_wrapper_looks_like_the_function_it_wraps() -> None:
    original = flex_original.original_flex_attention
    assert flex_attention.__code__ is not original.__code__  # type: ignore[attr-defined]
    ours, theirs = (inspect.signature(function).parameters.values() for function in (flex_attention, original))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]
    assert inspect.getsource(flex_attention) == inspect.getsource(original)


# -- other threads -----------------------------------------------------------------------------------------------------

# torch 2.11 built with CUDA, on a machine without: FakeTensorMode crashes in the second thread that compiles.
compiles_in_threads = pytest.mark.skipif(
    torch.__version__.startswith("2.11") and torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="this PyTorch crashes when a second thread compiles, with or without ringspan",
)


def in_another_thread(call: Callable[[], Tensor]) -> Tensor:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


@compiles_in_threads
@pytest.mark.parametrize("fullgraph", [False, True])
def test_another_thread_compiles_while_a_block_is_open_here(fullgraph: bool) -> None:
    compiled = torch.compile(never_compiled_before(), backend="eager", fullgraph=fullgraph)
    want = full()
    with rs.ContextParallel(None, rs.causal(8), expect_attention=False):
        torch.testing.assert_close(in_another_thread(lambda: compiled(x(), x(), x())), want)
        torch.testing.assert_close(flex_attention(x(), x(), x()), causal())
    torch.testing.assert_close(compiled(x(), x(), x()), full())


@compiles_in_threads
def test_blocks_open_and_close_while_another_thread_compiles() -> None:
    """Neither thread raises, and neither gets the other's result."""
    done = threading.Event()

    failures: list[Exception] = []

    def compile_often() -> None:
        try:
            for _ in range(12):
                compiled = torch.compile(never_compiled_before(), backend="eager", fullgraph=True)
                torch.testing.assert_close(compiled(x(), x(), x()), full())
        except Exception as error:
            failures.append(error)
        finally:
            done.set()

    want, opened = causal(), 0
    thread = threading.Thread(target=compile_often)
    thread.start()
    while not done.is_set() or opened < 12:
        with rs.ContextParallel(None, rs.causal(8), expect_attention=False):
            torch.testing.assert_close(flex_attention(x(), x(), x()), want)
            with rs.local_attention():
                torch.testing.assert_close(F.scaled_dot_product_attention(x(), x(), x()), full())
        opened += 1
    thread.join()
    assert failures == []


def test_eager_code_is_not_taken_for_traced_code_while_another_thread_compiles() -> None:
    """``torch.compiler.is_compiling`` is True in all threads meanwhile; a mode made then must work as any other."""
    results: list[Tensor] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        def attend() -> Tensor:
            with rs.ContextParallel(None, rs.causal(8)), rs.local_attention():
                return F.scaled_dot_product_attention(x(), x(), x())

        results.append(in_another_thread(attend))
        return graph

    torch.compile(lambda y: y.sin(), backend=backend)(x())
    torch.testing.assert_close(results, [full()])


# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [flex_attention, inlines], ids=["itself", "inlined"])
def test_what_was_compiled_before_is_caught_and_is_still_there_afterwards(function: Callable[..., Any]) -> None:
    programs: list[Any] = []

    def counted(graph: torch.fx.GraphModule, example: Any) -> Any:
        programs.append(graph)
        return graph

    compiled = torch.compile(function, backend=counted)
    torch.testing.assert_close(compiled(x(), x(), x()), full())
    before = len(programs)
    with rs.ContextParallel(None, rs.causal(8), expect_attention=False):
        torch.testing.assert_close(compiled(x(), x(), x()), causal())
    torch.testing.assert_close(compiled(x(), x(), x()), full())
    assert len(programs) == before > 0


def test_a_full_graph_in_a_block_is_refused_with_the_reason() -> None:
    compiled = torch.compile(never_compiled_before(), backend="eager", fullgraph=True)
    with (
        rs.ContextParallel(None, rs.causal(8), expect_attention=False),
        pytest.raises(torch._dynamo.exc.Unsupported, match="drop fullgraph=True"),
    ):
        compiled(x(), x(), x())


IMPORTED_LATER = """
import ringspan as rs
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.arange(64.0).view(1, 1, 8, 8).sin()
full, causal = (F.scaled_dot_product_attention(x, x, x, is_causal=is_causal) for is_causal in (False, True))
compiled = torch.compile(lambda: flex_attention(x, x, x), backend="eager", fullgraph=True)
torch.testing.assert_close(compiled(), full)
with rs.ContextParallel(None, rs.causal(8)):
    torch.testing.assert_close(flex_attention(x, x, x), causal)
torch.testing.assert_close(compiled(), full)
dist.destroy_process_group()
"""


def test_flex_attention_imported_after_ringspan() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTED_LATER], check=True, env=environment)


# -- functions whose code cannot be replaced ---------------------------------------------------------------------------


def in_a_closure() -> Any:
    scale = None

    def made_inside(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return flex_original.original_flex_attention(query, key, value, scale=scale)

    return made_inside


def with_any_arguments(*args: Any, **kwargs: Any) -> Any:
    return flex_original.original_flex_attention(*args, **kwargs)


IRREPLACEABLE = {
    "a function of another's variables": (in_a_closure(), "made inside another function and uses its scale"),
    "no function": (in_a_closure().__call__, "it is a method-wrapper, not a function"),
    "a function of any arguments": (with_any_arguments, "which the wrapper cannot pass on by name"),
}


@pytest.mark.parametrize(("other", "why"), IRREPLACEABLE.values(), ids=IRREPLACEABLE)
def test_a_function_whose_code_cannot_be_replaced_is_refused_when_it_is_called(
    monkeypatch: pytest.MonkeyPatch, other: Any, why: str
) -> None:
    monkeypatch.setattr(flex_original, "flex_function", other)
    for state in ("_is_replaced", "_install_attempted"):
        monkeypatch.setattr(flex_interception, state, False)
    monkeypatch.setattr(flex_interception, "_unsupported_reason", None)
    with rs.ContextParallel(None, rs.causal(8)) as cp:
        torch.testing.assert_close(F.scaled_dot_product_attention(x(), x(), x()), causal())
        torch.testing.assert_close(cp.flex_attention(x(), x(), x()), causal())
        # The operator that it calls is refused by name; Dynamo, which traces it there, puts its own name before ours.
        with pytest.raises(
            torch._dynamo.exc.Unsupported,
            match=rf"UnplannedAttention.*cannot be intercepted \(.*{why}\): call cp\.flex_attention",
        ):
            other(x(), x(), x())
