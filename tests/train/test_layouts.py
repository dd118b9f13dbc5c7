"""Whole runs on pipeline stages; a rank that hangs, a rank that fails."""

from __future__ import annotations

import signal
import sys

import pytest

from megafp8.parallel.watchdog import describe, is_waiting
from tests.train.runs import Done, Place

TWO_STAGES = ["trainer.devices=2", "model.pipeline_model_parallel_size=2"]


def losses(place: Place) -> list[float]:
    return [row["loss"] for row in place.metrics() if "lr" in row]


def test_a_pipeline_trains_validates_samples_and_continues_alone(
    place: Place, undisturbed: tuple[Place, Done]
) -> None:
    """The same run as one process's, which loads what two stages have saved."""
    one = undisturbed[0]
    done = place.run(*TWO_STAGES, fault=["in_rank", 1, "signalled", int(signal.SIGTERM), 6])
    assert done.code == 75, done.output
    assert "pipeline parallel 2 (1F1B)" in done.output
    parameters = next(line for line in done.output.splitlines() if "M parameters" in line)
    assert parameters in undisturbed[1].output, "stages together have one model's parameters"
    files = sorted(path.name for path in place.checkpoint(6).glob("*.safetensors"))
    assert files == ["rank0.safetensors", "rank1.safetensors"]
    sent = place.summary()["traffic_bytes"]["pp send bfloat16"]
    assert sent >= 6 * 2 * (2 * 32 * 64) * 2, "6 steps of 2 microbatches [2, 32, 64], in BF16"
    done = place.run()
    assert done.code == 0 and "continuing after step 6 of 12" in done.output, done.output
    assert losses(place) == pytest.approx(losses(one), rel=1e-3)
    assert place.summary()["val_loss"] == pytest.approx(one.summary()["val_loss"], rel=1e-3)


@pytest.mark.kill
def test_a_rank_that_hangs_is_named_and_shown(place: Place) -> None:
    done = place.run(*TWO_STAGES, "trainer.step_timeout=15", fault=["in_rank", 1, "hang", 3])
    assert done.code == 4, done.output
    assert "megafp8: no sign of life for trainer.step_timeout=15.0 s" in done.output
    assert "megafp8: rank 1 hangs in step 3, after" in done.output
    assert "faults.py" in done.output and "in <lambda>" in done.output, "where it hangs"
    assert "megafp8: rank(s) 0 wait for others; all leave" in done.output
    assert done.output.count("Its stacks:") == 1


@pytest.mark.kill
def test_a_rank_that_fails_is_named_with_its_error(place: Place) -> None:
    done = place.run(*TWO_STAGES, fault=["in_rank", 1, "fail", 3])
    assert done.code == 1, done.output
    said = "megafp8: rank 1 died (exit code 1): ValueError: the number is 42; the other ranks"
    assert said in done.output


def test_who_hangs() -> None:
    def report(waits: bool, collectives: int) -> dict[str, object]:
        stacks = f"a stack of {collectives}"
        return {"waits": waits, "what": "step 7", "collectives": collectives, "stacks": stacks}

    text = describe({0: report(True, 5), 1: report(False, 4), 2: report(True, 5)}, 3, 9.0)
    assert "rank 1 hangs in step 7, after 4 collectives" in text and "a stack of 4" in text
    assert "rank(s) 0, 2 wait" in text and "a stack of 5" not in text
    text = describe({0: report(True, 5), 2: report(True, 5)}, 3, 9.0)
    assert "rank 1 hangs: it does not even answer" in text and "rank(s) 0, 2 wait" in text
    text = describe({0: report(True, 5), 1: report(True, 3)}, 2, 9.0)
    assert "rank 1 hangs in step 7, after 3 collectives" in text, "all wait: the one behind"


def test_this_test_does_not_wait_for_other_ranks() -> None:
    assert not is_waiting(sys._getframe()) and not is_waiting(None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("model.optim.name=distributed_fused_adam", "ZeRO-1 over 2 rank(s): this one keeps"),
        ("model.fsdp=True", "FSDP (full) over 2 rank(s): this one keeps"),
    ],
)
def test_a_sharded_run_is_continued_by_one_rank(
    place: Place, undisturbed: tuple[Place, Done], asked: str, said: str
) -> None:
    """Saved by two ranks with a half of the states each; one process goes on with the whole, and
    two finish it."""
    sharded = ["trainer.devices=2", asked, "model.fp8_params=True"]
    alone = ["model.fp8_params=True"]
    done = place.run(*sharded, fault=["in_rank", 1, "signalled", int(signal.SIGTERM), 4])
    assert done.code == 75 and said in done.output, done.output
    sent = place.summary()["traffic_bytes"]
    assert sent["dp reduce_scatter_sum float32"] > 0 and "dp all_reduce_sum float32" not in sent
    assert sent["dp all_gather uint8"] > 0
    done = place.run(*alone, fault=["signalled", int(signal.SIGTERM), 8])
    assert done.code == 75 and "continuing after step 4 of 12" in done.output, done.output
    done = place.run(*sharded)
    assert done.code == 0 and "continuing after step 8 of 12" in done.output, done.output
    assert "a sample: " in done.output
    assert losses(place) == pytest.approx(losses(undisturbed[0]), rel=1e-2)
