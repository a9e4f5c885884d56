"""Settings that must be made before ringspan is imported: Triton's interpreter on machines without a GPU, threads."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

torch.set_num_threads(1)  # the tests use small tensors, which are faster with one thread

TRITON_MODULES = ("fused", "fused_logits", "fused_sinks", "fused_sums")
collect_ignore = [] if find_spec("triton") else [f"src/ringspan/kernels/{name}.py" for name in TRITON_MODULES]
if not find_spec("transformers"):
    collect_ignore.append("src/ringspan/integrations")
elif not find_spec("trl"):
    collect_ignore.append("src/ringspan/integrations/trl.py")
