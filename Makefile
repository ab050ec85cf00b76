# Every target works on a fresh checkout: the environment is made on first use and remade when pyproject.toml changes.
#   make test VENV=~/envs/rocm       use an environment of yours; a torch that is already in it is left alone
#   make test TORCH="torch==2.13.0 --index-url ..."     choose the torch build to install where there is none

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0 # where torch has not brought one: the version of tests/kernel_golden
PYTEST_ARGS ?= -n 2
THREADS ?= 1 # torch threads of each test worker

BIN := $(VENV)/bin
STAMP := $(VENV)/.hf_specdec-installed
PYTEST := OMP_NUM_THREADS=$(strip $(THREADS)) $(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: help env quickstart test slow grid efficiency lint types clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

env: $(STAMP) ## make the environment: torch if there is none, then this checkout (editable) with all test tools

# torch comes first and by itself: which build is right for a machine is its owner's choice, not the resolver's. So is
# Triton, which GPU builds of torch bring; ROCm's has another name, and one of PyPI would overwrite it.
$(STAMP): pyproject.toml
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -c "import triton" 2>/dev/null || test "$$(uname)" != Linux || \
		$(BIN)/python -m pip install $(TRITON)
	$(BIN)/python -m pip install -e ".[dev]"
	@touch $@

quickstart: $(STAMP) ## speculative decoding on a small real model, against plain decoding
	$(BIN)/python examples/quickstart.py

test: $(STAMP) ## every fast test, those on the small real model included
	$(PYTEST)

slow: $(STAMP) ## the tests that `make test` leaves out
	$(PYTEST) -m slow

grid: $(STAMP) ## the kernels at every size, in Triton's interpreter
	$(PYTEST) -m grid

efficiency: $(STAMP) ## does the loop deliver the speed-up that README promises? wants a quiet machine
	$(BIN)/python benchmarks/efficiency.py --check

lint: $(STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP) ## mypy
	$(BIN)/mypy

clean: ## remove build products and caches, keep the environment
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
