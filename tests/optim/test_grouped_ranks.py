"""Moments by groups of 128 on several ranks, in checkpoints, and in runs that scale otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megafp8.checkpoint.reader import SCALES, Reader
from megafp8.fp8.grouped import GroupedTensor, values_of
from megafp8.fp8.scaled import ScaledTensor
from megafp8.models.init import pieces_of
from megafp8.optim.stored import StoredAdamW
from megafp8.parallel.mesh import single_rank
from megafp8.specs import ParallelSpec
from megafp8.specs.geometry import Box
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.state_dict import load
from tests.optim.stored_work import after_steps
from tests.optim.test_stored_ranks import SMALL, case, path_of, same_bits
from tests.ranks import run_ranks
from tests.tiny import gpt_spec

BOTH = {"exp_avg": "fp8", "exp_avg_sq": "fp8", "moments_by_group": True}
WIDE = gpt_spec(num_layers=1, hidden_size=256, ffn_hidden_size=512)
CASES = {
    "group": case("O2", storage=BOTH, model=WIDE),
    "group, ZeRO": case("O2", storage=BOTH, model=WIDE, zero=True),
    "group, tp": case("O2", storage=BOTH, model=WIDE, parallel=replace(SMALL, tp=2)),
}


def parameters_of(state: TrainState) -> Iterator[tuple[str, nn.Parameter, ScaledTensor]]:
    """Yield each moment's kind, its parameter and itself."""
    assert isinstance(state.optimizer, StoredAdamW)
    params = [segment.param for segment in state.masters.segments]
    for kind in ("exp_avg", "exp_avg_sq"):
        for param, stored in zip(params, state.optimizer.stored_states(kind), strict=True):
            yield kind, param, stored


def test_layouts_and_their_checkpoints(tmp_path: Path) -> None:
    """Two ranks: ZeRO has the bits of replicas; a checkpoint has the very groups of every layout,
    continues bit for bit in its own, and is read by the others."""
    arguments: dict[str, Any] = {"cases": CASES, "root": tmp_path, "saved": tuple(CASES)}
    before = run_ranks("tests.optim.stored_work:train", 2, arguments, timeout=300)
    for rank in before:
        assert rank["group"].losses == rank["group, ZeRO"].losses
        for name in CASES:
            reader = Reader(path_of(tmp_path, name))
            for piece in rank[name].moments:
                kind = ("exp_avg", "exp_avg_sq")[int(piece.name[0])]
                whole = reader.read_values(f"optimizer/{kind}/{piece.name[2:]}")
                part = Box(piece.offset, tuple(piece.tensor.shape))
                origin = Box((0,) * whole.dim(), tuple(whole.shape))
                assert torch.equal(whole[part.slices_within(origin)], piece.tensor), piece.name
    reader = Reader(path_of(tmp_path, "group, tp"))
    names = [name for name in reader.names() if reader.is_grouped(name)]
    assert names and all(reader.dtype(name) == torch.float8_e4m3fn for name in names)
    assert any(reader.global_shape(SCALES + name)[1:] == (2, 2) for name in names)
    loads = {
        **{name: (path_of(tmp_path, name), CASES[name]) for name in CASES},
        "to ZeRO": (path_of(tmp_path, "group"), CASES["group, ZeRO"]),
        "to tp": (path_of(tmp_path, "group"), CASES["group, tp"]),
        "from tp": (path_of(tmp_path, "group, tp"), CASES["group"]),
    }
    after = run_ranks(
        "tests.optim.stored_work:train", 2, {"cases": {}, "loads": loads}, timeout=300
    )
    for rank, was in zip(after, before, strict=True):
        for name in CASES:
            assert rank[name].losses == was[f"{name}, continued"].losses, name
            same_bits(rank[name].moments, was[f"{name}, continued"].moments)
        assert rank["to ZeRO"].losses == was["group, continued"].losses
        for name, source in (("to tp", "group"), ("from tp", "group, tp")):
            expected = was[f"{source}, continued"].losses
            assert rank[name].losses == pytest.approx(expected, rel=2e-2), name


@pytest.mark.parametrize("wide", [False, True], ids=["one short group a row", "whole groups"])
def test_other_scalings_convert_the_values(tmp_path: Path, wide: bool) -> None:
    """Groups are read by a tensor's scale and by FP32, and the other way around: the values that
    were stored are stored again by the run's own rule, and FP32 has them exactly."""
    choices: dict[str, Any] = {"parallel": ParallelSpec(), "steps": 2}
    if wide:
        choices["model"] = WIDE
    kinds = {
        "group": case("O2", storage=BOTH, **choices),
        "tensor": case("O2", **choices),
        "fp32": case("O1", **choices),
    }
    steps = {}
    for name, made in kinds.items():
        state = made.build(single_rank())
        after_steps(state, made, 2)
        Saver(tmp_path / name, keep=1, meta={}).save(state)
        steps[name] = path_of(tmp_path, name)
    for source, target in (
        ("group", "group"),
        ("group", "tensor"),
        ("group", "fp32"),
        ("tensor", "group"),
        ("fp32", "group"),
    ):
        state, said = kinds[target].build(single_rank()), []
        load(steps[source], state, said.append)
        reader = Reader(steps[source])
        num_fused = 0
        for kind, param, stored in parameters_of(state):
            values = torch.full(param.shape, torch.nan)  # of the whole parameter
            pieces = pieces_of(param)
            num_fused += len(pieces) == 3
            for piece in pieces:
                name = f"optimizer/{kind}/{piece.name}"
                values[piece.local] = part = reader.read_values(name)
                if reader.is_grouped(name):
                    payload, groups = reader.read(name), reader.read(SCALES + name)
                    assert torch.equal(part, values_of(payload, groups, 0))
            expected = type(stored).of(values, stored.fmt).values()
            if source == target:
                assert isinstance(stored, GroupedTensor) == (values.dim() > 1)
                expected = values
            assert torch.equal(stored.values(), expected), (source, target, pieces[0].name)
        assert num_fused > 0, "queries, keys and values are pieces of one parameter"
        assert bool(said) == (source != target and target != "fp32"), said


def test_bytes_and_who_has_groups() -> None:
    """Matrices have a byte an element and 8 for each group; norms and biases FP32 moments."""
    state = case("O2", storage=BOTH, model=WIDE, parallel=ParallelSpec()).build(single_rank())
    for kind, param, stored in parameters_of(state):
        name = f"{kind} of {pieces_of(param)[0].name}"
        assert isinstance(stored, GroupedTensor) == (stored.payload.dim() == 2), name
        held = sum(tensor.nbytes for tensor in stored.held)
        each = 1 + 8 / 128 if stored.payload.dim() == 2 else 4
        assert held == each * stored.payload.numel(), name
