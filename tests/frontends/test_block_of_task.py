"""A ``with cp:`` block belongs to its task: other tasks of the thread, and callers of generators, are not inside it."""

from __future__ import annotations

import asyncio
import gc
import threading
import types
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from contextvars import Context
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.frontends.current_block import current_block
from ringspan.frontends.recompute import _entries
from ringspan.kernels.reference import dense_attention
from ringspan.testing.assertions import assert_close
from ringspan.torch_private.function_modes import function_mode_depth

pytestmark = pytest.mark.usefixtures("world_of_one")

N = 12
WINDOW, CAUSAL, FULL = rs.causal(N) & rs.window(left=3), rs.causal(N), rs.full(N)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not _entries.stack
    assert function_mode_depth() == 0


def block(mask: rs.Mask) -> rs.ContextParallel:
    return rs.ContextParallel(None, mask, expect_attention=False)


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, N, 8, dtype=torch.float64) for _ in range(3)]


Attention = Callable[..., Any]
ATTENTIONS = [F.scaled_dot_product_attention, flex_attention]


def gradients_of(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Run a backward pass: a reentrant checkpoint does not support ``torch.autograd.grad``."""
    for x in inputs:
        x.grad = None
    loss.backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]


def assert_sees(mask: rs.Mask, attention: Attention) -> None:
    q, k, v = qkv()
    assert_close(attention(q, k, v), dense_attention(q, k, v, torch.from_numpy(mask.dense())).out, atol=1e-12)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_tasks_have_their_own_blocks(attention: Attention) -> None:
    """Blocks of three tasks, entered and left in any order."""

    async def attend(mask: rs.Mask, waits: list[int]) -> None:
        with ExitStack() if mask is FULL else block(mask):
            for wait in waits:
                assert_sees(mask, attention)
                for _ in range(wait):
                    await asyncio.sleep(0)
            assert_sees(mask, attention)
        assert_sees(FULL, attention)
        await asyncio.sleep(0)
        assert_sees(FULL, attention)

    async def main(*waits: list[int]) -> None:
        await asyncio.gather(attend(WINDOW, waits[0]), attend(CAUSAL, waits[1]), attend(FULL, waits[2]))

    asyncio.run(main([3], [1], [1, 1, 1, 1]))  # the outer block is left last
    asyncio.run(main([1], [3], [1, 1, 1, 1]))  # the outer block is left first
    asyncio.run(main([1, 2, 1], [2, 2], [5]))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_task_started_in_a_block_is_inside_it(attention: Attention) -> None:
    async def attend() -> None:
        await asyncio.sleep(0)
        assert_sees(WINDOW, attention)

    async def main() -> None:
        with block(WINDOW):
            await asyncio.gather(attend(), attend())

    asyncio.run(main())


def test_two_tasks_enter_the_same_block() -> None:
    same = block(WINDOW)

    async def attend(waits: int) -> None:
        with same:
            for _ in range(waits):
                await asyncio.sleep(0)
            assert_sees(WINDOW, F.scaled_dot_product_attention)
        assert_sees(FULL, F.scaled_dot_product_attention)
        await asyncio.sleep(0)
        assert_sees(FULL, F.scaled_dot_product_attention)

    async def main() -> None:
        await asyncio.gather(attend(1), attend(3))

    asyncio.run(main())


def test_local_attention_is_refused_while_another_task_is_in_a_block() -> None:
    async def in_block() -> None:
        with block(WINDOW):
            await asyncio.sleep(0)
            assert_sees(WINDOW, F.scaled_dot_product_attention)

    async def local() -> None:
        with pytest.raises(rs.UnplannedAttention, match="another task of this thread"), rs.local_attention():
            pass

    async def main() -> None:
        await asyncio.gather(in_block(), local())

    asyncio.run(main())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_caller_of_a_suspended_generator_is_told(attention: Attention) -> None:
    def results() -> Iterator[Tensor]:
        with block(WINDOW):
            assert_sees(WINDOW, attention)
            yield torch.ones(())
            assert_sees(WINDOW, attention)

    for _ in results():
        with pytest.raises(rs.UnplannedAttention, match=r"the generator .*results is suspended inside a block"):
            attention(*qkv())
        with block(CAUSAL):
            assert_sees(CAUSAL, attention)
    assert_sees(FULL, attention)


def compiled_attention() -> Attention:
    return torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend="eager")


def attention_of_an_adapter(q: Tensor, k: Tensor, v: Tensor) -> Any:
    cp = current_block()
    return F.scaled_dot_product_attention(q, k, v) if cp is None else cp.attention(q, k, v)


@pytest.mark.parametrize("make", [compiled_attention, lambda: attention_of_an_adapter])
def test_calls_without_interception(make: Callable[[], Attention]) -> None:
    attention = make()

    def results() -> Iterator[None]:
        with block(WINDOW):
            assert_sees(WINDOW, attention)
            yield
            assert_sees(WINDOW, attention)

    for _ in results():
        assert_is_told("generator", "results", attention)
        with rs.local_attention():
            assert_sees(FULL, attention)
        with block(CAUSAL):
            assert_sees(CAUSAL, attention)
    assert_sees(FULL, attention)


@pytest.mark.parametrize("make", [lambda: F.scaled_dot_product_attention, compiled_attention])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_backward_pass_of_a_checkpoint_in_a_suspended_generator(make: Callable[[], Attention], reentrant: bool) -> None:
    """It enters the block again, in the caller of the generator."""
    attention, (q, k, v) = make(), [x.requires_grad_() for x in qkv()]

    def losses() -> Iterator[Tensor]:
        with block(WINDOW):
            yield attention(q, k, v).sum()
            yield checkpoint(attention, q, k, v, use_reentrant=reentrant).sum()

    gradients = [gradients_of(loss, q, k, v) for loss in losses()]
    for expected, actual in zip(*gradients, strict=True):
        assert_close(actual, expected, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: F.scaled_dot_product_attention, lambda: flex_attention, compiled_attention])
def test_the_caller_of_a_generator_that_is_suspended_in_local_attention_is_told(make: Callable[[], Attention]) -> None:
    """It would compute attention over its own keys, although it is inside a block."""
    attention = make()

    def features() -> Iterator[None]:
        with rs.local_attention():
            for _ in range(2):
                assert_sees(FULL, attention)
                yield

    with block(WINDOW):
        for _ in features():
            with pytest.raises(
                rs.UnplannedAttention, match=r"features is suspended inside local_attention\(\): leave the block"
            ):
                attention(*qkv())
        assert_sees(WINDOW, attention)
        generator = features()
        next(generator)
        with block(CAUSAL):
            generator.close()
        assert_sees(WINDOW, attention)
    for _ in features():
        assert_sees(FULL, attention)


def test_a_generator_that_enters_by_an_exit_stack() -> None:
    def results() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(block(WINDOW))
            yield

    for _ in results():
        with pytest.raises(rs.UnplannedAttention, match="is suspended"):
            F.scaled_dot_product_attention(*qkv())


@contextmanager
def opened(mask: rs.Mask = WINDOW) -> Iterator[None]:
    with block(mask):
        yield


@contextmanager
def opened_by_another() -> Iterator[None]:
    with opened():
        yield


@asynccontextmanager
async def opened_async() -> AsyncIterator[None]:
    with block(WINDOW):
        yield


class Entering:
    """Enters and leaves a block by methods, as a trainer with callbacks does."""

    def __init__(self) -> None:
        self.block = block(WINDOW)

    def start(self) -> None:
        self.block.__enter__()

    def stop(self) -> None:
        self.block.__exit__(None, None, None)

    async def __aenter__(self) -> None:
        self.start()

    async def __aexit__(self, *raised: object) -> None:
        self.stop()


def assert_is_told(kind: str, name: str, attention: Attention = F.scaled_dot_product_attention) -> None:
    with pytest.raises(rs.UnplannedAttention, match=rf"the {kind} [^ ]*{name} is suspended inside a block"):
        attention(*qkv())


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("enter", [opened, opened_by_another])
def test_a_generator_that_enters_by_a_context_manager(enter: Callable[[], Any], attention: Attention) -> None:
    def results() -> Iterator[None]:
        with enter():
            assert_sees(WINDOW, attention)
            yield
            assert_sees(WINDOW, attention)

    for _ in results():
        assert_is_told("generator", "results", attention)
    assert_sees(FULL, attention)


def test_a_generator_that_enters_by_a_function() -> None:
    def results() -> Iterator[None]:
        trainer = Entering()
        trainer.start()
        assert_sees(WINDOW, F.scaled_dot_product_attention)
        yield
        assert_sees(WINDOW, F.scaled_dot_product_attention)
        trainer.stop()

    for _ in results():
        assert_is_told("generator", "results")
    assert_sees(FULL, F.scaled_dot_product_attention)


def test_functions_that_enter_and_leave_outside_of_generators() -> None:
    trainer = Entering()
    trainer.start()
    assert_sees(WINDOW, F.scaled_dot_product_attention)
    trainer.stop()
    assert_sees(FULL, F.scaled_dot_product_attention)


def test_a_function_that_opens_a_block_inside_a_generator() -> None:
    """The block is left before the generator yields."""

    def attend() -> None:
        with block(WINDOW):
            assert_sees(WINDOW, F.scaled_dot_product_attention)

    def results() -> Iterator[None]:
        attend()
        yield
        attend()

    for _ in results():
        assert_sees(FULL, F.scaled_dot_product_attention)


def test_a_generator_that_has_finished_hands_its_block_to_its_caller() -> None:
    with ExitStack() as stack:
        list(stack.enter_context(x) for x in [block(CAUSAL), block(WINDOW)])  # noqa: C400 (a generator on purpose)
        assert_sees(WINDOW, F.scaled_dot_product_attention)

    def results() -> Iterator[None]:
        with ExitStack() as stack:
            list(stack.enter_context(x) for x in [block(WINDOW)])  # noqa: C400
            assert_sees(WINDOW, F.scaled_dot_product_attention)
            yield

    for _ in results():
        assert_is_told("generator", "results")


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("enter", [lambda: block(WINDOW), opened, opened_async, Entering])
def test_the_caller_of_a_suspended_async_generator_is_told(enter: Callable[[], Any], attention: Attention) -> None:
    async def results() -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            entered = enter()
            if hasattr(entered, "__aenter__"):
                await stack.enter_async_context(entered)
            else:
                stack.enter_context(entered)
            assert_sees(WINDOW, attention)
            await asyncio.sleep(0)
            yield
            assert_sees(WINDOW, attention)

    async def main() -> None:
        async for _ in results():
            assert_is_told("async generator", "results", attention)
        assert_sees(FULL, attention)

    asyncio.run(main())


def test_an_async_context_manager_made_of_a_generator() -> None:
    async def main() -> None:
        async with opened_async():
            await asyncio.sleep(0)
            assert_sees(WINDOW, F.scaled_dot_product_attention)
        async with Entering():
            await asyncio.sleep(0)
            assert_sees(WINDOW, F.scaled_dot_product_attention)
        assert_sees(FULL, F.scaled_dot_product_attention)

    asyncio.run(main())


def test_tasks_started_by_an_async_generator_in_its_block_are_inside_it() -> None:
    """The generator waits for them, so it is suspended by await, not by yield."""

    async def attend() -> None:
        await asyncio.sleep(0)
        assert_sees(WINDOW, F.scaled_dot_product_attention)

    async def results() -> AsyncIterator[None]:
        with block(WINDOW):
            await asyncio.gather(attend(), attend())
            yield

    async def main() -> None:
        async for _ in results():
            assert_is_told("async generator", "results")

    asyncio.run(main())


@types.coroutine
def suspend() -> Generator[None, None, None]:
    yield


def finish(coroutine: Any) -> None:
    """Run a coroutine that does not wait, without an event loop."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_driver_of_a_suspended_coroutine_is_told(attention: Attention) -> None:
    async def attend() -> None:
        with block(WINDOW):
            assert_sees(WINDOW, attention)
            await suspend()
            assert_sees(WINDOW, attention)

    coroutine = attend()
    coroutine.send(None)
    assert_is_told("coroutine", "attend", attention)
    finish(coroutine)
    assert_sees(FULL, attention)


def test_the_driver_of_a_coroutine_that_uses_an_async_generator_is_told() -> None:
    async def results() -> AsyncIterator[None]:
        with block(WINDOW):
            await suspend()
            yield

    async def attend() -> None:
        async for _ in results():
            assert_is_told("async generator", "results")

    coroutine = attend()
    coroutine.send(None)
    assert_is_told("async generator", "results")
    finish(coroutine)


def test_a_coroutine_with_a_context_of_its_own_and_no_event_loop() -> None:
    async def attend() -> None:
        with block(WINDOW):
            await suspend()
            assert_sees(WINDOW, F.scaled_dot_product_attention)

    context, coroutine = Context(), attend()
    context.run(coroutine.send, None)
    assert_sees(FULL, F.scaled_dot_product_attention)
    context.run(finish, coroutine)


def test_a_block_entered_by_a_coroutine_that_has_finished() -> None:
    """As by a cell of IPython, which runs cells as coroutines without an event loop."""
    trainer = Entering()
    finish(trainer.__aenter__())
    assert_sees(WINDOW, F.scaled_dot_product_attention)
    finish(trainer.__aexit__())
    assert_sees(FULL, F.scaled_dot_product_attention)


def test_a_task_started_in_a_block_does_not_keep_the_variables_of_its_generator() -> None:
    async def main() -> None:
        done = asyncio.Event()
        variables: list[weakref.ref[Tensor]] = []

        def results() -> Iterator[asyncio.Task[bool]]:
            x = torch.ones(())
            variables.append(weakref.ref(x))
            with block(WINDOW):
                yield asyncio.create_task(done.wait())

        (task,) = results()
        gc.collect()
        assert variables[0]() is None
        done.set()
        await task

    asyncio.run(main())


def test_a_generator_that_is_left_inside_another_block() -> None:
    """The generator ends while a block that was entered later is open."""

    def results() -> Iterator[None]:
        with block(WINDOW):
            yield

    generator = results()
    next(generator)
    with block(CAUSAL):
        next(generator, None)
        assert_sees(CAUSAL, F.scaled_dot_product_attention)
    assert_sees(FULL, F.scaled_dot_product_attention)


@pytest.fixture
def block_of_fixture() -> Iterator[None]:
    with block(WINDOW):
        yield


@pytest.fixture
def block_by_a_function() -> Iterator[None]:
    trainer = Entering()
    trainer.start()
    yield
    trainer.stop()


@pytest.fixture
def block_by_a_context_manager() -> Iterator[None]:
    with opened_by_another():
        yield


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("enter", [opened, opened_by_another])
def test_a_context_manager_made_of_a_generator(enter: Callable[[], Any], attention: Attention) -> None:
    with enter():
        assert_sees(WINDOW, attention)
    assert_sees(FULL, attention)
    with ExitStack() as stack:
        stack.enter_context(enter())
        assert_sees(WINDOW, attention)
    assert_sees(FULL, attention)


@pytest.mark.parametrize("name", ["block_of_fixture", "block_by_a_function", "block_by_a_context_manager"])
def test_a_fixture_made_of_a_generator(name: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(name)
    assert_sees(WINDOW, F.scaled_dot_product_attention)


def test_a_thread_with_the_context_of_a_block_is_outside_it() -> None:
    async def main() -> None:
        with block(WINDOW):
            await asyncio.to_thread(assert_sees, FULL, F.scaled_dot_product_attention)
            assert_sees(WINDOW, F.scaled_dot_product_attention)

    asyncio.run(main())


def test_flex_attention_while_another_thread_compiles() -> None:
    stop, compiled = threading.Event(), threading.Event()

    def compile_again_and_again() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            scale = float(n)
            torch.compile(lambda x, scale=scale: x.sin() * scale, backend="eager")(torch.ones(3))
            compiled.set()

    thread = threading.Thread(target=compile_again_and_again)
    thread.start()
    try:
        assert compiled.wait(60)
        with block(WINDOW):
            for _ in range(50):
                q, k, v = (x.requires_grad_() for x in qkv())
                flex_attention(q, k, v).sum().backward()
    finally:
        stop.set()
        thread.join()
    assert_sees(FULL, flex_attention)
