"""Make one dataset, one process that has imported torch, and one undisturbed run, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.test_instructions import write
from tests.train.runs import Done, Driver, Finetuning, Place, make_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture
def place(driver: Driver, dataset: Path, tmp_path: Path) -> Place:
    return Place(driver, dataset, tmp_path)


@pytest.fixture(scope="session")
def undisturbed(
    driver: Driver, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Place, Done]:
    """Return the run that all others are compared with, and how it ended."""
    place = Place(driver, dataset, tmp_path_factory.mktemp("undisturbed"))
    done = place.run()
    assert done.code == 0, done.output
    return place, done


@pytest.fixture
def tuning(driver: Driver, undisturbed: tuple[Place, Done], tmp_path: Path) -> Finetuning:
    write(
        tmp_path / "mine.jsonl",
        *({"input": f"def f{n}(x)", "output": f"Return {n % 3}."} for n in range(60)),
    )
    return Finetuning(driver, undisturbed[0].dir(), tmp_path)
