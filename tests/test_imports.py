"""What importing ringspan imports: a compiler, or DTensors, only for those who use them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ringspan.torch_private.dynamo import dynamo_constant

# what is done -> what it must not have imported
LIGHT = {
    "import ringspan": ["torch._dynamo", "torch.nn.attention.flex_attention", "torch.distributed.tensor", "triton", "sympy"],
    "import ringspan.cli.main": ["torch._dynamo", "torch.nn.attention.flex_attention"],
    "import ringspan as rs; rs.plan(rs.causal(64), world=4, rank=1).explain()": ["torch._dynamo", "torch.distributed.tensor"],
    "import ringspan as rs; x = torch.ones(1, 1, 8, 4); rs.LocalWorld(2).attention(x, x, x, mask=rs.causal(8))": [
        "torch._dynamo",
        "torch.nn.attention.flex_attention",
        "torch.distributed.tensor",
    ],
}


@pytest.mark.parametrize(("done", "heavy"), LIGHT.items(), ids=LIGHT)
def test_nothing_heavy_is_imported(done: str, heavy: list[str]) -> None:
    # What PyTorch imports by itself, in this version, is not ours to avoid.
    before = "import sys, torch, torch.distributed; own = set(sys.modules)"
    script = f"{before}; {done}; print(set({heavy}) & set(sys.modules) - own)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip().splitlines()[-1] == "set()"


def test_the_word_to_compilers_is_pytorchs() -> None:
    def ours() -> None: ...

    def theirs() -> None: ...

    assert vars(dynamo_constant(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}
