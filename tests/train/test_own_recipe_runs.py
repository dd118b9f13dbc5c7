"""Runs under recipes of a user's own: kills and resumes, several ranks, a file that changes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from megafp8.specs.recipes import RECIPES
from tests.c_kernels import need_kernels
from tests.train.runs import TWO_RANKS, Driver, Place, assert_same, wait_until

OWN = Path(__file__).parents[1] / "own_recipes"
KILLED = -signal.SIGKILL
DATA_PARALLEL = ["trainer.devices=2", "model.optim.name=distributed_fused_adam"]
SEQUENCE = [*TWO_RANKS, "model.sequence_parallel=True"]


def settings_of(file: Path | str) -> list[str]:
    file = Path(file)
    length = 3 if file.stem == "smoothed" else 1024  # without a history, only the default is valid
    return [f"model.fp8_recipe={file}", f"model.fp8_amax_history_len={length}"]


def copied(name: str, folder: Path) -> Path:
    """Return a copy of a recipe, which is named alike wherever the run is."""
    file = folder / f"{name}.py"
    file.write_text((OWN / f"{name}.py").read_text("utf-8"), "utf-8")
    return file


@pytest.mark.parametrize(
    "name",
    [
        "four_bits",
        "smoothed",
        "nvfp4",
        pytest.param("blocks_of_32", marks=pytest.mark.slow),
        pytest.param("simulated_int8", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_continues_bit_for_bit(
    driver: Driver, dataset: Path, tmp_path: Path, name: str
) -> None:
    """The random bytes of `four_bits` and `nvfp4` and the history of `smoothed` go on too."""
    given, places = settings_of(name if name in RECIPES else copied(name, tmp_path)), []
    for fault in (None, ["killed_in_manifest", 3]):
        place = Place(driver, dataset, tmp_path / str(fault is None))
        place.cwd.mkdir()
        done = place.run(*given, fault=fault)
        assert done.code == (0 if fault is None else KILLED), done.output
        places.append(place)
    done = places[1].run(*given)
    assert done.code == 0 and "has changed" not in done.output, done.output
    assert_same(places[1], places[0])


def test_a_resume_with_another_rule_says_so(place: Place, tmp_path: Path) -> None:
    file = copied("blocks_of_32", tmp_path)
    assert place.run(*settings_of(file), fault=["killed_in_manifest", 3]).code == KILLED
    file.write_text(file.read_text("utf-8").replace("clamp(-100, 100)", "clamp(-99, 99)"), "utf-8")
    done = place.run(*settings_of(file))
    assert done.code == 0 and f"the recipe {file} has changed since" in done.output, done.output


def test_a_run_does_not_finish_because_its_recipe_leaves(place: Place, tmp_path: Path) -> None:
    """The C kernels of a recipe run outside of its rule, whose exceptions are caught there."""
    need_kernels()
    file = copied("blocks_of_32", tmp_path)
    leaves = "\n    def in_c(self, x_MN, block, cast):\n        raise SystemExit(0)\n"
    file.write_text(file.read_text("utf-8") + leaves, "utf-8")
    done = place.run(*settings_of(file))
    assert done.code == 2 and f"{file}, line " in done.output, done.output
    assert "asked Python to exit (SystemExit: 0)" in done.output, done.output
    assert not place.dir().exists()  # no step was trained


def test_a_planted_wrong_rule_changes_the_loss(place: Place, tmp_path: Path) -> None:
    """The values of INT8 with an eighth of the levels give another loss."""
    file = copied("simulated_int8", tmp_path)
    losses = []
    for levels in ("127", "15"):
        text = (OWN / "simulated_int8.py").read_text("utf-8").replace("127", levels)
        file.write_text(text, "utf-8")
        name = f"exp_manager.name=levels{levels}"
        done = place.run(*settings_of(file), name, "trainer.max_steps=4")
        assert done.code == 0, done.output
        losses.append(place.metrics(f"levels{levels}")[-1]["val_loss"])
    assert losses[0] != losses[1]


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.parametrize("layout", [TWO_RANKS, SEQUENCE, DATA_PARALLEL], ids=["tp", "sp", "zero"])
@pytest.mark.parametrize("name", ["blocks_of_32", "four_bits", "smoothed", "nvfp4"])
def test_several_ranks_are_killed_and_continue(
    driver: Driver, dataset: Path, tmp_path: Path, layout: list[str], name: str
) -> None:
    given = [*settings_of(name if name in RECIPES else copied(name, tmp_path)), *layout]
    places = []
    for is_killed in (False, True):
        place = Place(driver, dataset, tmp_path / str(is_killed))
        place.cwd.mkdir()
        job = place.command(*given)
        if is_killed:
            wait_until(lambda p=place, j=job: p.last_step() >= 5 or j.poll() is not None, "step 5")
            _kill(job)
            job = place.command(*given)
        assert job.wait() == 0, place.command_output
        assert ("continuing after step" in place.command_output) == is_killed
        places.append(place)
    assert_same(places[1], places[0])


def _kill(job: subprocess.Popen[bytes]) -> None:
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    for pid in [*map(int, children), job.pid]:
        os.kill(pid, signal.SIGKILL)
    job.wait()
