"""Training by ``Trainer`` on two processes, against one process.

The runs are whole: ``Trainer.train()`` and the evaluations in it. Models are in float64, so that the losses of one
process and of two differ by rounding only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ringspan.errors import InputError
from ringspan.testing.assertions import assert_close
from ringspan.testing.float64 import Float64
from tests.conftest import Pools
from tests.integrations.processes import launched
from tests.integrations.small_models import VOCABULARY, small_model

if find_spec("accelerate") is None or find_spec("transformers") is None:
    pytest.skip("needs accelerate and transformers: pip install 'ringspan[hf]'", allow_module_level=True)

STEPS, N, B = 4, 29, 2
ROUNDS = Version(version("transformers")) < Version("5.23")  # Trainer divides the number of labels by cp_size


def rows(kind: str) -> list[dict[str, Tensor]]:
    """A data set for ``STEPS`` batches. ``packed`` rows have documents, the last row of a ``padded`` batch is short."""
    data = []
    for i in range(STEPS * B):
        ids = torch.randint(3, VOCABULARY, (N,), generator=torch.Generator().manual_seed(i))
        row = {"input_ids": ids, "labels": ids.clone()}
        if kind == "packed":
            lengths = [5 + i, 11, 13 - i]
            row["position_ids"] = torch.cat([torch.arange(n) for n in lengths])
            row["labels"][[0, lengths[0], lengths[0] + 11]] = -100
        if kind == "padded":
            row["attention_mask"] = (torch.arange(N) < (N if i % B == 0 else N - 6)).long()
            row["labels"][row["attention_mask"] == 0] = -100
        data.append(row)
    return data


def train(rank: int, folder: str, name: str, kind: str) -> list[list[dict[str, float]]]:
    """What Trainer logs, by one process and by this group."""
    from transformers import Trainer, TrainingArguments

    from ringspan.integrations.accelerate import ParallelismConfig

    logs = []
    for alone in (True, False):
        with launched(alone=alone), Float64():
            model = small_model(name)
            model.set_attn_implementation("sdpa")
            arguments = TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                per_device_train_batch_size=B,
                per_device_eval_batch_size=B,
                max_steps=STEPS,
                learning_rate=0.01,
                logging_steps=1,
                eval_strategy="steps",
                eval_steps=2,
                prediction_loss_only=True,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                parallelism_config=None if alone else ParallelismConfig(cp_size=2),
            )
            trainer = Trainer(model=model, args=arguments, train_dataset=rows(kind), eval_dataset=rows(kind)[: 2 * B - 1])
            first = trainer.evaluate()
            trainer.train()
            assert model.config._attn_implementation == "sdpa"
            logs.append([first, *trainer.state.log_history])
    return logs


def curve(log: list[dict[str, float]], what: str) -> list[float]:
    return [x[what] for x in log if what in x]


@pytest.mark.parametrize(
    ("name", "kind"), [("gemma3", "packed"), ("gemma3", "padded"), pytest.param("llama4", "plain", marks=pytest.mark.slow)]
)
def test_the_losses_of_trainer_are_those_of_one_process(name: str, kind: str, pools: Pools, tmp_path: Path) -> None:
    for alone, together in pools(2).run(train, str(tmp_path), name, kind):
        for what, count in {"loss": STEPS, "grad_norm": STEPS, "eval_loss": STEPS // 2 + 1}.items():
            wanted, found = curve(alone, what), curve(together, what)
            assert len(wanted) == len(found) == count
            assert found == pytest.approx(wanted, rel=2.5e-7, abs=0)  # Trainer adds losses up in float32
            assert len(set(wanted)) == count


def arguments(folder: str, *, alone: bool, **options: Any) -> Any:
    from transformers import TrainingArguments

    from ringspan.integrations.accelerate import ParallelismConfig

    sizes = {"per_device_train_batch_size": B, "per_device_eval_batch_size": B, "max_steps": 1, "save_strategy": "no"}
    config = None if alone else ParallelismConfig(cp_size=2)
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1}
    return TrainingArguments(output_dir=folder, use_cpu=True, parallelism_config=config, **{**sizes, **quiet, **options})


def predictions(rank: int, folder: str) -> list[Any]:
    """What ``compute_metrics`` gets, by one process and by this group; the last batch is incomplete."""
    from transformers import Trainer

    got: list[Any] = []
    for alone in (True, False):
        with launched(alone=alone), Float64():
            model = small_model("gemma3")
            options = arguments(folder, alone=alone, include_for_metrics=["inputs", "loss"])
            trainer = Trainer(model=model, args=options, compute_metrics=lambda x: got.append(x) or {})
            trainer.evaluate(rows("padded")[:3])
    return [tuple(torch.as_tensor(x) for x in (y.predictions, y.label_ids, y.inputs, y.losses)) for y in got]


def test_metrics_get_the_predictions_of_one_process(pools: Pools, tmp_path: Path) -> None:
    for alone, together in pools(2).run(predictions, str(tmp_path)):
        assert [x.shape for x in together] == [(3, N, VOCABULARY), (3, N), (3, N), (3,)]
        for found, wanted in zip(together, alone, strict=True):
            assert_close(found, wanted, rtol=1e-6, atol=1e-12)


def test_a_trainer_that_exists_can_use_ringspan(tmp_path: Path) -> None:
    """Trainer keeps the method that gathers predictions, from before."""
    from transformers import Trainer

    from ringspan.integrations.accelerate import gather_for_metrics, prepare, use_ringspan

    with launched(alone=True):
        trainer = Trainer(model=small_model("llama"), args=arguments(str(tmp_path), alone=True))
        use_ringspan(trainer)
        assert trainer.gather_function.func.__func__ is gather_for_metrics
        assert trainer.accelerator._prepare_cp.__func__ is prepare


def test_parts_without_a_loss_print_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    from ringspan.integrations.trainer import SharedLosses

    printed: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", printed.append)
    model = small_model("llama")
    own = model.loss_function
    losses = SharedLosses(model)
    assert model.loss_function.loss_function is own
    losses.restore()
    assert model.loss_function is own
    assert not printed


def test_a_head_whose_loss_has_no_type_is_found_inside_another_module() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from ringspan.integrations.trainer import SharedLoss, SharedLosses

    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=1))
    assert model.loss_type is None
    losses = SharedLosses(nn.ModuleList([model]))  # as PEFT wraps it
    assert isinstance(model.loss_function, SharedLoss)
    losses.restore()


def without_num_items(rank: int, folder: str) -> list[list[float]]:
    """A model that is not told the number of labels in the batch, and ranks with different numbers of labels."""
    from transformers import Trainer

    data, found = rows("plain"), []
    for n, row in enumerate(data):
        row["labels"][: N - 3 - n] = -100
    for alone in (True, False):
        with launched(alone=alone), Float64():
            model = small_model("llama")
            model.accepts_loss_kwargs = False
            options = arguments(folder, alone=alone, prediction_loss_only=True, gradient_accumulation_steps=2)
            trainer = Trainer(model=model, args=options, train_dataset=data, eval_dataset=data[:3])
            first = trainer.evaluate()
            trainer.train()
            log = trainer.state.log_history
            found.append([first["eval_loss"], *curve(log, "loss"), *curve(log, "grad_norm")])
    return found


def test_the_mean_of_a_model_without_num_items_is_over_all_ranks(pools: Pools, tmp_path: Path) -> None:
    for alone, together in pools(2).run(without_num_items, str(tmp_path)):
        assert len(alone) == 3
        assert together == pytest.approx(alone, rel=2.5e-7, abs=0)


OWN_LABELS = {"average_tokens_across_devices": False}

# options of TrainingArguments, and the largest relative difference of losses and of gradient norms
SETTINGS: dict[str, tuple[dict[str, Any], float, float]] = {
    **({} if ROUNDS else {"labels counted by each process": (OWN_LABELS, 1e-6, 1e-5)}),
    "checkpoints": ({"gradient_checkpointing": True}, 1e-6, 1e-5),
    "compiled": ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, 1e-6, 1e-5),
    "bfloat16": ({"bf16": True}, 1e-3, 1e-2),
    "rows of different lengths": ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}, 1e-6, 1e-5),
}


def train_with(rank: int, folder: str, kind: str) -> list[list[float]]:
    """The losses and the gradient norms of Trainer in float32, by one process and by this group."""
    from transformers import Trainer

    data, found = rows("plain"), []
    if kind == "rows of different lengths":
        data = [{name: x[: N - 5 * (n % 3)] for name, x in row.items()} for n, row in enumerate(data)]
    for alone in (True, False):
        with launched(alone=alone):
            model = small_model("gemma3").float()
            model.set_attn_implementation("sdpa")
            options = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.01, **SETTINGS[kind][0]}
            trainer = Trainer(model=model, args=arguments(folder, alone=alone, **options), train_dataset=data)
            trainer.train()
            found += [curve(trainer.state.log_history, what) for what in ("loss", "grad_norm")]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_of_trainer_are_exact(kind: str, pools: Pools, tmp_path: Path) -> None:
    for losses, norms, our_losses, our_norms in pools(2).run(train_with, str(tmp_path), kind):
        assert len(losses) == len(norms) == 2
        assert our_losses == pytest.approx(losses, rel=SETTINGS[kind][1], abs=0)
        assert our_norms == pytest.approx(norms, rel=SETTINGS[kind][2], abs=0)


def resumed(rank: int, folder: str) -> list[list[float]]:
    """The losses of four steps without a stop, and of the last two after a checkpoint was loaded."""
    from transformers import Trainer

    found = []
    for stopped in (False, True):
        with launched(alone=False):
            model = small_model("gemma3").float()
            model.set_attn_implementation("sdpa")
            options = arguments(folder, alone=False, max_steps=4, save_strategy="steps", save_steps=2)
            trainer = Trainer(model=model, args=options, train_dataset=rows("plain"))
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if stopped else None)
            found.append(curve(trainer.state.log_history, "loss"))
    return found


@pytest.mark.slow
def test_a_resumed_run_has_the_losses_of_one_without_a_stop(pools: Pools, tmp_path: Path) -> None:
    for without_stop, stopped in pools(2).run(resumed, str(tmp_path)):
        assert len(without_stop) == len(stopped) == 4
        assert stopped == without_stop


def with_own_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that computes its loss without ``shift_labels``."""

    def forward_with_loss(**kwargs: Any) -> Any:
        out = forward(**{name: x for name, x in kwargs.items() if name not in ("labels", "shift_labels")})
        out["loss"] = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), kwargs["labels"][:, 1:].flatten())
        return out

    return forward_with_loss


def refused_by_trainer(rank: int, folder: str) -> dict[str, str]:
    from transformers import Trainer

    found = {}
    for case, (options, _) in REFUSED_BY_TRAINER.items():
        with launched(alone=False):
            try:
                model = small_model("qwen3_moe" if case == "a router loss" else "llama").float()
                model.config.output_router_logits = case == "a router loss"
                if case == "its own loss":
                    model.forward = with_own_loss(model.forward)
                Trainer(model=model, args=arguments(folder, alone=False, **options), train_dataset=rows("plain")).train()
                found[case] = ""
            except InputError as error:
                found[case] = str(error)
    with launched(alone=False), pytest.raises(InputError, match="no FSDP on CPUs"):
        Trainer(model=model, args=arguments(folder, alone=False, fsdp=True, fsdp_config={"fsdp_version": 2}))
    return found


REFUSED_BY_TRAINER: dict[str, tuple[dict[str, Any], str]] = {
    "label smoothing": ({"label_smoothing_factor": 0.1}, "Leave the loss to the model"),
    **({"a rounded number of labels": (OWN_LABELS, "rounds it down")} if ROUNDS else {}),
    "noise": ({"neftune_noise_alpha": 5.0}, "would count those of this rank"),
    "a router loss": ({}, "set config.output_router_logits to False"),
    "its own loss": ({"remove_unused_columns": False}, "does not give shift_labels to its loss function"),
}


def test_what_trainer_would_get_wrong_is_refused(pools: Pools, tmp_path: Path) -> None:
    for found in pools(2).run(refused_by_trainer, str(tmp_path)):
        for case, (_, text) in REFUSED_BY_TRAINER.items():
            assert text in found[case], case


def sharded_parameters(rank: int) -> list[float]:
    """The context of a step around a model under FSDP 2, on a mesh that has no accelerator; loss and a gradient."""
    from torch.distributed.fsdp import fully_shard

    from ringspan.integrations.accelerate import sharded

    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), []
    for alone in (True, False):
        model: Any = small_model("gemma3")
        model.set_attn_implementation("sdpa")
        row = {name: x[None] for name, x in rows("packed")[0].items()}
        row["shift_labels"] = nn.functional.pad(row["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        with Float64():
            if alone:
                loss = model(**row, use_cache=False).loss
                loss.backward()
                found += [loss.item(), model.model.embed_tokens.weight.grad.square().sum().item()]
                continue
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            with sharded(mesh=mesh, models=[model], buffers=list(row.values()), buffer_seq_dims=[1] * len(row)):
                loss = model(**row, use_cache=False).loss
                loss.backward()
        grad = model.model.embed_tokens.weight.grad.full_tensor()
        both = loss.detach().clone()
        dist.all_reduce(both)
        found += [both.item() / 2, grad.square().sum().item()]
    return found


def test_the_context_is_exact_with_fsdp(pools: Pools) -> None:
    """accelerate 1.15 has no FSDP on CPUs, so the model is wrapped here."""
    for found in pools(2).run(sharded_parameters):
        assert found[2:] == pytest.approx(found[:2], rel=1e-10, abs=0)


# What the integration relies on: function -> its parameters, and what its source has.
HOOKS = {
    "accelerate.Accelerator._prepare_cp": (["self", "args"], ["self._cp_context ="]),
    "accelerate.Accelerator.maybe_context_parallel": (
        ["self", "buffers", "buffer_seq_dims", "no_restore_buffers"],
        ["self._cp_context("],
    ),
    "accelerate.Accelerator.gather_for_metrics": (
        ["self", "input_data", "use_gather_object"],
        ["tensor[: self.gradient_state.remainder]"],
    ),
    "accelerate.Accelerator.prepare_model": (
        ["self", "model", "device_placement", "evaluation_mode"],
        ["self._models.append(model)", "model._is_accelerate_prepared = True", "DistributedType.MULTI_CPU"],
    ),
    "accelerate.ParallelismConfig._validate_accelerator": (
        ["self", "accelerator"],
        ["self._sizes", "accelerator.multi_device"],
    ),
    "transformers.Trainer._prepare_context_parallel_inputs": (["self", "model", "inputs"], ["maybe_context_parallel"]),
    "transformers.Trainer.prediction_step": (
        ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
        ["self._prepare_context_parallel_inputs("],
    ),
    "transformers.Trainer.training_step": (
        ["self", "model", "inputs", "num_items_in_batch"],
        ["self._prepare_context_parallel_inputs("],
    ),
    "transformers.Trainer.create_accelerator_and_postprocess": (["self"], ["self.accelerator ="]),
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_hooks_are_there(name: str) -> None:
    package, cls, method = name.split(".")
    function = getattr(getattr(importlib.import_module(package), cls), method, None)
    assert function is not None, f"{package} has no {cls}.{method} any more: see ringspan/integrations/accelerate.py"
    parameters, snippets = HOOKS[name]
    found = list(inspect.signature(inspect.unwrap(function)).parameters)
    assert found == parameters, f"{package} has changed {cls}.{method}: see ringspan/integrations/accelerate.py"
    source = inspect.getsource(inspect.unwrap(function))
    for snippet in snippets:
        assert snippet in source, f"{cls}.{method} of {package} has no `{snippet}`: see ringspan/integrations/accelerate.py"


def test_trainer_rounds_the_number_of_labels_in_the_versions_that_we_refuse() -> None:
    from transformers import Trainer

    source = inspect.getsource(Trainer._get_num_items_in_batch)
    assert f"num_items_in_batch {'//' if ROUNDS else '/'} (" in source, "see ROUNDS in ringspan/integrations/trainer.py"


def sizes_that_are_refused(rank: int) -> list[str]:
    import accelerate

    from ringspan.integrations.accelerate import ParallelismConfig

    messages = []
    for sizes in ({"cp_size": 2}, {"dp_shard_size": 2}, {"tp_size": 2}):
        with launched(alone=False):
            try:
                accelerate.Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
                messages.append("")
            except InputError as error:
                messages.append(str(error))
    with launched(alone=False), pytest.raises(ValueError, match="ParallelismConfig is only compatible"):
        accelerate.Accelerator(cpu=True, parallelism_config=accelerate.ParallelismConfig(cp_size=2))
    return messages


def test_other_sizes_are_refused_on_cpus(pools: Pools) -> None:
    """accelerate's own configuration refuses all of them."""
    for found in pools(2).run(sizes_that_are_refused):
        assert found[0] == ""
        assert "got cp_size=1, dp_shard_size=2" in found[1]
        assert "got cp_size=1, tp_size=2" in found[2]


def test_positions_are_found_among_the_buffers() -> None:
    from ringspan.integrations.accelerate import _positions

    ids, positions = torch.arange(12).reshape(2, 6) + 7, torch.tensor([[0, 1, 2, 0, 1, 0]] * 2)
    found = _positions([ids, positions], [1, 1])
    assert found is not None
    assert torch.equal(found, positions)
    assert _positions([ids, ids], [1, 1]) is None
    assert _positions([ids, positions[:, :1].repeat(1, 6) + 1], [1, 1]) is None  # an attention mask of ones
    token_types = torch.zeros_like(ids)
    assert _positions([ids, token_types], [1, 1]) is None
    token_types[:, -1] = 1
    assert _positions([ids, token_types], [1, 1]) is None


def call_of_model(rank: int, kind: str) -> str:
    """Call a model as Trainer does, and return the error."""
    from ringspan.integrations.accelerate import sharded

    ids = torch.arange(3, 3 + N)[None] % VOCABULARY
    batch = {"input_ids": ids, "labels": ids.clone(), "shift_labels": ids.roll(-1, 1), "position_ids": torch.arange(N)[None]}
    if kind != "a loss outside the model":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["position_ids"] = (torch.arange(N)[None] - 5).clamp(min=0)
    if "left padding" in kind:
        batch["attention_mask"][:, :5] = 0
    mesh, model = init_device_mesh("cpu", (2,)), small_model("llama")
    if kind.startswith("opt"):
        model.config.model_type = "opt"
    model.set_attn_implementation("sdpa")
    try:
        with sharded(mesh=mesh, models=[model], buffers=list(batch.values()), buffer_seq_dims=[1] * len(batch)):
            if kind == "a loss outside the model":
                del batch["labels"]
            model(**batch, use_cache=False)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("a loss outside the model", "Leave the loss to the model"),
        ("documents and an attention mask", "Leave the attention_mask out"),
        ("left padding", ""),
        ("opt, left padding", "opt counts the positions of tokens that are no padding"),
    ],
)
def test_what_would_differ_from_one_process_is_refused(kind: str, text: str, pools: Pools) -> None:
    for error in pools(2).run(call_of_model, kind):
        assert bool(error) == bool(text)
        assert text in error


def buffer_after_an_error(rank: int) -> list[int]:
    from ringspan.integrations.accelerate import sharded

    mesh, ids = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), torch.arange(7).reshape(1, 7)
    context = sharded(mesh=mesh, models=[nn.Linear(1, 1)], buffers=[ids], buffer_seq_dims=[1])
    with pytest.raises(AttributeError, match="config"), context:  # no model of transformers
        pass
    return ids.flatten().tolist()


def test_buffers_are_whole_after_an_error(pools: Pools) -> None:
    assert pools(2).run(buffer_after_an_error) == [list(range(7))] * 2
