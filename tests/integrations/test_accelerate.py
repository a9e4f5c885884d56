"""The hooks of accelerate and of Trainer on two processes, against one process.

accelerate 1.15 refuses ``cp_size > 1`` on CPUs (``ParallelismConfig`` wants several GPUs, FSDP2 or DeepSpeed). So the
functions of Trainer and Accelerator that do the work are called here on a gloo mesh, without their constructors.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ringspan.testing.float64 import Float64
from tests.conftest import Pools
from tests.integrations.small_models import VOCABULARY, small_model

if find_spec("accelerate") is None or find_spec("transformers") is None:
    pytest.skip("needs accelerate and transformers: pip install 'ringspan[hf]'", allow_module_level=True)

STEPS, N = 3, 29


def batch(kind: str, step: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, N), generator=torch.Generator().manual_seed(step))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        lengths = [5 + step, 11, 13 - step]
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in lengths]).repeat(2, 1)
        inputs["labels"][:, [0, lengths[0], lengths[0] + 11]] = -100
    return inputs


def train(rank: int, name: str, kind: str) -> list[tuple[float, float]]:
    """The losses of some steps of one process and of this group. The functions of Trainer and Accelerator are
    upstream's."""
    from transformers import Trainer

    from ringspan.integrations.accelerate import Accelerator

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    accelerator: Any = SimpleNamespace(
        torch_device_mesh=mesh, parallelism_config=SimpleNamespace(cp_enabled=True, cp_backend="torch")
    )
    accelerator.maybe_context_parallel = lambda **given: Accelerator.maybe_context_parallel(accelerator, **given)
    trainer: Any = SimpleNamespace(accelerator=accelerator)
    curves: list[list[float]] = []
    for alone in (True, False):
        model = small_model(name)
        model.set_attn_implementation("sdpa")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Accelerator._prepare_cp(accelerator, model, optimizer)
        losses = []
        for step in range(STEPS):
            inputs = batch(kind, step)
            count = (inputs["labels"][:, 1:] >= 0).sum()
            if alone:
                with Float64():
                    loss = model(**inputs, use_cache=False, num_items_in_batch=count).loss
                loss.backward()
            else:
                context, inputs = Trainer._prepare_context_parallel_inputs(trainer, model, inputs)
                with context(), Float64():
                    loss = model(**inputs, use_cache=False, num_items_in_batch=count).loss
                    loss.backward()
                add_up(model, loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert model.config._attn_implementation == "sdpa"
        curves.append(losses)
    return list(zip(*curves, strict=True))


def add_up(model: nn.Module, loss: Tensor) -> None:
    """What FSDP does with the gradients, and Trainer with the loss: each rank has those of its own tokens."""
    dist.all_reduce(loss.data)
    for x in model.parameters():
        dist.all_reduce(x.grad)


@pytest.mark.parametrize(("name", "kind"), [("gemma3", "packed"), pytest.param("llama4", "plain", marks=pytest.mark.slow)])
def test_the_losses_of_training_are_those_of_one_process(name: str, kind: str, pools: Pools) -> None:
    for losses in pools(2).run(train, name, kind):
        for alone, together in losses:
            assert abs(alone - together) <= 1e-9 * abs(alone)
        assert losses[0][0] != losses[1][0]


# What the integration relies on: function -> its parameters.
SIGNATURES = {
    "Accelerator._prepare_cp": ["self", "args"],
    "Accelerator.maybe_context_parallel": ["self", "buffers", "buffer_seq_dims", "no_restore_buffers"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_accelerate_has_the_hooks(name: str) -> None:
    import accelerate

    function = getattr(accelerate.Accelerator, name.partition(".")[2], None)
    assert function is not None, f"accelerate has no {name} any more: see ringspan/integrations/accelerate.py"
    found = list(inspect.signature(inspect.unwrap(function)).parameters)
    assert found == SIGNATURES[name], f"accelerate has changed {name}: see ringspan/integrations/accelerate.py"
    source = inspect.getsource(inspect.unwrap(accelerate.Accelerator.maybe_context_parallel))
    assert "self._cp_context(" in source, "accelerate no longer enters _cp_context in each step"


def test_trainer_has_the_hook() -> None:
    from transformers import Trainer

    found = list(inspect.signature(Trainer._prepare_context_parallel_inputs).parameters)
    assert found == ["self", "model", "inputs"], "transformers has changed Trainer._prepare_context_parallel_inputs"


def test_positions_are_found_among_the_buffers() -> None:
    import ringspan as rs
    from ringspan.integrations.accelerate import _mask

    ids, positions = torch.arange(12).reshape(2, 6) + 7, torch.tensor([[0, 1, 2, 0, 1, 0]] * 2)
    assert _mask([ids, positions], [1, 1]) == rs.documents([3, 2, 1])
    assert _mask([ids, ids], [1, 1]) == rs.causal(6)
    assert _mask([ids, positions[:, :1].repeat(1, 6) + 1], [1, 1]) == rs.causal(6)  # an attention mask of ones
    token_types = torch.zeros_like(ids)
    assert _mask([ids, token_types], [1, 1]) == rs.causal(6)
    token_types[:, -1] = 1
    assert _mask([ids, token_types], [1, 1]) == rs.causal(6)


def buffer_after_an_error(rank: int) -> list[int]:
    from ringspan.integrations.accelerate import sharded

    mesh, ids = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), torch.arange(7).reshape(1, 7)
    context = sharded(mesh=mesh, models=[nn.Linear(1, 1)], buffers=[ids], buffer_seq_dims=[1])
    with pytest.raises(AttributeError, match="config"), context:  # no model of transformers
        pass
    return ids.flatten().tolist()


def test_buffers_are_whole_after_an_error(pools: Pools) -> None:
    assert pools(2).run(buffer_after_an_error) == [list(range(7))] * 2
