"""The rules of the soak are tested, and a short soak runs. `python -m tests.train.soak` is long."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.train.soak import PER, Sample, fit, judge, soak


def samples(
    rise_per_step: float = 0.0, files_per_step: float = 0.0, steps: int = 1000
) -> list[Sample]:
    """Return samples of noisy memory that grows to 100 MiB in the warm-up; one meets a save."""
    chance = random.Random(0)
    size = 100 * 2**20
    return [
        Sample(
            step,
            int(min(size, size * step / 100) + rise_per_step * step + chance.gauss(0, 1e4)),
            50 * 2**20,
            (12 if step == 600 else 9) + int(files_per_step * step),
            4,
        )
        for step in range(1, steps)
    ]


def test_a_leak_is_found_and_a_warm_up_is_none() -> None:
    flat = judge(0, samples(), 1000)
    assert not flat.problems and abs(flat.anonymous.slope) < 2**20
    assert flat.anonymous.margin < 2**20, "20 blocks of noise"
    leaking = judge(0, samples(rise_per_step=200.0), 1000)
    assert leaking.anonymous.slope == pytest.approx(200 * PER, abs=leaking.anonymous.margin * 2)
    assert len(leaking.problems) == 1 and "memory may rise" in leaking.problems[0]
    assert judge(0, samples(files_per_step=0.01), 1000).problems == [
        "rank 0: 18 open files, 10 in the warm-up"
    ]


def test_a_line_through_blocks() -> None:
    line = fit([(step, 3.0 + 2.0 * step / PER) for step in range(400)])
    assert line.slope == pytest.approx(2.0) and line.margin == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_short_soak_is_flat(tmp_path: Path, ranks: int) -> None:
    """Its interval is wide, since memory settles in a tenth of the long soak's steps."""
    more = ["model.tensor_model_parallel_size=2"] if ranks == 2 else []
    verdicts, committed, _ = soak(tmp_path, steps=1500, saves=30, ranks=ranks, more=more, pause=0.1)
    print(*verdicts, sep="\n")
    assert committed >= 30 and len(verdicts) == ranks
    for verdict in verdicts:
        assert verdict.open_files[1] <= verdict.open_files[0]
        assert verdict.threads[1] <= verdict.threads[0]
        rise = verdict.anonymous.slope * 1200 / PER
        assert rise < 0.02 * verdict.anonymous.mean, str(verdict)
