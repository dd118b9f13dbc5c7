"""Test which checkpoints are kept: the newest ones, and the best ones by a recorded metric."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.checkpoint import store
from megafp8.checkpoint.best import METRICS, Best
from megafp8.checkpoint.manifest import Placement

LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.0, 5: 6.0, 6: 5.5}


def save(root: Path, step: int, metrics: dict[str, Any]) -> Path:
    staging = store.begin(root, step)
    weight = torch.full((2,), float(step))
    shard = store.write_shard(staging, "a.safetensors", [Placement("w", (2,), (0,), weight)])
    return store.commit(staging, root, step, [shard], {METRICS: metrics})


@pytest.mark.parametrize(
    ("keep", "best", "stay"),
    [
        (1, Best(0), [6]),
        (1, Best(1), [2, 6]),  # of two equal ones the earlier, which was measured itself
        (1, Best(2), [2, 4, 6]),
        (2, Best(3), [2, 3, 4, 5, 6]),
        (1, Best(1, mode="max"), [5, 6]),
        (1, Best(1, monitor="reduced_train_loss"), [5, 6]),
        (1, Best(1, monitor="reduced_train_loss", mode="max"), [1, 6]),
        (1, Best(-1), [1, 2, 3, 4, 5, 6]),
        (3, Best(1), [2, 4, 5, 6]),
    ],
)
def test_a_run_keeps_its_best(tmp_path: Path, keep: int, best: Best, stay: list[int]) -> None:
    known: tuple[Path, ...] = ()
    for step, loss in LOSSES.items():
        # The training loss falls to step 5 and rises again.
        train_loss = abs(step - 5) + 1.0
        save(tmp_path, step, {"val_loss": loss, "reduced_train_loss": train_loss})
        known = store.prune(tmp_path, keep, known, best=best)
        assert store.steps(tmp_path)[-1] == step
    assert store.steps(tmp_path) == stay


def test_pruning_at_the_end_or_at_each_save_is_the_same(tmp_path: Path) -> None:
    for mode, count in itertools.product(("min", "max"), (1, 2, 3)):
        best = Best(count, mode=mode)  # type: ignore[arg-type]
        roots = [tmp_path / f"{mode}{count}{when}" for when in ("each", "end")]
        for step, loss in LOSSES.items():
            for root in roots:
                save(root, step, {"val_loss": loss})
            store.prune(roots[0], 1, best=best)
        store.prune(roots[1], 1, best=best)
        assert store.steps(roots[0]) == store.steps(roots[1])


@pytest.mark.parametrize("value", [None, "3.0", True, [1]])
def test_what_was_not_measured_is_not_best(tmp_path: Path, value: Any) -> None:
    save(tmp_path, 1, {} if value is None else {"val_loss": value})
    save(tmp_path, 2, {"val_loss": 9.0})
    save(tmp_path, 3, {})
    store.prune(tmp_path, 1, best=Best(2))
    assert store.steps(tmp_path) == [2, 3]


def test_a_damaged_best_one_does_not_count(tmp_path: Path) -> None:
    for step, loss in LOSSES.items():
        save(tmp_path, step, {"val_loss": loss})
    (tmp_path / "step_00000002" / "manifest.json").write_text("{}")
    store.prune(tmp_path, 1, best=Best(1))
    assert store.steps(tmp_path) == [4, 6]


def test_the_newest_stays_whatever_it_measured(tmp_path: Path) -> None:
    """A run continues from its newest checkpoint, so it is deleted only after a newer one."""
    save(tmp_path, 1, {"val_loss": 1.0})
    newest = save(tmp_path, 2, {"val_loss": 2.0})
    store.prune(tmp_path, 1, best=Best(1))
    assert store.newest_valid(tmp_path, print) == newest
    assert store.steps(tmp_path) == [1, 2]
