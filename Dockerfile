# syntax=docker/dockerfile:1
# This image has megafp8 on NVIDIA's PyTorch image, whose torch and Transformer Engine are kept. It can
# also be built on any image with Python 3.11 or newer and pip, which then gets a CPU build of torch:
#   docker build -t megafp8 .
#   docker build -t megafp8:cpu --build-arg BASE_IMAGE=python:3.12-slim .
#   mkdir -p runs; docker run --gpus all --ipc host --user "$(id -u):$(id -g)" -e HOME=/tmp \
#       -v "$PWD/runs:/workspace/megafp8/runs" megafp8 model.fp8=True
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE_IMAGE}

ARG TORCH_PIN=2.13.0
# The extras of pyproject.toml that are installed: tokenizers and data sources, Weights & Biases, launchers
# of sweeps, torchao. "dev" has the tools that the tests need. On a base with CUDA and without
# Transformer Engine, the word "te" builds it, which takes long.
ARG EXTRAS="data wandb sweep torchao"
# The image's own Python is used, even if a distribution marks it as externally managed (PEP 668).
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1

WORKDIR /workspace/megafp8

# Dependencies are installed first, from the files that determine them, so that a change of code or
# text keeps this layer. (A distribution's metadata needs a README and a licence; the real files follow.)
COPY VERSION setup.py pyproject.toml ./
COPY scripts/setup_env.sh scripts/
COPY megafp8/__init__.py megafp8/
COPY fp8_numerics/pyproject.toml fp8_numerics/
COPY te_cpu/pyproject.toml te_cpu/
COPY fp8_coverage/pyproject.toml fp8_coverage/
COPY megafp8_migrate/pyproject.toml megafp8_migrate/
RUN touch README.md LICENSE && ln -s ../VERSION megafp8/VERSION \
    && for file in */pyproject.toml; do \
        cd "${file%/*}" && touch README.md __init__.py && ln -s ../LICENSE ../VERSION ../setup.py . && cd .. || exit; \
    done \
    && TORCH_PIN="${TORCH_PIN}" PYTHON=python3 bash scripts/setup_env.sh --in-place --extras "${EXTRAS}"

COPY . .

# Base images leave the id 10001 free. This user owns the directories that a run writes to, not the code.
RUN useradd --create-home --uid 10001 --shell /bin/bash megafp8 \
    && install --directory --owner=megafp8 --group=megafp8 runs outputs multirun
USER 10001

ENTRYPOINT ["/workspace/megafp8/scripts/container/entrypoint.sh"]
