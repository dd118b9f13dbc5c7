"""Triton's kernels: on a GPU where there is one, else in Triton's interpreter on the CPU.

Triton reads the choice when a kernel is defined, so it is made here, before any is imported.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    from megafp8.precision.kernels.triton_launch import unavailable

    device = torch.device(request.param)
    if (reason := unavailable(device)) is not None:
        pytest.skip(reason)
    return device
