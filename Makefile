# A fresh machine needs Python >= 3.10, a C++ compiler, and `make demo` or `make test`.

PYTHON ?= python3
TORCH  ?= 2.13.0
VENV   ?= .venv
ARGS   ?=
# Processes that share the test files; each starts up to five ranks when a test asks for them. 0: no sharing.
PYTEST_WORKERS ?= 2
MATRIX := 2.11.0 2.13.0 2.15.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH_STAMP := $(VENV)/torch-$(TORCH).stamp

.PHONY: help demo test test-matrix pytest slow faults fuzz zoo lint format bench pictures gpu gpus clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "variables: PYTHON=$(PYTHON) TORCH=$(TORCH) VENV=$(VENV) PYTEST_WORKERS=$(PYTEST_WORKERS) ARGS= (for pytest, demo, bench)"

demo: $(VENV)/examples.stamp  ## train a small GPT on two local ranks
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: lint pytest  ## lint, type-check and run the tests

test-matrix: $(MATRIX:%=pytest-%)  ## run the tests with every torch version supported

pytest: $(VENV)/dev.stamp  ## run the tests alone
	$(BIN)/python -m pytest -m "not slow" -n $(PYTEST_WORKERS) --dist loadfile $(ARGS)

slow: $(VENV)/dev.stamp  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

faults: $(VENV)/dev.stamp  ## kill a training run a hundred times
	$(BIN)/python -m tests.checkpoint.faults $(ARGS)

pytest-%:
	$(MAKE) pytest TORCH=$* VENV=.venv-$*

fuzz: $(VENV)/dev.stamp  ## random models against one process, for ten minutes: ARGS="--minutes 60", ARGS=case.txt
	$(BIN)/python -m tests.fuzz $(ARGS)

zoo: $(VENV)/dev.stamp  ## train every model of tests/zoo, write docs/zoo.md
	$(BIN)/python -m tests.zoo $(ARGS)

lint: $(VENV)/dev.stamp  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev.stamp  ## time a training step
	$(BIN)/python benchmarks/step.py $(ARGS)

pictures: $(VENV)/dev.stamp  ## draw the README's picture, with Chromium
	$(BIN)/python docs/pictures/make.py

gpu: $(VENV)/dev.stamp  ## on a machine with a GPU: ten minutes, one report (docs/cuda.md)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

gpus: $(VENV)/dev.stamp  ## the same on all GPUs of the machine, over NCCL
	$(BIN)/python -m benchmarks.gpu --ranks 0 $(ARGS)

clean:  ## remove build products and caches; environments stay
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find zerofx passes kernels tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# torch comes first and by exact version, so that nothing after it resolves to another build. For one without CUDA:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test
$(TORCH_STAMP):
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/*.stamp
	$(PIP) install torch==$(TORCH)
	touch $@

# dev.stamp and examples.stamp: zerofx, editable, with the extra of that name.
$(VENV)/%.stamp: pyproject.toml $(TORCH_STAMP)
	$(PIP) install torch==$(TORCH) -e '.[$*]'
	touch $@
