"""The code of ``docs/migration.md`` trains like one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.compat.jobs import mesh_of_all
from tests.conftest import Pools

DOCS = Path(__file__).parent.parent.parent / "docs"
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "migration.md").read_text(encoding="utf-8"), flags=re.DOTALL)
TOKENS, BATCH = 64, 2


def code() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, "migration.md", "exec"), names)
    return names


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (BATCH, TOKENS + 1), generator=generator)
    documents = torch.randint(3, (BATCH, TOKENS), generator=generator).sort().values
    return tokens[:, :-1].clone(), tokens[:, 1:].clone(), documents


def model_of(names: dict[str, Any], *, flex: bool) -> Any:
    torch.manual_seed(0)
    model = names["Model"](50, 16, 2, TOKENS)
    if flex:
        model.layers = torch.nn.ModuleList([names["FlexSelfAttention"](16, 2) for _ in range(2)])
    return model.double()


def train(rank: int, flex: bool) -> None:
    names, mesh = code(), mesh_of_all()
    tokens, labels, documents = batch()
    whole = model_of(names, flex=flex)
    visible = torch.ones(TOKENS, TOKENS).tril().bool().expand(BATCH, 1, -1, -1)
    if flex:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    for layer in whole.layers:
        layer.attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    expected = F.cross_entropy(whole(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    model = model_of(names, flex=flex)
    if flex:
        names["parallelize"](model, mesh)
        loss = names["flex_train_step"](model, mesh, tokens, labels, documents)
    else:
        loss = names["train_step"](model, mesh, tokens, labels)
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=0)
    for (name, p), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(p.grad, reference.grad, rtol=1e-8, atol=1e-9, msg=name)
    assert model.rotary.shape[0] == TOKENS


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("flex", [False, True], ids=["block", "style"])
def test_the_trainer(pools: Pools, flex: bool, world: int) -> None:
    pools(world).run(train, flex)
