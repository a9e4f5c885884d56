"""What a rank says of itself before attention: worked out once, and kept by the plan."""

from __future__ import annotations

import torch

import ringspan as rs
from ringspan.engine import look_of
from ringspan.frontends.attention import introduced


def test_a_plan_does_not_keep_itself() -> None:
    """Else it would live until somebody collects cycles, and the tensors of its mask with it."""
    q, k, v = (look_of(torch.empty(1, heads, 6, 8)) for heads in (4, 2, 2))
    plan = rs.plan(rs.causal(12), world=2, rank=0, strategy="ring")
    fitted, hello, inputs = introduced(plan, q, k, v)
    assert fitted is None
    assert (hello.heads, hello.kv_heads, hello.queries, hello.keys) == (4, 2, 6, 6)
    assert (inputs.head_dim, inputs.v_dim, inputs.dtype, inputs.has_mods) == (8, 8, torch.float32, False)


def test_a_plan_for_other_heads_is_another() -> None:
    q, k, v = (look_of(torch.empty(1, heads, 6, 8)) for heads in (4, 2, 2))
    plan = rs.plan(rs.causal(12), world=2, rank=0, strategy="ulysses(heads=8, kv_heads=8)")
    fitted, hello, _ = introduced(plan, q, k, v)
    assert fitted is not None
    assert fitted.program.heads == (4, 2)
    assert hello.heads == 4
