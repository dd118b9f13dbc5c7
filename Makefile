# Every target sets up .venv first, and does nothing for it when it is ready.
#   make pretrain ARGS="trainer.max_steps=100"    arguments for pretrain_gpt.py
#   make test ARGS="-k amax"                      arguments for pytest
#   make PYTHON=python3.12 TORCH_PIN=2.11.0 …     which interpreter and CPU build of torch .venv gets
VENV ?= .venv
WORKERS ?= 2
ARGS ?=
PY := $(VENV)/bin/python
SETUP := VENV="$(VENV)" PYTHON="$(PYTHON)" TORCH_PIN="$(TORCH_PIN)" bash scripts/setup_env.sh

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev pretrain test test-slow test-cpus test-gpu gpu-check test-slurm test-hosts container test-container lint format check docs clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: ## .venv with what training needs
	@$(SETUP)

setup-dev: ## .venv with the developers' tools too
	@$(SETUP) --dev

pretrain: setup ## pretrain a small GPT in FP8 (ARGS="key=value …")
	@$(PY) pretrain_gpt.py model.fp8=True $(ARGS)

test: setup-dev ## the tests that need no GPU and no patience
	@$(PY) -m pytest -m "not gpu and not slow and not slurm and not hosts" -n $(WORKERS) --dist loadfile --no-loadscope-reorder -q $(ARGS)

test-slow: setup-dev ## the tests that take minutes each
	@$(PY) -m pytest -m "slow and not gpu and not slurm and not hosts" -q $(ARGS)

test-cpus: setup-dev ## the numeric tests on each lesser CPU that this one can imitate
	@$(PY) -m tests.cpu_levels $(ARGS)

test-gpu: setup-dev ## the tests that need a CUDA device
	@$(PY) -m pytest -m "gpu" -q $(ARGS)

gpu-check: setup-dev ## ask this GPU machine everything; results in gpu-check/ (ARGS="runs" for one stage)
	@$(PY) scripts/gpu_check.py --out gpu-check $(ARGS)

test-slurm: setup-dev ## the tests on a real Slurm of two nodes, which they start (root)
	@$(PY) -m pytest -m "slurm" -q $(ARGS)

test-hosts: setup-dev ## torchrun over two network namespaces as hosts (root; iproute2)
	@$(PY) -m pytest -m "hosts" -q $(ARGS)

container: ## the image for CPUs, built without Docker (root; buildah)
	@scripts/container/build.sh

test-container: container ## quick tests and the default job inside it, with the network off
	@scripts/container/test.sh

lint: setup-dev ## format, lint, spelling and types, changing nothing
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m codespell_lib
	@$(PY) -m mypy

format: setup-dev ## format and mend what ruff can
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

check: lint test ## everything that a change must pass

docs: setup-dev ## docs/configuration.md from the configuration's own schema
	@$(PY) -m megafp8.cli.help > docs/configuration.md.tmp
	@mv docs/configuration.md.tmp docs/configuration.md

clean: ## caches and build outputs, not .venv and not runs/
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
