"""The command line can be killed, can get signals, and runs on two ranks.

Whole processes run each case once. What comes before or after it, and its variants, run as forks,
which do the same without importing torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from megafp8.parallel.launch import LAUNCHER
from megafp8.train.process import StopRequest
from tests.train.runs import STEPS, TWO_RANKS, Child, Done, Driver, Place, assert_same, wait_until


def finish(place: Place, *more: str) -> None:
    process = place.command(*more)
    assert process.wait() == 0, place.command_output


def until_step(place: Place, process: subprocess.Popen[bytes], step: int) -> None:
    wait_until(lambda: place.last_step() >= step or process.poll() is not None, f"step {step}")
    assert process.poll() is None, place.command_output


def fork_until_step(place: Place, step: int, *more: str) -> Child:
    child = place.start(*TWO_RANKS, *more)
    wait_until(lambda: place.last_step() >= step or child.wait(0) is not None, f"step {step}")
    return child


def ranks_of(launcher: int) -> dict[int, psutil.Process]:
    """Return the ranks in the order of their start, as a fork's environment is not visible."""
    children = psutil.Process(launcher).children()
    return dict(enumerate(sorted(children, key=lambda child: (child.create_time(), child.pid))))


def wait_for_end(processes: list[psutil.Process]) -> None:
    gone, alive = psutil.wait_procs(processes)
    assert not alive, "orphans"


@pytest.mark.slow
@pytest.mark.kill
def test_kill_9(place: Place, undisturbed: tuple[Place, Done]) -> None:
    process = place.command()
    until_step(place, process, 5)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert place.steps() and place.steps()[-1] < STEPS
    finish(place)
    assert place.command_output.startswith("runs/job: continues run job\n")
    assert_same(place, undisturbed[0])


@pytest.mark.slow
def test_sigterm(place: Place, undisturbed: tuple[Place, Done]) -> None:
    process = place.command()
    until_step(place, process, 3)
    process.terminate()
    assert process.wait() == 75, place.command_output
    summary = place.summary()
    assert summary["status"] == "saved on SIGTERM" and place.steps()[-1] == summary["step"] < STEPS
    finish(place)
    mine, theirs = (p.checkpoint(STEPS) / "rank0.safetensors" for p in (place, undisturbed[0]))
    assert mine.read_bytes() == theirs.read_bytes()


# ---- two tensor-parallel ranks


@pytest.fixture(scope="module")
def two_undisturbed(
    driver: Driver, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    place = Place(driver, dataset, tmp_path_factory.mktemp("two"))
    done = place.run(*TWO_RANKS)
    assert done.code == 0, done.output
    return place


@pytest.mark.kill
def test_a_rank_is_killed(place: Place, two_undisturbed: Place) -> None:
    process = place.command(*TWO_RANKS)
    until_step(place, process, 4)
    ranks = ranks_of(process.pid)
    assert sorted(ranks) == [0, 1]
    ranks[1].kill()
    assert process.wait() == 1
    said = f"megafp8: rank 1 died (signal SIGKILL) on {socket.gethostname()}; the other ranks were "
    said += "ended. The same command continues from runs/job/checkpoints/step_"
    assert said in place.command_output
    wait_for_end(list(ranks.values()))
    done = place.run(*TWO_RANKS)
    assert done.code == 0, done.output
    assert_same(place, two_undisturbed)


@pytest.mark.kill
def test_the_launcher_is_killed(place: Place) -> None:
    launcher = fork_until_step(place, 4)
    ranks = ranks_of(launcher.pid)
    assert sorted(ranks) == [0, 1]
    os.kill(launcher.pid, signal.SIGKILL)
    done = launcher.wait()
    assert done is not None and done.code == -signal.SIGKILL
    wait_for_end(list(ranks.values()))


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGUSR1", marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher(place: Place, two_undisturbed: Place, name: str) -> None:
    number = signal.Signals[name]
    launcher = fork_until_step(place, 3)
    ranks = ranks_of(launcher.pid)
    os.kill(launcher.pid, number)
    done = launcher.wait()
    assert done is not None and done.code == 75, launcher.output
    wait_for_end(list(ranks.values()))
    assert f"megafp8: {name}: all ranks have left" in done.output
    assert "Traceback" not in done.output
    summary = place.summary()
    assert summary["status"] == f"saved on {name}" and place.steps()[-1] == summary["step"]
    done = place.run(*TWO_RANKS)
    assert done.code == 0, done.output
    names = [f"rank{rank}.safetensors" for rank in (0, 1)]
    for file in names:
        mine, theirs = (p.checkpoint(STEPS) / file for p in (place, two_undisturbed))
        assert mine.read_bytes() == theirs.read_bytes()


EXPERTS = (
    "trainer.devices=2",
    "model.activation=swiglu",
    "model.normalization=rmsnorm",
    "model.bias=False",
    "model.ffn_dropout=0",
    "model.num_moe_experts=4",
    "model.moe_router_score_function=sigmoid",
    "model.moe_router_enable_expert_bias=True",
    "model.moe_aux_loss_coeff=0.01",
)
LAYOUTS_OF_EXPERTS = {
    "whole experts": ("model.optim.name=distributed_fused_adam",),
    "divided experts": ("model.expert_model_parallel_size=2",),
}


@pytest.fixture(scope="module", params=LAYOUTS_OF_EXPERTS)
def of_experts(
    request: pytest.FixtureRequest,
    driver: Driver,
    dataset: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Place, tuple[str, ...]]:
    """Return an undisturbed run of two ranks with experts, and its settings."""
    settings = (*EXPERTS, *LAYOUTS_OF_EXPERTS[request.param])
    place = Place(driver, dataset, tmp_path_factory.mktemp("experts"))
    done = place.run(*settings)
    assert done.code == 0, done.output
    return place, settings


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_with_experts_continue_bit_for_bit(
    place: Place, of_experts: tuple[Place, tuple[str, ...]], number: signal.Signals
) -> None:
    """The job gets a signal, or loses a rank: weights, moments, histories and biases go on."""
    undisturbed, settings = of_experts
    process = place.command(*settings)
    until_step(place, process, 4)
    ranks = ranks_of(process.pid)
    assert sorted(ranks) == [0, 1]
    os.kill(process.pid if number == signal.SIGTERM else ranks[1].pid, number)
    assert process.wait() == (75 if number == signal.SIGTERM else 1), place.command_output
    wait_for_end(list(ranks.values()))
    assert place.steps()[-1] < STEPS
    done = place.run(*settings)
    assert done.code == 0, done.output
    if number == signal.SIGKILL:  # the other one has also saved at a step of its own
        assert_same(place, undisturbed)
    names = sorted(path.name for path in undisturbed.checkpoint(STEPS).glob("rank*.safetensors"))
    assert names == [f"rank{rank}.safetensors" for rank in (0, 1)]
    for name in names:
        mine, theirs = (p.checkpoint(STEPS) / name for p in (place, undisturbed))
        assert mine.read_bytes() == theirs.read_bytes()


def test_a_signal_to_all_processes_of_a_job(place: Place) -> None:
    """As systemd sends it, so that the ranks get the launcher's signal and their own."""
    launcher = fork_until_step(place, 3)
    ranks = list(ranks_of(launcher.pid).values())
    for pid in (launcher.pid, *(rank.pid for rank in ranks)):
        os.kill(pid, signal.SIGTERM)
    done = launcher.wait()
    assert done is not None and done.code == 75, launcher.output
    assert "megafp8: SIGTERM: all ranks have left" in done.output
    assert place.summary()["status"] == "saved on SIGTERM"
    assert place.steps()[-1] == place.summary()["step"]


@pytest.mark.parametrize("variable", [LAUNCHER, "TORCHELASTIC_RUN_ID", None])
def test_only_a_process_without_a_launcher_leaves_at_a_second_signal(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (LAUNCHER, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "WORLD_SIZE", *([variable] if variable else [])):
        monkeypatch.setenv(name, "1")
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with StopRequest() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
        assert stop.signal == signal.SIGUSR1
    assert left == ([] if variable else [128 + signal.SIGUSR1])


@pytest.mark.slow
def test_a_second_signal_to_the_launcher(place: Place) -> None:
    process = place.command(*TWO_RANKS)
    until_step(place, process, 3)
    ranks = ranks_of(process.pid)
    for rank in ranks.values():
        os.kill(rank.pid, signal.SIGSTOP)  # so that they cannot exit at the first one
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: _pending(ranks[0], signal.SIGTERM), "the first signal is passed on")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT, place.command_output
    wait_for_end(list(ranks.values()))


def _pending(process: psutil.Process, number: int) -> bool:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")]
    return bool(masks[0] >> (number - 1) & 1)


def test_an_error_of_all_ranks_is_reported_once(place: Place) -> None:
    done = place.run(fault=["signalled", int(signal.SIGTERM), 2])
    assert done.code == 75
    done = place.run(*TWO_RANKS, "model.optim.lr=0.5")
    assert done.code == 2, done.output
    lines = done.output.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: model.optim.lr=0.5: "), lines


@pytest.mark.slow
def test_one_process_two_ranks_one_process(place: Place, undisturbed: tuple[Place, Done]) -> None:
    done = place.run(fault=["signalled", int(signal.SIGTERM), 4])
    assert done.code == 75
    process = place.command(*TWO_RANKS)
    until_step(place, process, 6)
    process.terminate()
    assert process.wait() == 75, place.command_output
    assert "continuing after step 4 of 12" in place.command_output
    at = place.summary()["step"]
    assert 6 <= at < STEPS
    files = sorted(path.name for path in place.checkpoint(at).glob("rank*"))
    assert files == ["rank0.safetensors", "rank1.safetensors"]
    done = place.run()
    assert done.code == 0 and f"continuing after step {at} of 12" in done.output, done.output
    mine, theirs = (
        [row["loss"] for row in p.metrics() if "lr" in row] for p in (place, undisturbed[0])
    )
    # Attention's dropout masks differ, since tensor-parallel ranks draw those of their own heads.
    assert mine[:4] == theirs[:4] and mine == pytest.approx(theirs, rel=1e-2)


# ---- what goes wrong in one of two ranks only


def in_second_rank(place: Place, *fault: object) -> Done:
    return place.run(*TWO_RANKS, fault=["in_rank", 1, *fault])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        # FP8 casts saturate, so that the loss is finite again; but it is not saved.
        ("layers.0.mlp.fc1.weight", "model/layers.0.mlp.fc1.weight is not finite"),
        pytest.param(
            "final_norm.weight", "first bad: weight final_norm.weight", marks=pytest.mark.slow
        ),
    ],
)
def test_all_ranks_name_the_tensor_that_one_found(place: Place, name: str, said: str) -> None:
    done = in_second_rank(place, "infinite_weight", name, 5)
    assert done.code == 3, done.output
    errors = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: step 6: ") and said in errors[0]
    assert "Traceback" not in done.output
    assert place.steps() == [2, 4]


@pytest.mark.slow
def test_a_full_disk_of_one_rank_costs_that_checkpoint_only(
    place: Place, two_undisturbed: Place
) -> None:
    done = in_second_rank(place, "full_disk_at", 2)
    assert done.code == 0, done.output
    assert done.output.count("checkpoint at step 4 failed, training continues") == 1
    assert "rank1.safetensors" in done.output and "ENOSPC" in done.output
    assert_same(place, two_undisturbed)
