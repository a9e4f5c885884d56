# Every target runs in its own virtual environment, which is created on first use.
#   make test PYTHON=python3.12      another interpreter (the environment is created again)
#   make test VENV=/tmp/ringspan     another place for the environment
#   make test JOBS=8                 more processes for the tests
#   make test PYTEST_ARGS=--pdb      options for each run of pytest

PYTHON ?= python3
VENV   ?= .venv

# Hundreds of processes of the tests import torch, which takes five times as long without compiled modules. They are
# written into the environment, even if PYTHONDONTWRITEBYTECODE is set to keep the source tree clean.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode

BIN      := $(VENV)/bin
CODE     := conftest.py src tests $(wildcard benchmarks docs examples)

# The tests run in this many processes. Those marked "alone" have time limits and run one after the other.
JOBS     ?= 2
PARALLEL := -n $(JOBS) --dist loadfile
PYTEST   := $(BIN)/python -m pytest $(PYTEST_ARGS)

# For `make test-torch`: a version of torch other than the pinned one.
TORCH      ?=
TORCH_VENV := .venv-torch-$(TORCH)

# Three stamps, so that the demo does not install what only the tests need. They lie inside the environment and name the
# interpreter: with another PYTHON there are none, and the environment is created again.
CREATED   := $(VENV)/.created-$(notdir $(PYTHON))
DEMO      := $(VENV)/.demo-$(notdir $(PYTHON))
READY     := $(VENV)/.ready-$(notdir $(PYTHON))
TITAN     := build/titan/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test test-slow test-titan test-torch coverage lint format bench clean

help:  ## this text
	@echo "ringspan: exact attention over one long sequence on many devices"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Each target creates $(VENV) first if needed. PYTHON=python3.12 chooses another interpreter."

demo: $(DEMO)  ## train on a sequence split over 4 processes; pictures in ringspan-demo/
	$(BIN)/ringspan demo

docs: $(READY)  ## build the documentation as a site, in build/site/index.html; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

test: lint  ## lint, types, tests, doctests and the documentation, all but the slow
	$(PYTEST) $(PARALLEL) -m "not alone and not slow"
	$(PYTEST) -m "alone and not slow"

test-slow: $(READY)  ## the tests that take long and rarely fail: random cases, experiments, examples
	$(PYTEST) $(PARALLEL) -m "slow and not alone"
	$(PYTEST) -m "slow and alone"

test-titan: $(TITAN)  ## the tests of torchtitan, which is installed in build/titan without its 40 dependencies
	PYTHONPATH=$(dir $(TITAN)) $(PYTEST) tests/integrations/test_torchtitan.py

test-torch:  ## the tests with another torch: make test-torch TORCH=2.15.0
	@test -n "$(TORCH)" || { echo "say which torch: make test-torch TORCH=2.15.0"; exit 2; }
	test -d $(TORCH_VENV) || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet "torch==$(TORCH)"
	$(TORCH_VENV)/bin/python -m pip install --quiet --editable ".[dev]" "torch==$(TORCH)"
	$(TORCH_VENV)/bin/python -m pytest $(PARALLEL) -m "not alone"
	$(TORCH_VENV)/bin/python -m pytest -m alone

coverage: $(READY)  ## the tests, and how much of the code they run (worker processes included)
	$(PYTEST) $(PARALLEL) -m "not alone" --cov --cov-report=
	$(PYTEST) -m alone --cov --cov-append --cov-report=term:skip-covered --cov-report=html

lint: $(READY)  ## style and types only
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: $(READY)  ## rewrite the code in the project's style
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(READY)  ## measure the kernels on this CPU, and planning
	$(BIN)/ringspan bench cpu
	$(BIN)/ringspan bench plan

setup: $(READY)  ## create the environment only

clean:  ## remove environments, builds and caches
	rm -rf $(VENV) .venv-torch-* build dist htmlcov .coverage* ringspan-demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --no-compile: Python compiles a module when it is first imported, and most modules of torch never are.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable

$(CREATED): constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(READY): $(CREATED) pyproject.toml
	$(INSTALL) ".[dev]"
	@touch $@

$(TITAN): $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(dir $@) torchtitan==0.3.0 spmd_types==0.2.3 \
		torchdata==0.11.0 torch_checkpointing==0.1.1 tyro==1.0.16 typeguard==4.6.0 docstring_parser==0.18.0 einops==0.8.2
	@touch $@

$(DEMO): $(CREATED) pyproject.toml
	$(INSTALL) ".[demo]"
	@touch $@
