"""Test that a checkpoint saved in any layout loads in any other layout without a change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.step_directories import step_name
from megafp8.parallel.mesh import single_rank
from megafp8.train import state_dict
from tests.checkpoint import layouts
from tests.checkpoint.layouts import GLOBAL_BATCH, STEPS_AFTER, STEPS_BEFORE, Layout
from tests.kit.cases import perturb
from tests.kit.tensors import Piece
from tests.parallel.matrix import PERTURBATIONS, distance


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def logical(ranks: list[list[Piece]]) -> dict[str, torch.Tensor]:
    """Return the whole tensors; ranks that hold the same part must agree bit for bit."""
    found: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    for piece in (piece for rank in ranks for piece in rank):
        bits = piece.tensor
        whole = found.setdefault(
            piece.name, torch.zeros(*piece.global_shape, bits.shape[-1], dtype=torch.uint8)
        )
        seen = known.setdefault(piece.name, torch.zeros(piece.global_shape, dtype=torch.bool))
        where = tuple(slice(o, o + n) for o, n in zip(piece.offset, bits.shape, strict=False))
        assert not seen[where].any() or torch.equal(whole[where], bits), f"{piece.name}: replicas"
        whole[where], seen[where] = bits, True
    assert all(seen.all() for seen in known.values())
    return found


def same_tensors(one: Reader, other: Reader) -> None:
    assert one.names() == other.names()
    for name in one.names():
        mine, theirs = one.read(name), other.read(name)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
        mine, theirs = mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)
        assert torch.equal(mine, theirs), name


def bound_of(precision: str, layout: Layout, expected: list[float], start: Path) -> float:
    """Return the parallel matrix's bound: 3 times the spread of a perturbed run's losses."""
    if precision == "FP32":
        return 1e-5
    spread = 0.0
    for seed in range(PERTURBATIONS):
        case = layouts.case_of(precision)
        state = case.build(single_rank())
        state_dict.load_checkpoint(start, state, print)
        perturb(state, seed)
        spread = max(spread, distance(layouts.train(state, case, STEPS_AFTER), expected))
    return 3 * spread


def check_round(precision: str, round_: list[Layout], folder: Path) -> None:
    state = layouts.begin(precision, folder / "start")
    start = folder / "start" / step_name(STEPS_BEFORE)
    first = Reader(start)
    payloads = logical([layouts.params_of(state)])
    expected = layouts.train(state, layouts.case_of(precision), STEPS_AFTER)
    samples = list(range(GLOBAL_BATCH * STEPS_BEFORE, GLOBAL_BATCH * (STEPS_BEFORE + 1)))
    end, found = layouts.go_round(precision, round_, folder)
    bound = bound_of(precision, round_[0], expected, start)
    for layout in round_:
        legs = found[layout.name]
        now = logical([leg.params for leg in legs])
        is_gathered = layout.spec.fsdp is not None and precision == "FP8"  # masters: at the end
        assert now.keys() == (set() if is_gathered else payloads.keys()), layout.name
        for name in now:
            assert torch.equal(now[name], payloads[name]), (layout.name, name)
        assert sorted({n for leg in legs for n in leg.samples}) == samples, layout.name
        assert not [text for leg in legs for text in leg.messages], layout.name
        for leg in legs:
            assert leg.losses == legs[0].losses, layout.name
            assert distance(leg.losses, expected) <= bound, (layout.name, leg.losses, expected)
    last = Reader(end / start.name)
    same_tensors(last, first)
    for key in ("consumed_samples", "num_updates", "num_skipped", "loss_scale"):
        assert last.meta[key] == first.meta[key], key
    assert last.step == first.step
    if round_[-1].ranks == 1:
        assert found[round_[-1].name][0].losses == expected, "bit for bit where it began"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["FP8"])
def test_a_quick_round(tmp_path: Path, precision: str) -> None:
    """The full round is slow: `python -m pytest -m slow tests/checkpoint/test_layouts.py`."""
    check_round(precision, layouts.QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", layouts.PRECISIONS)
def test_the_whole_round(tmp_path: Path, precision: str) -> None:
    round_ = layouts.round_of(precision)
    assert len(round_) >= 8
    check_round(precision, round_, tmp_path)
