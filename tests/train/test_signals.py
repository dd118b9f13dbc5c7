"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP save and exit with code 75; the same command continues."""

from __future__ import annotations

import os
import pty
import signal

import pytest

from tests.train.runs import ENVIRONMENT, ROOT, STEPS, Child, Done, Place, assert_same, wait_until


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
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


# ---- a closed terminal


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_terminal_is_closed_saves(place: Place, ranks: int) -> None:
    """It was ended by SIGHUP without a checkpoint; what it prints then cannot be written."""
    main, terminal = pty.openpty()
    words = place.argv("trainer.max_steps=100000", f"trainer.devices={ranks}")
    words += ["model.tensor_model_parallel_size=2"] * (ranks == 2)
    request = dict.fromkeys(("stdin", "stdout", "stderr"), os.ttyname(terminal))
    request |= {"cwd": str(place.cwd), "env": {**ENVIRONMENT, "TERM": "xterm"}}
    pid = place.driver.ask({"python": [str(ROOT / "pretrain_gpt.py"), *words], **request})
    process, ended = Child(place.driver, pid, place.cwd / "log.txt", 0), []

    def trains() -> bool:
        try:
            os.read(main, 1 << 16)  # otherwise the terminal is full
        except OSError:  # nothing is there, or the run has closed it
            pass
        ended.append(process.wait(0))
        return ended[-1] is not None or place.last_step() >= 2

    os.set_blocking(main, False)
    try:
        wait_until(trains, "two steps")
    finally:  # which ends the run, also where it was not seen to train
        os.close(terminal)
        os.close(main)
    done = ended[-1] or process.wait()
    assert done is not None and done.code == 75
    last = place.steps()[-1]
    assert place.summary()["status"] == "saved on SIGHUP" and place.summary()["step"] == last
    assert "SIGHUP: saving after this step" not in (place.dir() / "console.log").read_text()
