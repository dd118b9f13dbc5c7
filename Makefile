# Every target sets up .venv first, unless it is ready.
#   make pretrain ARGS="trainer.max_steps=100"    arguments for pretrain_gpt.py
#   make test ARGS="-k amax"                      arguments for pytest
#   make PYTHON=python3.12 TORCH_PIN=2.11.0 …     interpreter and version of torch for .venv
#   make setup TORCH_BUILD=cuda                   CUDA build of torch, also where no GPU is (a login node)
VENV ?= .venv
WORKERS ?= 2
ARGS ?=
PY := $(VENV)/bin/python
SETUP := VENV="$(VENV)" PYTHON="$(PYTHON)" TORCH_PIN="$(TORCH_PIN)" TORCH_BUILD="$(TORCH_BUILD)" bash scripts/setup_env.sh

# Images set this variable. Without bytecode each worker of the tests rewrites the assertions of all
# test files again, and each process that a test starts compiles the package.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev pretrain test test-slow test-cpus test-gpu gpu-check test-slurm test-hosts container test-container test-slurm-container nightly lint format check docs docs-site release clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv with the packages that training needs
	@$(SETUP)

setup-dev: ## make .venv, also with the developers' tools
	@$(SETUP) --dev

pretrain: setup ## pretrain a small GPT in FP8 (ARGS="key=value …")
	@$(PY) pretrain_gpt.py $(if $(findstring model.fp8=,$(ARGS)),,model.fp8=True) $(ARGS)

test: setup-dev ## run the fast CPU tests
	@$(PY) -m pytest -m "not gpu and not slow and not slurm and not hosts" -n $(WORKERS) --dist loadfile --no-loadscope-reorder -q $(ARGS)

test-slow: setup-dev ## run the tests that take minutes each
	@$(PY) -m pytest -m "slow and not gpu and not slurm and not hosts" -q $(ARGS)

test-cpus: setup-dev ## run the numeric tests as on each older CPU that this one can imitate
	@$(PY) -m tests.cpu_levels $(ARGS)

test-gpu: setup-dev ## run the tests that need a CUDA device
	@$(PY) -m pytest -m "gpu" -q $(ARGS)

gpu-check: setup-dev ## check a GPU machine in eight minutes; results are in gpu-check/ (ARGS="ranks" for another stage)
	@$(PY) scripts/gpu_check.py --out gpu-check $(ARGS)

test-slurm: setup-dev ## run the tests that start a real Slurm of two nodes (root)
	@$(PY) -m pytest -m "slurm" -q $(ARGS)

test-hosts: setup-dev ## run torchrun on two hosts, imitated by network namespaces (root; iproute2)
	@$(PY) -m pytest -m "hosts" -q $(ARGS)

container: ## build the image for CPUs without Docker (root; buildah)
	@scripts/container/build.sh

test-container: container ## run fast tests, a sweep and the default job in the image, without a network
	@scripts/container/test.sh

test-slurm-container: container ## run a Slurm job in the unpacked image (root; bubblewrap, Slurm)
	@rm -rf build/image && scripts/container/unpack.sh build/image
	@MEGAFP8_IMAGE_FOLDER=$(CURDIR)/build/image $(PY) -m pytest tests/slurm/test_container.py -m slurm -q $(ARGS)

nightly: setup-dev ## run every suite that this machine can run; the table is docs/evidence/nightly.md (ARGS="slow slurm")
	@$(PY) scripts/nightly.py $(ARGS)

lint: setup-dev ## check format, lint rules, spelling and types; change nothing
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m codespell_lib
	@$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(PY) -m check_jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	@$(PY) -m check_jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	@$(PY) -m mypy

format: setup-dev ## format, and fix what ruff can fix
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

check: lint test ## run everything that a change must pass

docs: setup-dev ## write docs/reference/configuration.md from the configuration's schema
	@$(PY) -m scripts.configuration > docs/reference/configuration.md.tmp
	@mv docs/reference/configuration.md.tmp docs/reference/configuration.md

docs-site: setup-dev ## build the site of the documentation in build/site (ARGS=serve shows it at http://127.0.0.1:8000)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs $(or $(ARGS),build) --strict

release: setup-dev ## build and check wheels and source archives in dist/, and train from each (nothing is uploaded)
	@$(PY) -m scripts.release $(ARGS)

clean: ## delete caches and build outputs, but not .venv and runs/
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info */*.egg-info
