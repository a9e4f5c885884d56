"""Whether a profiler records this thread."""

from __future__ import annotations

import torch

profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
