"""The choice of a kernel, and the errors when there is none."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.kernels import Inputs, accumulation_dtype, cpu, fa4, flex, missing_packages, reference, registry, select_kernel


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs(device=torch.device(device), dtype=dtype, head_dim=64, v_dim=64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_auto_takes_the_cpu_kernel_on_a_cpu(dtype: torch.dtype) -> None:
    assert select_kernel("auto", inputs(dtype=dtype)) is cpu


@pytest.mark.parametrize(("backend", "kernel"), [("cpu", cpu), ("reference", reference)])
def test_a_kernel_by_name(backend: str, kernel: types.ModuleType) -> None:
    assert select_kernel(backend, inputs()) is kernel


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("abacus", "cpu", "no kernel is called 'abacus'; there are "),
        ("flsh", "cpu", "no kernel is called 'flsh' (did you mean flash?); there are "),
        ("FA4", "cpu", "no kernel is called 'FA4' (did you mean fa4?); there are "),
        (["cpu"], "cpu", "no kernel is called ['cpu']"),
        ("fast", "cpu", "cpu, eager, reference and auto"),
        ("cpu", "cuda", 'backend="cpu" serves cpu tensors, not cuda; use backend="auto" to have one chosen'),
        ("auto", "meta", "no fast kernel can serve torch.float32 on meta: "),
        ("auto", "meta", "cpu serves cpu tensors, not meta"),
        ("auto", "meta", 'backend="reference" is exact on any device, dense and slow'),
    ],
)
def test_errors(backend: Any, device: str, message: str) -> None:
    with pytest.raises(rs.KernelError) as error:
        select_kernel(backend, inputs(device))
    assert message in str(error.value)


def test_auto_never_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "unsupported_reason", lambda inputs: "is out of order")
    with pytest.raises(rs.KernelError, match="cpu is out of order"):
        select_kernel("auto", inputs())


def test_kernels_are_tried_in_order_and_imported_when_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = types.ModuleType("first"), types.ModuleType("second")
    first.unsupported_reason = lambda inputs: "is out of order"  # type: ignore[attr-defined]
    second.unsupported_reason = lambda inputs: None  # type: ignore[attr-defined]
    for module in (first, second):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "KERNELS", {"first": "first", "second": "second", "third": "no.such.module"})
    assert select_kernel("auto", inputs()) is second
    with pytest.raises(rs.KernelError, match='backend="first" is out of order'):
        select_kernel("first", inputs())


@pytest.mark.parametrize(
    ("backend", "is_installed", "dtype", "package"),
    [
        ("fa4", False, torch.bfloat16, "flash-attn-4"),
        ("fa4", False, torch.float32, None),  # not supported by fa4 in any case
        ("fa4", True, torch.bfloat16, None),
        ("flex", False, torch.bfloat16, "triton"),
        ("flex", False, torch.float64, None),
        ("flex", True, torch.bfloat16, None),
    ],
)
def test_missing_packages(
    monkeypatch: pytest.MonkeyPatch, backend: str, is_installed: bool, dtype: torch.dtype, package: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fa4, "is_installed", lambda: is_installed)
    monkeypatch.setattr(flex, "find_spec", lambda name: object() if is_installed and name == "triton" else None)
    given = inputs("cuda", dtype)
    assert missing_packages(given).get(backend) == package
    if package:
        with pytest.raises(rs.KernelError, match=f'backend="{backend}" needs a package .*: pip install {package};'):
            select_kernel(backend, given)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_accumulation_is_at_least_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert accumulation_dtype(dtype) == expected


def test_attention_rejects_an_unknown_backend() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(rs.KernelError, match="no kernel is called 'fast'"):
        rs.LocalWorld(2).attention(q, q, q, mask=rs.causal(4), backend="fast")
