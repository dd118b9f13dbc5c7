"""Closer looks at a rank's work: bytes of each phase, order of products, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megafp8.fp8 import linear
from megafp8.fp8.scaling import ScalingState
from megafp8.parallel.mesh import Mesh, join
from megafp8.train import state_dict
from megafp8.train.load import newest_after_cleanup
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, local_batch, train_step
from tests.kit.cases import Case
from tests.kit.runs import Traffic
from tests.kit.tensors import Piece, pieces
from tests.ranks import Rank


def phases(case: Case, mesh: Mesh) -> dict[str, Traffic]:
    """Bytes of one microbatch's forward and backward pass, without what is sent once a step."""
    state, num_bytes = case.build(mesh), mesh.traffic.num_bytes

    def since(before: Traffic) -> Traffic:
        return {
            key: n - before.get(key, 0) for key, n in num_bytes.items() if n > before.get(key, 0)
        }

    (batch,) = case.microbatches(0, mesh)
    own = local_batch(batch, mesh)
    state.sink.begin_step()
    state.streams.begin_microbatch(1, 0)
    state.scaling.begin_microbatch(0)
    start = dict(num_bytes)
    loss = state.model(own.tokens_BS, own.targets_BS)
    state.scaling.end_forward()
    forward, middle = since(start), dict(num_bytes)
    loss.backward()
    state.scaling.end_backward()
    return {"forward": forward, "backward": since(middle)}


@dataclass
class Recorded:
    """What the linears of one rank did in a step, in order."""

    products: list[tuple[str, str]]  # (output, grad_input or grad_weight; the linear)
    casts: dict[str, int]  # by tensor
    updates: dict[str, int]  # of the tables, by direction
    reductions: int  # MAX all-reduces of amaxes
    num_stages: int


def record(case: Case, mesh: Mesh) -> Recorded:
    """One step."""
    state = case.build(mesh)
    assert isinstance(state.scaling, ScalingState)
    found = Recorded([], {}, {}, 0, len(getattr(state.model, "indices", [0])))

    def seen(name: str, *_: object) -> None:
        found.casts[name] = found.casts.get(name, 0) + 1

    state.scaling.observers.append(seen)
    for direction, table in state.scaling.tables.items():
        _count_updates(direction, table, found)
    with _recorded_products(found):
        forward_backward(state, case.microbatches(0, mesh))
    return found


@contextmanager
def _recorded_products(found: Recorded) -> Iterator[None]:
    product = linear.product

    def noted(layer: Any, place: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        found.products.append((place, layer.name))
        return product(layer, place, *args, **kwargs)

    with patch.object(linear, "product", noted):
        yield


def _count_updates(direction: str, table: Any, found: Recorded) -> None:
    update = table.update

    def counted(*args: Any) -> None:
        found.updates[direction] = found.updates.get(direction, 0) + 1
        update(*args)

    table.update = counted


@dataclass
class Resumed:
    losses: list[float]
    weights: list[Piece]
    tables: dict[str, dict[str, dict[str, torch.Tensor]]]  # by direction, field, tensor


def train_save(case: Case, mesh: Mesh, folder: Path, steps: int) -> None:
    state = case.build(mesh)
    _train(state, case, range(steps))
    Saver(folder, 1, {"config": {}, "data_fingerprint": ""}).save(state)


def load_train(case: Case, mesh: Mesh, folder: Path, steps: int) -> Resumed:
    state = case.build(mesh)
    newest = newest_after_cleanup(folder, mesh, print)
    assert newest is not None
    state_dict.load_checkpoint(newest, state, print)
    losses = _train(state, case, range(state.step, state.step + steps))
    weights = pieces(state, [param.detach() for param in state.masters.params])
    tables = {
        direction: {
            field: dict(zip(table.names, tensor, strict=True))
            for field, tensor in table.tensors().items()
        }
        for direction, table in state.scaling.tables.items()
    }
    return Resumed(losses, weights, tables)


def _train(state: TrainState, case: Case, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(train_step(state, case.microbatches(step, state.mesh)).loss)
        state.step += 1
    return losses


def saved_and_resumed(
    rank: Rank,
    saved: dict[str, Case],
    resumed: dict[str, tuple[str, Case]],
    folder: str,
    steps: int,
) -> dict[str, Resumed]:
    """Each of `saved` leaves a checkpoint; each of `resumed` goes on from the one it names."""
    meshes: dict[tuple[int, int], Mesh] = {}

    def on(case: Case) -> Mesh:
        key = (case.parallel.tp, case.parallel.pp)
        if key not in meshes:
            meshes[key] = join(replace(case.parallel, devices_per_node=rank.size))
        return meshes[key]

    for name, case in saved.items():
        train_save(case, on(case), Path(folder, name), steps)
    return {
        name: load_train(case, on(case), Path(folder, source), steps)
        for name, (source, case) in resumed.items()
    }
