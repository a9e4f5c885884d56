"""Fine-tune by TRL's ``SFTTrainer`` on packed documents, with every sequence split over the processes.

    torchrun --nproc-per-node 2 examples/sft_trl.py                        # on CPUs
    python examples/sft_trl.py                                             # one process: the same losses
    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 examples/sft_trl.py    # on GPUs

It needs ``pip install 'ringspan[trl]'``. The model is a tiny Gemma 3 with random weights, and the documents are random
tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast
from trl import SFTConfig

from ringspan.integrations.accelerate import ParallelismConfig
from ringspan.integrations.trl import SFTTrainer

VOCABULARY = 256
LENGTHS = [120, 301, 90, 200, 66, 245, 511, 31, 402, 77, 163, 12]  # of the documents, which are packed into rows of 511 tokens


def make_model() -> Gemma3ForCausalLM:
    torch.manual_seed(0)  # the same weights in every process
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        attn_implementation="sdpa",  # Trainer wants this name; each step attends by ringspan
    )
    return Gemma3ForCausalLM(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"word{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_documents() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    return Dataset.from_dict({"input_ids": [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            packing=True,  # TRL's own trainer refuses this together with cp_size > 1
            max_length=max(LENGTHS),
            parallelism_config=ParallelismConfig(cp_size=processes) if processes > 1 else None,
            use_cpu=torch.cuda.device_count() < processes,
            bf16=False,
            per_device_train_batch_size=1,
            max_steps=options.steps,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = SFTTrainer(make_model(), config, train_dataset=make_documents(), processing_class=make_tokenizer())
        trainer.train()
    if trainer.accelerator.is_main_process:
        for step, log in enumerate(x for x in trainer.state.log_history if "loss" in x):
            print(f"step {step}: loss {log['loss']:.6f}")


if __name__ == "__main__":
    main()
