"""What all tests share: how hypothesis draws, and what happens to GPU tests on a machine without one."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# The same cases every time in CI, so that a red run can be repeated; at the desk others every time, so that new ones are met.
settings.register_profile("desk", deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("desk"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
