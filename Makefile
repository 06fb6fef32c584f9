# make demo   install, then the three stages on the bundled task        make test   install, then the tests
PYTHON ?= python3
BIN := .venv/bin
# Two workers with one thread each: spinning OpenMP threads of several processes starve each other.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install dev vllm demo test test-slow test-vllm test-gpu lint format types layers ci bench lock clean

help:  ## This list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install:  ## .venv with what a run needs.
	@$(PYTHON) scripts/install.py

dev:  ## .venv with what the tests and checks need too.
	@$(PYTHON) scripts/install.py --dev

vllm:  ## dev, and vLLM for the vllm rollouts (its CPU build without a GPU).
	@$(PYTHON) scripts/install.py --dev --vllm

demo: install  ## The three stages on the bundled task; ends in a report.
	$(BIN)/tutelage demo

test: dev  ## The tests, without the slow ones and those that need shared data.
	$(PYTEST) -m "not slow and not shared and not vllm and not gpu"

test-slow: dev  ## The slow tests and those on real data and models (skipped where these are absent).
	$(PYTEST) -rs -m "(slow or shared) and not vllm" || [ $$? -eq 5 ]  # 5: nothing carries these markers

test-vllm: vllm  ## The tests of the vllm rollouts, one engine at a time.
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -rs -m vllm

test-gpu: dev  ## What needs an accelerator; skipped without one.
	$(BIN)/python -m pytest -rs tests/gpu

lint: dev  ## ruff: rules and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: dev  ## Apply both.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: dev  ## mypy.
	$(BIN)/mypy

layers: dev  ## Which layer may import which.
	$(BIN)/lint-imports

ci: test lint types layers test-slow test-vllm  ## Everything.

bench: dev  ## Tokens/s, memory and share of the measured matrix-multiply rate of each stage.
	$(BIN)/python benchmarks/stages.py

lock:  ## Write the versions in .venv to requirements.lock.
	@$(PYTHON) scripts/install.py --lock

clean:  ## Remove .venv and every cache; runs stay.
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache src/*.egg-info
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
