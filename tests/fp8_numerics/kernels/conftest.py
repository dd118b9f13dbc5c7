"""Triton's kernels: on a GPU where there is one, else in Triton's interpreter on the CPU (chosen in
tests/conftest.py)."""

from __future__ import annotations

import importlib.util

import pytest
import torch

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    from fp8_numerics.kernels.triton_launch import unavailable

    device = torch.device(request.param)
    if (reason := unavailable(device)) is not None:
        pytest.skip(reason)
    return device
