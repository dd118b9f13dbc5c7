"""SIGTERM, SIGINT and SIGUSR1 save and exit with code 75; the same command continues."""

from __future__ import annotations

import signal

import pytest

from tests.train.runs import STEPS, Done, Place, assert_same


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_saves_and_leaves(
    place: Place, undisturbed: tuple[Place, Done], name: str
) -> None:
    every = "exp_manager.checkpoint_callback_params.every_n_train_steps=5"
    done = place.run(every, fault=["signalled", int(signal.Signals[name]), 7])
    assert done.code == 75, done.output
    assert "Traceback" not in done.output
    assert place.steps() == [5, 7]  # the step under way is finished
    summary = place.summary()
    assert summary["status"] == f"saved on {name}" and summary["step"] == 7
    assert summary["checkpoint"] == str(place.checkpoint(7).relative_to(place.cwd))
    assert summary["continue_command"].startswith("python pretrain_gpt.py ")
    assert "exp_manager.name=job" in summary["continue_command"]
    assert f"trainer.max_steps={STEPS}" in summary["continue_command"]
    assert place.status() == "running"

    assert place.run().code == 0  # now every 2 steps, as the undisturbed run
    assert place.steps() == [8, 10, 12]
    assert_same(place, undisturbed[0])


def test_in_the_last_step_the_run_is_finished(
    place: Place, undisturbed: tuple[Place, Done]
) -> None:
    done = place.run(fault=["signalled", int(signal.SIGTERM), STEPS])
    assert done.code == 0, done.output
    assert_same(place, undisturbed[0])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_second_signal_leaves_at_once(
    place: Place, undisturbed: tuple[Place, Done], name: str
) -> None:
    number = int(signal.Signals[name])
    done = place.run(fault=["signalled", number, 7, 2])
    assert done.code == 128 + number, done.output
    assert place.steps() == [2, 4, 6]
    assert place.run().code == 0
    assert_same(place, undisturbed[0])


@pytest.mark.parametrize(
    ("fault", "saved"),
    [
        (["signalled_in_validation", int(signal.SIGTERM), 1], 4),  # the one after step 4
        (["signalled_in_stall", int(signal.SIGTERM), 5, 0.4], 5),
    ],
)
def test_a_signal_in_validation_and_while_data_are_late(
    place: Place, undisturbed: tuple[Place, Done], fault: list[object], saved: int
) -> None:
    done = place.run(fault=fault)
    assert done.code == 75, done.output
    assert place.steps()[-1] == saved
    assert place.run().code == 0
    assert_same(place, undisturbed[0])
