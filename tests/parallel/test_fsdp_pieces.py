"""What FSDP is asked for, in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megafp8.parallel import fsdp
from megafp8.specs import ParallelSpec
from megafp8.specs.parallel import FsdpSpec


@pytest.mark.parametrize(("strategy", "frees"), [("full", True), ("hybrid", True), ("grad", False)])
def test_layers_keep_their_weights_for_the_backward_pass_only_if_asked(
    strategy: Any, frees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strategy `grad` shards gradients and states, and gathers each weight once a pass."""
    asked: list[tuple[object, object]] = []
    monkeypatch.setattr(
        fsdp,
        "fully_shard",
        lambda module, **how: asked.append((module, how.get("reshard_after_forward"))),
    )
    monkeypatch.setattr(fsdp, "register_fsdp_forward_method", lambda model, name: None)
    monkeypatch.setattr(fsdp, "_device_mesh", lambda mesh, spec: (None, None))
    monkeypatch.setattr(fsdp, "pieces_of", lambda param: ())
    model: Any = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    mesh: Any = SimpleNamespace(data=SimpleNamespace(size=2), device=torch.device("cpu"))
    fsdp.shard_model(model, mesh, ParallelSpec(fsdp=FsdpSpec(strategy=strategy)), "bf16")
    assert asked == [(model.layers[0], frees), (model.layers[1], frees), (model, None)]
