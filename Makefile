# A fresh machine needs Python >= 3.10, a C++ compiler, and `make demo` or `make test`.

PYTHON ?= python3
TORCH  ?= 2.13.0
VENV   ?= .venv
# Interpreters that `make wheel-check` takes.
PYTHONS ?= $(PYTHON)
ARGS   ?=
# Processes that share the test files; each starts up to five ranks when a test asks for them. 0: no sharing.
PYTEST_WORKERS ?= 2
# Which share of the slow tests `make slow` runs.
SHARD ?= 1/1
# The CUDA build that code for a GPU is written with, in an environment of its own; it needs no GPU.
CUDA_TORCH ?= 2.15.0
MATRIX := 2.11.0 2.13.0 2.15.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH_STAMP := $(VENV)/torch-$(TORCH).stamp

.PHONY: help demo test test-matrix pytest road slow mistakes faults fuzz zoo lint types wheel-check format bench docs pictures
.PHONY: gpu gpus cuda-dry optimizers deepspeed clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "variables: PYTHON=$(PYTHON) TORCH=$(TORCH) VENV=$(VENV) PYTEST_WORKERS=$(PYTEST_WORKERS) ARGS= (for pytest, demo, bench) SHARD=$(SHARD)"

demo: $(VENV)/examples.stamp  ## train a small GPT on two local ranks
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: lint pytest  ## lint, type-check and run the tests

test-matrix: $(MATRIX:%=pytest-%)  ## run the tests with every torch version supported

pytest: $(VENV)/dev.stamp  ## run the tests alone
	$(BIN)/python -m pytest -m "not slow" -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

slow: $(VENV)/dev.stamp  ## the tests that take minutes; SHARD=2/25: the second of 25 shares
	$(BIN)/python -m pytest -m slow -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder --shard $(SHARD) $(ARGS)

mistakes: $(VENV)/dev.stamp  ## what people see of the mistakes of their first hour: ARGS="memory stage"
	$(BIN)/python -m tests.mistakes $(ARGS)

faults: $(VENV)/dev.stamp  ## kill a training run a hundred times
	$(BIN)/python -m tests.checkpoint.faults $(ARGS)

road: $(VENV)/dev.stamp  ## tests/road alone: with another torch TORCH=2.11.0 VENV=.venv-2.11.0
	$(BIN)/python -m pytest tests/road -m "not slow" -n $(PYTEST_WORKERS) --dist loadfile $(ARGS)

pytest-%:
	$(MAKE) pytest TORCH=$* VENV=.venv-$*

fuzz: $(VENV)/dev.stamp  ## random models against one process, for ten minutes: ARGS="--minutes 60", ARGS=case.txt
	$(BIN)/python -m tests.fuzz $(ARGS)

zoo: $(VENV)/dev.stamp  ## train every model of tests/zoo, write docs/zoo.md
	$(BIN)/python -m tests.zoo $(ARGS)

optimizers: $(VENV)/dev.stamp  ## every optimizer of pytorch_optimizer, torch.optim and transformers, sharded and in one process
	$(BIN)/python -m pip install -q pytorch_optimizer
	$(BIN)/python -m tests.optimizers.sweep $(ARGS)

deepspeed: $(VENV)/dev.stamp  ## docs/from-deepspeed.md held against DeepSpeed, on two ranks
	$(PIP) install -q einops hjson msgpack ninja psutil py-cpuinfo pydantic
	DS_BUILD_OPS=0 $(PIP) install -q --no-deps --upgrade --target build/deepspeed deepspeed
	$(BIN)/python -m pytest tests/parity/test_deepspeed.py $(ARGS)

lint: $(VENV)/dev.stamp  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

types: $(VENV)/dev.stamp  ## list what type checkers of users do not know
	PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=. $(BIN)/pyright --verifytypes zerofx --ignoreexternal || true

wheel-check: $(VENV)/dev.stamp  ## install wheel and sdist into empty environments: PYTHONS="python3.10 python3.13"
	$(BIN)/python -m tests.installed --pythons "$(PYTHONS)" --torch $(TORCH) $(ARGS)

format: $(VENV)/dev.stamp  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev.stamp  ## time a training step
	$(BIN)/python benchmarks/step.py $(ARGS)

docs: $(VENV)/docs.stamp  ## build the documentation as a site, strictly, into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/docs/index.html; with search: python -m http.server --directory build/docs"

pictures: $(VENV)/dev.stamp $(VENV)/docs.stamp  ## draw the pictures of README and docs anew; one needs Chromium
	$(BIN)/python docs/pictures/layer.py
	$(BIN)/python docs/pictures/stages.py
	$(BIN)/python docs/pictures/results.py
	$(BIN)/python docs/pictures/make.py

gpu:  ## on a machine with a GPU: seven minutes, one report (docs/cuda.md); PYTHON= is one that has torch, if there is one
	@if $(PYTHON) -c 'import torch, triton, pytest; assert torch.cuda.is_available()' 2> /dev/null; \
	then PYTHONPATH=$(CURDIR) $(PYTHON) -m benchmarks.gpu $(ARGS); \
	else $(MAKE) $(VENV)/dev.stamp && $(BIN)/python -m benchmarks.gpu $(ARGS); fi

gpus:  ## the same on all GPUs of the machine, over NCCL
	@$(MAKE) gpu ARGS="--ranks 0 $(ARGS)"

cuda-dry:  ## without a GPU: write, read and compile the CUDA code of models; its tests; writes docs/cuda-dry.md
	$(MAKE) cuda-dry-in TORCH=$(CUDA_TORCH) VENV=.venv-cuda

cuda-dry-in: $(VENV)/dev.stamp
	$(BIN)/python -m pytest tests/cuda_dry
	$(BIN)/python -m tests.cuda_dry $(ARGS)

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

# dev.stamp, docs.stamp and examples.stamp: zerofx, editable, with the extra of that name.
$(VENV)/%.stamp: pyproject.toml $(TORCH_STAMP)
	$(PIP) install torch==$(TORCH) -e '.[$*]'
	touch $@
