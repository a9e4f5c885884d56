"""Training by TRL's ``SFTTrainer`` on packed documents, on two processes, against one process."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Pools
from tests.integrations.processes import launched
from tests.integrations.small_models import VOCABULARY, small_model

if find_spec("trl") is None:
    pytest.skip("needs trl: pip install 'ringspan[trl]'", allow_module_level=True)

STEPS = 4
LENGTHS = [9, 17, 4, 23, 12, 6, 29, 8, 3, 15, 21, 5]  # of documents, which are packed into rows of at most 29 tokens


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY - 3)}
    special = {"<pad>": VOCABULARY - 3, "<eos>": VOCABULARY - 2, "<unk>": VOCABULARY - 1}
    made = Tokenizer(WordLevel({**words, **special}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def arguments(folder: str, *, alone: bool, **options: Any) -> Any:
    from trl import SFTConfig

    from ringspan.integrations.accelerate import ParallelismConfig

    return SFTConfig(
        **{"packing": True, "max_length": max(LENGTHS), **options},
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=STEPS,
        learning_rate=0.01,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        parallelism_config=None if alone else ParallelismConfig(cp_size=2),
    )


def documents() -> Any:
    import torch
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCABULARY - 3, (n,), generator=generator).tolist() for n in LENGTHS]
    return Dataset.from_dict({"input_ids": ids, "completion_mask": [[0] * (n // 3) + [1] * (n - n // 3) for n in LENGTHS]})


def train(rank: int, folder: str, options: dict[str, Any]) -> list[list[dict[str, float]]]:
    """What SFTTrainer logs: TRL's own on one process, ours on this group."""
    import trl

    from ringspan.integrations.trl import SFTTrainer

    logs = []
    for alone in (True, False):
        with launched(alone=alone):
            model = small_model("gemma3").float()
            model.set_attn_implementation("sdpa")
            data = documents()
            config = arguments(f"{folder}/{rank}", alone=alone, **options)
            trainer: Any = (trl.SFTTrainer if alone else SFTTrainer)(
                model, config, train_dataset=data, eval_dataset=data, processing_class=tokenizer()
            )
            assert config.packing == options.get("packing", True)
            assert (len(trainer.train_dataset) < len(data)) == config.packing
            trainer.train()
            logs.append(trainer.state.log_history)
    return logs


OPTIONS: dict[str, dict[str, Any]] = {
    "packed": {"completion_only_loss": False},
    "packed, loss of completions": {"completion_only_loss": True},
    "without padding": {"packing": False, "padding_free": True, "max_length": None},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_losses_of_sft_are_those_of_one_process(kind: str, pools: Pools, tmp_path: Path) -> None:
    for alone, together in pools(2).run(train, str(tmp_path), OPTIONS[kind]):
        for what, count in {"loss": STEPS, "mean_token_accuracy": STEPS, "num_tokens": STEPS, "eval_loss": STEPS // 2}.items():
            wanted, found = ([x[what] for x in log if what in x] for log in (alone, together))
            assert len(wanted) == len(found) == count
            assert found == pytest.approx(wanted, rel=1e-6, abs=0), what
        assert len({x["loss"] for x in alone if "loss" in x}) == STEPS


def refused_by_trl(rank: int, folder: str) -> str:
    import trl

    with launched(alone=False):
        model = small_model("gemma3").float()
        config = arguments(f"{folder}/{rank}", alone=False)
        try:
            trl.SFTTrainer(model, config, train_dataset=documents(), eval_dataset=documents(), processing_class=tokenizer())
        except ValueError as error:
            return str(error)
    return ""


def test_trl_itself_refuses_packing(pools: Pools, tmp_path: Path) -> None:
    """If it no longer does, the class is not needed."""
    for said in pools(2).run(refused_by_trl, str(tmp_path)):
        assert "Packing is not compatible with context parallelism" in said


def test_the_constructor_has_the_order_that_the_class_relies_on() -> None:
    import trl

    source = inspect.getsource(trl.SFTTrainer.__init__)
    steps = [
        "self.padding_free = args.padding_free or (args.packing",
        "train_dataset = self._prepare_dataset(",
        "super().__init__(",
        "and (args.packing or args.eval_packing):",
    ]
    found = [source.find(step) for step in steps]
    assert -1 not in found, f"SFTTrainer.__init__ has no `{steps[found.index(-1)]}` any more: see ringspan/integrations/trl.py"
    assert found == sorted(found), "SFTTrainer.__init__ does these in another order: see ringspan/integrations/trl.py"
    assert "args.packing" not in source[found[-1] + len(steps[-1]) :], "SFTTrainer.__init__ reads args.packing later as well"
