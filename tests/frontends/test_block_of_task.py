"""A ``with cp:`` block belongs to its task: other tasks of the thread, and callers of generators, are not inside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import ringspan as rs
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


def test_a_generator_that_enters_by_an_exit_stack() -> None:
    def results() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(block(WINDOW))
            yield

    for _ in results():
        with pytest.raises(rs.UnplannedAttention, match="is suspended"):
            F.scaled_dot_product_attention(*qkv())


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


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_context_manager_made_of_a_generator(attention: Attention) -> None:
    @contextmanager
    def opened() -> Iterator[None]:
        with block(WINDOW):
            yield

    with opened():
        assert_sees(WINDOW, attention)
    assert_sees(FULL, attention)


def test_a_fixture_made_of_a_generator(block_of_fixture: None) -> None:
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
