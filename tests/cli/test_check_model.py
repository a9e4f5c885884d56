"""``ringspan check --model``: configs that are read, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringspan.cli.check_model import read_config, smaller
from ringspan.cli.main import main

QWEN = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "eos_token_id": 151_645,
    "layer_types": ["full_attention"] * 14 + ["sliding_attention"] * 14,
    "use_sliding_window": True,
    "sliding_window": 4096,
}


def test_a_smaller_model_has_layers_of_each_kind() -> None:
    small = smaller(QWEN)
    assert small["layer_types"] == ["full_attention", "sliding_attention"]
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["sliding_window"]) == (4, 2, 8)
    assert small["eos_token_id"] is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read"),
        ("no JSON", "cannot be read"),
        ("{}", "has no model_type"),
        ('{"model_type": "t5"}', "t5 is no causal language model"),
        ('{"model_type": ["t5"]}', "model_type must be text"),
        ('{"model_type": "llama", "num_attention_heads": "4"}', "num_attention_heads of the model must be a whole number"),
        ('{"model_type": "llama", "hidden_size": [4]}', "transformers refuses this config of llama"),
    ],
)
def test_what_is_no_config_is_refused(
    content: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["check", "--model", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


def test_the_language_model_of_a_composite_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": QWEN, "vision_config": {}}))
    assert read_config(str(tmp_path)) == QWEN


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "mamba", "num_hidden_layers": 2, "state_size": 4}, "mamba cannot run under context parallelism"),
        ({"model_type": "qwen3_next", "head_dim": 8}, "qwen3_next has layers that are not softmax attention under a mask"),
        ({"model_type": "musicgen"}, "this config of musicgen has no vocab_size"),
    ],
)
def test_a_model_that_cannot_be_compared_is_refused_in_one_line(
    config: dict[str, object], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes |= {"moe_intermediate_size": 16, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(config if config["model_type"] == "musicgen" else sizes | config))
    assert main(["check", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_model_of_transformers_is_equal_to_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert main(["check", "--model", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks are equal to one process" in printed
    result = json.loads(printed.splitlines()[-1])
    assert [row["stage"] for row in result["rows"]] == ["without cp", "modules", "loss", "gradients"]
    assert result["rows"][1]["compared"] > 50
