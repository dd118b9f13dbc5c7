"""Tests that a user may have written for a GPU, which the plugin runs without one.

python -m pytest -p te_cpu --noconftest tests/te_cpu/user_programs.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.base import FP8GlobalStateManager


@pytest.fixture(autouse=True)
def forget_other_layers() -> Iterator[None]:
    torch.manual_seed(0)
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


def test_a_refused_graph_leaves_torch_compile_as_it_was() -> None:
    layer, x = te.Linear(32, 32), torch.randn(16, 32)
    with pytest.raises(NotImplementedError, match="a CPU has no graphs"):
        te.make_graphed_callables(layer, (x,))
    assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
