# Everything runs in a virtual environment of its own, which the first target that needs it sets up.
#   make test PYTHON=python3.12      another interpreter (the environment is made anew)
#   make test VENV=/tmp/ringspan     another place for it

PYTHON ?= python3
VENV   ?= .venv

BIN      := $(VENV)/bin
TORCH    := $(shell grep '^torch==' constraints.txt)
CODE     := conftest.py src tests $(wildcard benchmarks docs examples)

# Two stamps, so that a change of pyproject.toml does not install torch again. Both lie inside the environment and name the
# interpreter: another PYTHON finds none of its own and starts from an empty environment.
HAS_TORCH := $(VENV)/.torch-$(notdir $(PYTHON))
READY     := $(VENV)/.ready-$(notdir $(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench clean

help:  ## this text
	@echo "ringspan: one long sequence over many devices, with exact attention"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Each sets up $(VENV) first when it has to. PYTHON=python3.12 chooses another interpreter."

demo: $(READY)  ## see it work: train on a sequence split over 4 processes; pictures in ringspan-demo/
	$(BIN)/ringspan demo

test: lint  ## everything that must hold: lint, types, tests, doctests
	$(BIN)/python -m pytest

lint: $(READY)  ## style and types only
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: $(READY)  ## rewrite the code in our style
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(READY)  ## measure: the kernels on this CPU, and planning
	$(BIN)/ringspan bench cpu
	$(BIN)/ringspan bench plan

setup: $(READY)  ## the environment, and nothing else

clean:  ## remove the environment, builds and caches
	rm -rf $(VENV) build dist ringspan-demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes in first and by its exact version: whatever comes after then finds it there and asks for no other.
$(HAS_TORCH): constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	@touch $@

$(READY): $(HAS_TORCH) pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@
