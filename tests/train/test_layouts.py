"""Whole runs on several ranks, and runs with a rank that hangs or fails."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.train.runs import Done, Place

TWO_STAGES = ["trainer.devices=2", "model.pipeline_model_parallel_size=2"]


def losses(place: Place) -> list[float]:
    return [row["loss"] for row in place.metrics() if "lr" in row]


def test_a_pipeline_trains_validates_samples_and_continues_alone(
    place: Place, undisturbed: tuple[Place, Done]
) -> None:
    """The run is the same as that of one process, which also loads what two stages have saved."""
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


EXPERTS = [
    "trainer.devices=2",
    "model.tensor_model_parallel_size=2",
    "model.sequence_parallel=True",
    "model.num_moe_experts=4",
    "model.bias=False",
    "model.ffn_dropout=0",
]


DIVIDED = ["trainer.devices=2", "model.expert_model_parallel_size=2", *EXPERTS[3:]]
"""The ranks meet when one is to get the other's tokens."""


@pytest.mark.kill
@pytest.mark.parametrize(
    "layout",
    [TWO_STAGES, *(pytest.param(each, marks=pytest.mark.slow) for each in (EXPERTS, DIVIDED))],
    ids=["step", "experts", "divided experts"],
)
def test_a_rank_that_hangs_is_named_and_shown(place: Place, layout: list[str]) -> None:
    """Also one that hangs in a layer with experts, whose counts the other rank waits for."""
    fault = ["in_rank", None, "hang", 1, 3, str(place.cwd / "hangs"), layout is not TWO_STAGES]
    losses = ["model.moe_aux_loss_coeff=0.01"] if layout is EXPERTS else []
    done = place.run(*layout, *losses, "trainer.step_timeout=100", fault=fault)
    assert done.code == 4, done.output
    assert "megafp8: no progress for trainer.step_timeout=100.0 s" in done.output
    assert "megafp8: rank 1 hangs in step 3, after" in done.output
    assert "faults.py" in done.output and "in act" in done.output, "where it hangs"
    assert "megafp8: rank(s) 0 wait for others; all leave" in done.output
    assert done.output.count("Its stacks:") == 1


FAILED = "(exit code 1) on {host}: ValueError: the number is 42; the other ranks"
KILLED = "(signal SIGKILL) on {host}; the other"


@pytest.mark.kill
@pytest.mark.parametrize(
    ("layout", "fault", "said"),
    [
        (TWO_STAGES, ["fail", 3], FAILED),
        pytest.param(TWO_STAGES, ["killed", 3], KILLED, marks=pytest.mark.slow),
        pytest.param(EXPERTS, ["fail", 3, True], FAILED, marks=pytest.mark.slow),
        pytest.param(DIVIDED, ["fail", 3, True], FAILED, marks=pytest.mark.slow),
    ],
    ids=["fails", "killed", "fails in experts", "fails in divided experts"],
)
def test_when_a_rank_dies_all_end_and_it_is_named(
    place: Place, layout: list[str], fault: list[object], said: str
) -> None:
    """All ranks end, the error of the dead rank is shown, and no process stays."""
    done = place.run(*layout, fault=["in_rank", 1, *fault])
    assert done.code == 1, done.output
    assert f"megafp8: rank 1 died {said.format(host=socket.gethostname())}" in done.output
    assert not processes_in(place.cwd), "no orphans"


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose working directory is `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")) == folder:
                found.append(int(process.name))
        except OSError:
            pass  # the process has ended, or belongs to another user
    return found


@pytest.mark.slow
def test_eight_ranks_with_every_axis_by_one_command(place: Place) -> None:
    """The command of docs/guide/parallelism.md runs in its own process.

    It trains, validates and saves; one process then continues it.
    """
    axes = (
        "trainer.devices=8",
        "model.tensor_model_parallel_size=2",
        "model.pipeline_model_parallel_size=2",
        "model.sequence_parallel=True",
        "model.fp8=True",
    )
    job = ("model.global_batch_size=8", "trainer.max_steps=4")
    process = place.command(*axes, *job)
    assert process.wait() == 0, place.command_output
    said = "8 ranks on cpu, tensor parallel 2 with sequence parallelism, pipeline parallel 2 (1F1B)"
    assert said in place.command_output
    assert place.command_output.count("with sequence parallelism") == 1, "one rank speaks"
    ours = losses(place)
    assert len(ours) == 4 and place.steps()[-1] == 4
    traffic = place.summary()["traffic_bytes"]
    for key in ("tp all_gather uint8", "tp reduce_scatter_sum bfloat16", "pp send bfloat16"):
        assert traffic[key] > 0
    done = place.run("model.global_batch_size=8", "trainer.max_steps=6")
    assert done.code == 0 and "continuing after step 4 of 6" in done.output, done.output
    alone = place.run(*job, "exp_manager.name=alone")
    assert alone.code == 0, alone.output
    theirs = [row["loss"] for row in place.metrics("alone") if "lr" in row]
    assert ours == pytest.approx(theirs, rel=1e-2), "other masks of dropout"


@pytest.mark.slow
def test_ramp_up_with_sequence_parallelism_on_stages(place: Place) -> None:
    """There is a schedule for each number of microbatches; samples and losses are one process's."""
    ramp = ("model.rampup_batch_size=[4,2,16]", "model.global_batch_size=8")
    rest = ("trainer.max_steps=7", "model.fp8=False", "model.fp8_amax_history_len=1024")
    plain = [f"model.{kind}_dropout=0" for kind in ("hidden", "attention", "ffn")]
    axes = ("trainer.devices=4", "model.tensor_model_parallel_size=2", TWO_STAGES[1])
    done = place.run(*ramp, *rest, *plain, *axes, "model.sequence_parallel=True")
    assert done.code == 0, done.output
    alone = place.run(*ramp, *rest, *plain, "exp_manager.name=alone")
    assert alone.code == 0, alone.output
    mine, theirs = ([r for r in place.metrics(name) if "lr" in r] for name in ("job", "alone"))
    sizes = [row["global_batch_size"] for row in mine]
    assert sizes == [row["global_batch_size"] for row in theirs] and len(set(sizes)) == 3
    assert [r["loss"] for r in mine] == pytest.approx([r["loss"] for r in theirs], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("model.optim.name=distributed_fused_adam", "ZeRO-1 over 2 ranks: this one keeps"),
        ("model.fsdp=True", "FSDP (full) over 2 ranks: this one keeps"),
    ],
)
def test_a_sharded_run_is_continued_by_one_rank(
    place: Place, undisturbed: tuple[Place, Done], asked: str, said: str
) -> None:
    """Two ranks save, each with half of the states; one process continues, and two finish."""
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
    assert "a sample after 12 steps, the model continues " in done.output
    assert losses(place) == pytest.approx(losses(undisturbed[0]), rel=1e-2)
