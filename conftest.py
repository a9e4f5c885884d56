"""Settings that must be made before ringspan is imported: Triton's interpreter on machines without a GPU, threads.

Also the option ``--begin-until``, for continuous integration with a time limit: a run that is killed reports nothing.
"""

from __future__ import annotations

import os
import time
from importlib.util import find_spec

import pytest
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--begin-until", type=float, metavar="SECONDS", help="skip tests that would begin later, in Unix time")


def no_time_left(config: pytest.Config) -> bool:
    until = config.getoption("begin_until")
    return until is not None and time.time() > until


def pytest_sessionstart(session: pytest.Session) -> None:
    if no_time_left(session.config):
        tests = " ".join(session.config.invocation_params.args)
        # collecting the tests takes time, too
        pytest.exit(f"no time left (--begin-until): NOT ONE test was begun of pytest {tests}", returncode=0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if no_time_left(item.config):
        pytest.skip("no time left (--begin-until)")
