"""Test loading between BF16 and FP8, and where shards had different scales.

Master weights stay the same bits, and weights are quantized again as the specification says.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megafp8.checkpoint import store
from megafp8.checkpoint.reader import Reader
from megafp8.fp8.scaling import ScalingState
from megafp8.parallel.mesh import single_rank
from megafp8.parallel.parts import linears_of
from megafp8.train import state_dict
from megafp8.train.state import TrainState
from tests.checkpoint import layouts
from tests.checkpoint.layouts import STEPS_AFTER
from tests.spec.formats import FORMATS, quantize


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def continued(precision: str, path: Path) -> tuple[TrainState, list[str]]:
    state, messages = layouts.case_of(precision).build(single_rank()), list[str]()
    state_dict.load_checkpoint(path, state, messages.append)
    return state, messages


def assert_same_state(state: TrainState, reader: Reader) -> None:
    """Assert that master weights and moments are those of the checkpoint."""
    mine = {p.name: p.tensor for p in state_dict.placements(state)}
    names = [name for name in reader.names() if name.startswith(("model/", "optimizer/"))]
    assert names and all(torch.equal(mine[name], reader.read(name)) for name in names)


def assert_payloads_follow_specification(state: TrainState) -> set[float]:
    """Assert that each FP8 weight is its master, quantized with its scale; return the scales."""
    assert isinstance(state.scaling, ScalingState)
    table, scales = state.scaling.forward, set()
    masters = dict(zip(state.masters.params, state.masters.masters, strict=True))
    linears = list(linears_of(state.model))
    assert len(linears) == 16
    for linear in linears:
        scale = np.float32(table.quant_scale[table.names.index(f"{linear.name}.weight")].item())
        weight = masters[linear.weight].detach().bfloat16().float()  # the compute dtype's first
        expected = quantize(weight.numpy(), scale, FORMATS["e4m3"])
        payload = linear.weight.detach().view(torch.uint8).numpy()
        assert np.array_equal(payload, expected), linear.name
        scales.add(float(scale))
    return scales


def assert_staged_amaxes_are_the_weights(state: TrainState) -> None:
    """Those that wait for the first update are of the weights that were loaded, not of others."""
    assert isinstance(state.scaling, ScalingState)
    table = state.scaling.forward
    masters = dict(zip(state.masters.params, state.masters.masters, strict=True))
    for linear in linears_of(state.model):
        staged = table.amax[table.names.index(f"{linear.name}.weight")]
        assert staged == masters[linear.weight].detach().bfloat16().abs().max(), linear.name


def test_from_bf16_to_fp8(tmp_path: Path) -> None:
    layouts.begin("BF16", tmp_path)
    path = tmp_path / "step_00000006"
    state, messages = continued("FP8", path)
    assert messages == [
        "the checkpoint was made without FP8: scales and amax histories have initial values"
    ]
    assert_same_state(state, Reader(path))
    assert assert_payloads_follow_specification(state) == {1.0}
    assert_staged_amaxes_are_the_weights(state)
    losses = layouts.train(state, layouts.case_of("FP8"), STEPS_AFTER)
    assert all(np.isfinite(losses)) and len(assert_payloads_follow_specification(state)) > 1


def test_from_fp8_to_bf16(tmp_path: Path) -> None:
    layouts.begin("FP8", tmp_path)
    path = tmp_path / "step_00000006"
    state, messages = continued("BF16", path)
    assert messages == []
    assert_same_state(state, Reader(path))
    for param, master in zip(state.masters.params, state.masters.masters, strict=True):
        assert param.dtype == torch.bfloat16 and torch.equal(param, master.bfloat16())
    assert all(np.isfinite(layouts.train(state, layouts.case_of("BF16"), STEPS_AFTER)))


def test_scales_that_differed_between_shards(tmp_path: Path) -> None:
    """The larger amax and the smaller scale are used for every shard of a weight."""
    state = layouts.begin("FP8", tmp_path / "start")
    first = Reader(tmp_path / "start" / "step_00000006")
    placements, smaller = [], {}
    for name in first.names():
        tensor = first.read(name)
        if not name.startswith("scaling/"):
            placements.append(
                store.Placement(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
            )
            continue
        rows = torch.stack([tensor, tensor])
        if "/quant_scale/" in name:
            rows[len(smaller) % 2] *= 0.75
            smaller[name] = tensor * 0.75
        placements.append(
            store.Placement(f"{name}/shards", tuple(rows.shape), (0,) * rows.dim(), rows)
        )
    staging = store.begin(tmp_path, 6)
    shard = store.write_shard(staging, "rank0.safetensors", placements)
    path = store.commit(staging, tmp_path, 6, [shard], first.meta)
    merged, messages = continued("FP8", path)
    assert len(messages) == 1 and "differed between the ranks that saved them" in messages[0]
    assert_same_state(merged, first)
    now = {p.name: p.tensor for p in state_dict.placements(merged)}
    assert smaller and all(torch.equal(now[name], smaller[name]) for name in smaller)
    before = assert_payloads_follow_specification(state)
    after = assert_payloads_follow_specification(merged)
    assert before and after == {float(np.float32(scale) * np.float32(0.75)) for scale in before}


def test_factors_are_read_once_however_many_pieces_a_tensor_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor in FP8 of three ranks' rows, with a factor for each; its values are right."""
    payload = torch.arange(-12.0, 12.0).view(6, 4)
    factors = torch.tensor([[1.0], [0.5], [4.0]])
    rows = [
        store.Placement("x", (6, 4), (at, 0), payload[at : at + 2].to(torch.float8_e4m3fn))
        for at in (0, 2, 4)
    ]
    staging = store.begin(tmp_path, 1)
    scale = store.Placement("scales/x", (3, 1), (0, 0), factors)
    shard = store.write_shard(staging, "rank0.safetensors", [*rows, scale])
    reader = Reader(store.commit(staging, tmp_path, 1, [shard], {}))
    read, seen = reader.read, []

    def noted(name: str) -> torch.Tensor:
        seen.append(name)
        return read(name)

    monkeypatch.setattr(reader, "read", noted)
    values = reader.read_values("x")
    assert torch.equal(values, payload * factors.repeat_interleave(2, 0))
    assert seen == ["scales/x"]
