"""Checkpoints of ranks with several stages, resumed in another layout, in FP8 with dropout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import ParallelSpec
from tests.kit.cases import Case
from tests.kit.tensors import assembled
from tests.parallel import rank_probes
from tests.parallel.rank_probes import Resumed, load_train, train_save
from tests.parallel.rank_work import Outcome, run_case
from tests.parallel.test_pipeline import FP8, SCHEDULES, UNTIED
from tests.ranks import run_ranks
from tests.tiny import optim_spec

STEPS = 2  # before the checkpoint, and after it
ONE = Case(
    "bf16",
    FP8,
    UNTIED,
    steps=2 * STEPS,
    num_microbatches=4,
    optim=optim_spec(clip_grad_norm=None),  # a norm would be summed in another order
)


def staged(schedule: str) -> Case:
    return replace(ONE, parallel=ParallelSpec(pp=2, pipeline=SCHEDULES[schedule]))


SAVED = {name: staged(name) for name in ("Interleaved1F1B", "ZBVZeroBubble")}
RESUMED = {
    "interleaved -> V": ("Interleaved1F1B", staged("ZBVZeroBubble")),
    "V -> interleaved": ("ZBVZeroBubble", staged("Interleaved1F1B")),
    "V -> 1F1B": ("ZBVZeroBubble", staged("1F1B")),
    "one -> V": ("one", staged("ZBVZeroBubble")),
    "V -> tensor": ("ZBVZeroBubble", replace(ONE, parallel=ParallelSpec(tp=2))),
}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one() -> Outcome:
    """Undisturbed, in one process."""
    return run_case(ONE, single_rank())


@pytest.fixture(scope="module")
def resumed(folder: Path) -> dict[str, list[Resumed]]:
    train_save(ONE, single_rank(), folder / "one", STEPS)
    arguments = {"saved": SAVED, "resumed": RESUMED, "folder": str(folder), "steps": STEPS}
    results = run_ranks(rank_probes.saved_and_resumed, 2, arguments)
    found = {name: [rank[name] for rank in results] for name in RESUMED}
    for name in SAVED:
        found[f"{name} -> one"] = [load_train(ONE, single_rank(), folder / name, STEPS)]
    return found


def assert_as_undisturbed(ranks: list[Resumed], one: Outcome) -> None:
    """Losses, weights, histories and scales, bit for bit."""
    for rank in ranks:
        assert rank.losses == one.losses[STEPS:]
    ours, theirs = assembled([r.weights for r in ranks]), assembled([one.weights])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for direction, names in one.names.items():
        for field in ("history", "quant_scale"):
            rows = {n: row for rank in ranks for n, row in rank.tables[direction][field].items()}
            expected = dict(zip(names, one.updates[direction][-1][field], strict=True))
            assert rows.keys() == expected.keys()
            assert all(torch.equal(rows[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "case", [*(n for n in RESUMED if "tensor" not in n), *(f"{n} -> one" for n in SAVED)]
)
def test_continues_bit_for_bit(resumed: dict[str, list[Resumed]], one: Outcome, case: str) -> None:
    assert_as_undisturbed(resumed[case], one)


def test_tensor_parallel_ranks_continue(resumed: dict[str, list[Resumed]], one: Outcome) -> None:
    """With other masks of dropout and other sums: as near as two runs are."""
    for rank in resumed["V -> tensor"]:
        assert rank.losses == pytest.approx(one.losses[STEPS:], rel=1e-2)
