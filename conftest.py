"""Set before anything of ringspan is imported: how Triton kernels run here, and what cannot be imported without it."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

torch.set_num_threads(1)  # tests are many and small: threads would only get in each other's way

collect_ignore = [] if find_spec("triton") else ["src/ringspan/kernels/fused.py"]
