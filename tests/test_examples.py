"""The programs of examples/ run as they stand, and what they print is near nothing."""

from __future__ import annotations

import re
from pathlib import Path

from tests.torchrun import torchrun

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_ring_sdpa() -> None:
    printed = torchrun(EXAMPLES / "ring_sdpa.py", 2)
    apart = [float(x) for x in re.findall(r"\d\.\de[-+]\d\d", printed)]
    assert len(apart) == 8 * 4 + 1
    assert max(apart) < 2e-5  # float32, summed over a thousand tokens
