"""Compare the Triton kernels with plain operations, in Triton's interpreter if there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringspan.kernels.partial import Partial, merge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
fused = pytest.importorskip("ringspan.kernels.fused", reason="needs triton")


def partials(e: int, dtype: torch.dtype) -> tuple[Partial, Partial]:
    """Return two partial results of 7 × 2 × 3 queries, the second with a kernel's strides.

    Rows 0 to 2 are empty in one or both.
    """
    torch.manual_seed(e)
    a = Partial(torch.randn(7, 2, 3, e, device=DEVICE), 5 * torch.randn(7, 2, 3, device=DEVICE))
    b_out = torch.randn(2, 7, 3, e, device=DEVICE).to(dtype).transpose(0, 1)
    b = Partial(b_out, 5 * torch.randn(2, 3, 7, device=DEVICE).permute(2, 0, 1))
    for part, empty in ((a, [0, 1]), (b, [1, 2])):
        part.out[empty] = 0
        part.lse[empty] = -torch.inf
    return a, b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("e", [5, 64, 128])
@pytest.mark.parametrize("separate_old", [False, True])
def test_merge_equals_the_plain_one(separate_old: bool, e: int, dtype: torch.dtype) -> None:
    """The old out is read in place, or from another tensor of lower precision."""
    a, b = partials(e, dtype)
    old = a.out
    if separate_old:
        old, a = a.out.to(dtype), Partial(torch.full_like(a.out, torch.nan), a.lse)
    want = merge(Partial(old.float().cpu(), a.lse.cpu()), Partial(b.out.float().cpu(), b.lse.cpu()))
    fused.merge_(a.out, a.lse, b.out, b.lse, old)
    torch.testing.assert_close(a.out.cpu(), want.out, rtol=0, atol=1e-6)
    assert torch.equal(torch.isinf(a.lse).cpu(), torch.isinf(want.lse))
    torch.testing.assert_close(a.lse.cpu(), want.lse, rtol=1e-6, atol=1e-6)
    assert (a.out[1] == 0).all()
    assert (a.lse[1] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_result_is_rounded_once(dtype: torch.dtype) -> None:
    a, b = partials(64, dtype)
    narrow = a.out.to(dtype)
    want = merge(Partial(narrow.float().cpu(), a.lse.cpu()), Partial(b.out.float().cpu(), b.lse.cpu()))
    fused.merge_(narrow, a.lse, b.out, b.lse, narrow)
    # Half a unit in the last place. Triton's interpreter truncates to bfloat16 instead of rounding.
    units = 1.0 if DEVICE == "cpu" and dtype == torch.bfloat16 else 0.51
    assert ((narrow.float().cpu() - want.out).abs() <= units * torch.finfo(dtype).eps * want.out.abs() + 1e-6).all()
    torch.testing.assert_close(a.lse.cpu(), want.lse, rtol=1e-6, atol=1e-6)


def test_cached_launches_give_the_same_result() -> None:
    """The first launch looks up a program, later ones reuse it with other tensors, addresses and strides."""
    for shift in (0, 0, 1, 1, 0):
        a, b = partials(64, torch.bfloat16)
        buffer = torch.empty(b.out.numel() + 8, dtype=b.out.dtype, device=DEVICE)
        moved = buffer[shift : shift + b.out.numel()].view(b.out.shape)
        moved.copy_(b.out)
        want = merge(Partial(a.out.cpu(), a.lse.cpu()), Partial(b.out.float().cpu(), b.lse.cpu()))
        fused.merge_(a.out, a.lse, moved, b.lse, a.out)
        torch.testing.assert_close(a.out.cpu(), want.out, rtol=0, atol=1e-6)


class FakeKernel:
    """A fake of a Triton kernel, or of the program compiled from it. Records the integer arguments of every launch."""

    def __init__(self, name: str, launches: list[tuple[object, ...]], program: FakeKernel | None = None) -> None:
        self.name, self.launches, self.program = name, launches, program

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., FakeKernel | None]:
        def launch(*given: object) -> FakeKernel | None:
            self.launches.append((self.name, grid, *(x for x in given if isinstance(x, int))))
            return self.program

        return launch


def test_a_program_is_looked_up_once_and_launched_with_the_same_integers() -> None:
    """Other strides, or unaligned addresses, need another program."""
    launches: list[tuple[object, ...]] = []
    kernel, buffer = FakeKernel("kernel", launches, FakeKernel("program", launches)), torch.empty(1000, device=DEVICE)
    for start, stride in ((0, 48), (64, 48), (1, 48), (5, 48), (0, 56), (128, 56)):
        x = buffer.as_strided((4, 2, 3, 8), (stride, 24, 8, 1), start)
        fused.launch_rows(kernel, (x,), torch.Size((4, 2, 3)), (8, 16))
    grid = (2, 1, 1)
    assert launches == [(name, grid, 24, 2, 3, s, 24, 8, 8, 16) for s in (48, 48, 56) for name in ("kernel", "program")]
    fused._launches.clear()


def test_very_large_and_small_lse_do_not_overflow() -> None:
    lse = torch.tensor([3e4, -3e4, 3e4]).view(3, 1, 1).to(DEVICE)
    out, new = torch.ones(3, 1, 1, 8, device=DEVICE), torch.full((3, 1, 1, 8), 3.0, device=DEVICE)
    fused.merge_(out, lse, new, torch.tensor([-3e4, 3e4, 3e4]).view(3, 1, 1).to(DEVICE), out)
    assert out[:, 0, 0, 0].tolist() == [1.0, 3.0, 2.0]
    assert lse.flatten().tolist() == pytest.approx([3e4, 3e4, 3e4 + 0.6931], abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 40), (5, 8)])
@pytest.mark.parametrize("add", [False, True])
def test_two_gradients_side_by_side(add: bool, d: int, e: int, dtype: torch.dtype) -> None:
    """With the strides of a kernel's output, into some rows of a larger buffer."""
    torch.manual_seed(d)
    dk, dv = (torch.randn(2, 7, 3, n, device=DEVICE).to(dtype).transpose(0, 1) for n in (d, e))
    both = torch.randn(9, 2, 3, d + e, device=DEVICE)
    want = both.clone()
    want[1:8] = torch.cat([dk, dv], -1).float() + (want[1:8] if add else 0)
    if not add:
        both[1:8] = torch.nan
    fused.write_side_by_side_(both[1:8], dk, dv, add=add)
    assert torch.equal(both, want)


def test_no_rows() -> None:
    out, lse = torch.empty(0, 1, 1, 8), torch.empty(0, 1, 1)
    fused.merge_(out, lse, out, lse, out)
