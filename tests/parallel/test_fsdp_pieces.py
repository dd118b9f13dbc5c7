"""What FSDP is asked for, in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

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
        torch.distributed.fsdp,
        "fully_shard",
        lambda module, **how: asked.append((module, how.get("reshard_after_forward"))),
    )
    monkeypatch.setattr(
        torch.distributed.fsdp, "register_fsdp_forward_method", lambda model, name: None
    )
    monkeypatch.setattr(fsdp, "_device_mesh", lambda mesh, spec: (None, None))
    monkeypatch.setattr(fsdp, "pieces_of", lambda param: (SimpleNamespace(group="dense"),))
    model: Any = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    mesh: Any = SimpleNamespace(data=SimpleNamespace(size=2), groups={}, device=torch.device("cpu"))
    fsdp.shard_model(model, mesh, ParallelSpec(fsdp=FsdpSpec(strategy=strategy)), "bf16")
    assert asked == [(model.layers[0], frees), (model.layers[1], frees), (model, None)]


class Stage(nn.Module):
    """Stands for a stage of a pipeline, and notes when a layer's backward pass ends."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 24), nn.Linear(24, 8)])
        self._events = events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for index, layer in enumerate(self.layers):
            x = x.clone()  # so that the hook comes before those of the layer before
            x.register_hook(lambda grad, i=index: self._events.append(f"end of {i}"))
            x = layer(x)
        return x


class Gathers(TorchDispatchMode):
    """Notes which layer's weights are gathered, by their number of elements."""

    def __init__(self, events: list[str], sizes: dict[int, str]) -> None:
        super().__init__()
        self._events, self._sizes = events, sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func.overloadpacket.__name__:
            self._events.append(self._sizes[args[0].numel()])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_asked", [True, False], ids=["ours", "FSDP's own"])
def test_each_backward_pass_of_several_in_flight_gathers_ahead(is_asked: bool) -> None:
    """FSDP's own order does so in the first of them alone."""
    events: list[str] = []
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        stage: Any = Stage(events)
        whole = {sum(p.numel() for p in x.parameters()): i for i, x in enumerate(stage.layers)}
        sizes = {8: "gather of the stage", **{n: f"gather of {i}" for n, i in whole.items()}}
        mesh = init_device_mesh("cpu", (2,))
        for layer in (*stage.layers, stage):
            fully_shard(layer, mesh=mesh)
        if is_asked:
            fsdp._gather_ahead(stage)
        ahead = []
        with Gathers(events, sizes):
            for out in [stage(torch.ones(2, 8)).sum() for _ in range(2)]:
                events.clear()
                out.backward()
                pairs = [(f"gather of {i - 1}", f"end of {i}") for i in (1, 2)]
                ahead.append(all(events.index(a) < events.index(b) for a, b in pairs))
    finally:
        dist.destroy_process_group()
    assert ahead == [True, is_asked], events
