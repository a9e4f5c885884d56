"""The examples of the README run unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ringspan as rs
from tests.torchrun import torchrun

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
LOCAL = [block for block in BLOCKS if "init_process_group" not in block]
DISTRIBUTED = [block for block in BLOCKS if "init_process_group" in block]


def test_all_examples_were_found() -> None:
    assert len(LOCAL) == 2
    assert len(DISTRIBUTED) == 1


def test_the_readme_is_short_and_its_links_exist() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 122
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_all_names_exist() -> None:
    text = README.read_text(encoding="utf-8")
    found = re.findall(r"\b(rs|cp)\.(\w+)", text)
    assert len(found) > 10
    for of, name in found:
        assert hasattr(rs if of == "rs" else rs.ContextParallel, name), f"{of}.{name}"


@pytest.mark.parametrize("block", LOCAL, ids=["LocalWorld", "plan"])
def test_examples_for_one_process(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(block, str(README), "exec"), names)
    if "out" in names:
        out, q = names["out"], names["q"]
        assert isinstance(out, torch.Tensor)
        assert isinstance(q, torch.Tensor)
        assert out.shape == q.shape
    else:
        assert "forward" in capsys.readouterr().out


@pytest.mark.usefixtures("world_of_one")
def test_the_code_about_batches_runs() -> None:
    section = README.read_text(encoding="utf-8").partition("\n## Batches\n")[2].partition("\n## ")[0]
    lines = [re.findall(r"`(.+?)`", line) for line in section.splitlines() if line.startswith("|")]
    parts = [rs.ContextParallel(None, rs.documents(lengths)) for lengths in ([30, 5], [9, 44])]
    names: dict[str, object] = {"rs": rs, "torch": torch, "world": 1, "lengths": [70, 20, 9], "a": parts[0], "b": parts[1]}
    names["rows"] = [[7, 8, 1, 2], [7, 8, 5]]
    names["cp"], names["x"] = rs.ContextParallel(None, rs.documents([70, 20, 9])), torch.randn(1, 99, 4)
    code = [snippet for snippets in lines for snippet in snippets]
    assert len([snippets for snippets in lines if snippets]) == 5
    for snippet in code:
        exec(compile(f"{snippet} pass" if snippet.endswith(":") else snippet, str(README), "exec"), names)
    assert repr(names["trie"]) == "<Trie: 2 rows of 7 tokens as 3 nodes of 5 tokens>"
    assert repr(names["part"]).startswith("Microbatch(documents=(0, 1, 2)")


@pytest.mark.parametrize("processes", [1, 3])
def test_the_training_script_gives_the_same_losses_on_any_number_of_processes(tmp_path: Path, processes: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(DISTRIBUTED[0], encoding="utf-8")
    printed = torchrun(script, processes)
    losses = [float(line.rsplit(" ", 1)[1]) for line in printed.splitlines() if line.startswith("step")]
    assert losses == pytest.approx(without_ringspan(), abs=2e-4)


def without_ringspan() -> list[float]:
    """The losses of the same training in this process, in plain PyTorch with a dense mask."""
    torch.manual_seed(0)
    lengths = torch.tensor([300, 50, 181])
    tokens = torch.randint(256, (1, 531))
    embed, project, head = torch.nn.Embedding(256, 64), torch.nn.Linear(64, 192), torch.nn.Linear(64, 256)
    optimizer = torch.optim.AdamW([p for module in (embed, project, head) for p in module.parameters()], lr=1e-3)
    document = torch.repeat_interleave(torch.arange(3), lengths)
    visible = (document[:, None] == document[None, :]) & torch.ones(531, 531).tril().bool()
    is_last = torch.zeros(531, dtype=torch.bool)
    is_last[lengths.cumsum(0) - 1] = True
    losses = []
    for _ in range(3):
        x = embed(tokens)
        q, k, v = project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2)
        each = F.cross_entropy(head(x).mT, tokens.roll(-1, dims=1), reduction="none")
        loss = each[:, is_last.logical_not()].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
