"""Private names of PyTorch and FlashAttention-4 are used in ``ringspan.torch_private`` and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_private.private_names import ROOT, private_names

OTHERS = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT / "torch_private")


@pytest.mark.parametrize("path", OTHERS, ids=[str(path.relative_to(ROOT)) for path in OTHERS])
def test_a_file_uses_no_private_name(path: Path) -> None:
    found = [f"{path}:{line}: {name}" for line, name in private_names(path.read_text(encoding="utf-8"))]
    assert found == [], "give it a public name in ringspan.torch_private"


# source -> the private names in it
FOUND = {
    "import torch._dynamo": ["torch._dynamo"],
    "import torch._dynamo as d": ["torch._dynamo"],
    "from torch.utils._pytree import tree_map": ["torch.utils._pytree.tree_map"],
    "from torch import _C": ["torch._C"],
    "def f():\n    from flash_attn.cute.interface import _flash_attn_fwd": ["flash_attn.cute.interface._flash_attn_fwd"],
    "import torch\ntorch._C._len_torch_function_stack()": ["torch._C._len_torch_function_stack"],
    "import torch as t\nt.autograd._profiler_enabled()": ["torch.autograd._profiler_enabled"],
    "import torch\naten = torch.ops.aten\naten._flash_attention_forward": ["torch.ops.aten._flash_attention_forward"],
    "from torch import overrides\noverrides._pop_mode_temporarily()": ["torch.overrides._pop_mode_temporarily"],
    "import torch.nn.functional as F\nF._in_projection(x)": ["torch.nn.functional._in_projection"],
    "f(x._version, y)": ["_version"],
    "mesh.get_group()._get_backend(device)": ["_get_backend"],
    "getattr(x, '_version')": ["_version"],
    "sys.modules.get('torch._dynamo')": ["torch._dynamo"],
    "{'_native_multi_head_attention': 1}": ["_native_multi_head_attention"],
}


@pytest.mark.parametrize(("source", "names"), FOUND.items(), ids=FOUND)
def test_a_private_name_is_found(source: str, names: list[str]) -> None:
    assert [name for _, name in private_names(source)] == names


ALLOWED = [
    "import torch\ntorch.ops.aten.add",
    "import torch\ntorch.nn.Module.__init__",
    "'''torch._dynamo is not imported here.'''",
    "f('this needs torch._dynamo')",
    "call._replace(x=1)._asdict()",
    "sys._getframe()",
    "from ringspan.kernels import _relative",
    "for _ in range(3): pass",
]


@pytest.mark.parametrize("source", ALLOWED)
def test_other_names_are_not(source: str) -> None:
    assert list(private_names(source)) == []
