"""Non-finite losses, gradients and weights are named and never saved, and policies apply."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from megafp8.cli import generate
from megafp8.observe.metrics import read_metrics
from megafp8.report.record import read_run
from tests.observe.test_trackers import offline_folders, scalars, wandb_file
from tests.train.runs import STEPS, TWO_RANKS, Done, Place, assert_same, timeless_metrics


def policy(name: str) -> str:
    return f"trainer.nonfinite_policy={name}"


def bad_tensor(place: Place) -> str:
    """Return the name of one parameter, as a checkpoint of another run spells it."""
    manifest = json.loads((place.checkpoint(STEPS) / "manifest.json").read_text())
    names = [piece["name"] for file in manifest["files"] for piece in file["pieces"]]
    models = [name.removeprefix("model/") for name in names if name.startswith("model/")]
    return next(name for name in models if "fc1" in name and "weight" in name)


def test_stop(place: Place, undisturbed: tuple[Place, Done]) -> None:
    reference, _ = undisturbed
    name = bad_tensor(reference)
    done = place.run(fault=["nan_gradient", name, [6]])
    assert done.code == 3, done.output
    assert "Traceback" not in done.output
    said = done.output.splitlines()[-1]
    assert said.startswith("error: step 6: ") and f"gradient of {name}." in said
    assert "grad norm nan" in said and "nonfinite_policy=skip" in said
    assert place.steps() == [2, 4]
    done = place.run()  # the fault has passed: the same command continues
    assert done.code == 0
    assert_same(place, reference)


def test_a_bad_gradient_of_a_whole_parameter_on_one_of_two_ranks_stops_both(place: Place) -> None:
    """Each tensor-parallel rank has its own gradient of the parameter; none waits for the other."""
    fault = ["in_rank", 1, "nan_gradient", "final_norm.weight", [3]]
    done = place.run(*TWO_RANKS, fault=fault)
    assert done.code == 3, done.output
    assert "error: step 3: " in done.output and "gradient of final_norm.weight." in done.output


def test_a_run_without_a_name_continues_by_the_name_that_the_error_gives(place: Place) -> None:
    done = place.run("exp_manager.name=null", fault=["nan_gradient", "final_norm.weight", [4]])
    assert done.code == 3, done.output
    name = done.output.splitlines()[-1].rpartition("exp_manager.name=")[2]
    assert [path.name for path in place.dir().parent.iterdir() if path.is_dir()] == [name]
    done = place.run(f"exp_manager.name={name}", policy("skip"))
    assert done.code == 0, done.output
    assert [path.name for path in place.dir().parent.iterdir() if path.is_dir()] == [name]


def test_a_recipe_of_ones_own_is_to_be_tested(place: Place) -> None:
    recipe = str(Path(__file__).parents[1] / "own_recipes/blocks_of_32.py:BlocksOf32")
    settings = (f"model.fp8_recipe={recipe}", "model.fp8_amax_history_len=1024")
    done = place.run(*settings, fault=["nan_gradient", "final_norm.weight", [1]])
    assert done.code == 3, done.output
    assert f"Test your recipe (megafp8 recipe check {recipe}), lower model.optim" in done.output


def test_the_first_bad_tensor_is_found_among_weights_in_fp8(place: Place) -> None:
    done = place.run("model.fp8_params=True", fault=["nan_gradient", "final_norm.weight", [1]])
    assert done.code == 3 and "Traceback" not in done.output, done.output
    assert "first bad: gradient of final_norm.weight." in done.output


@pytest.mark.parametrize("ranks", [[], TWO_RANKS], ids=["one rank", "two ranks"])
def test_a_new_run_that_fails_between_two_logged_steps_is_kept(
    place: Place, undisturbed: tuple[Place, Done], ranks: list[str]
) -> None:
    """It begins at step 8, and neither logs nor saves a step before step 11, which fails."""
    given = [
        f"exp_manager.resume_from_checkpoint={undisturbed[0].checkpoint(8)}",
        "trainer.log_every_n_steps=20",
        "exp_manager.checkpoint_callback_params.every_n_train_steps=20",
        "trainer.val_check_interval=20",
    ]
    fault: list[object] = ["nan_gradient", bad_tensor(undisturbed[0]), [11]]
    done = place.run(*ranks, *given, fault=["in_rank", 0, *fault] if ranks else fault)
    assert done.code == 3 and "starting from" in done.output, done.output
    assert place.steps() == [] and place.metrics() == []
    run = read_run(place.dir())
    assert run.status == "failed" and run.config["model.num_layers"] == 2
    assert [event["kind"] for event in run.events if event["kind"] in ("start", "failed")] == [
        "start",
        "failed",
    ]
    assert any("error: NonFiniteError: step 11: " in line for line in run.tail)
    page = (place.dir() / "report.html").read_text()
    assert "NonFiniteError: step 11: " in page


def test_a_new_run_that_fails_in_its_first_step_leaves_nothing(place: Place) -> None:
    done = place.run(fault=["nan_gradient", "final_norm.weight", [1]])
    assert done.code == 3, done.output
    assert not place.dir().exists()


def test_skip(place: Place, undisturbed: tuple[Place, Done]) -> None:
    reference, _ = undisturbed
    done = place.run(policy("skip"), fault=["nan_gradient", bad_tensor(reference), [6]])
    assert done.code == 0, done.output
    assert "its batch is skipped" in done.output
    assert place.summary()["num_skipped_steps"] == 1
    rows = {row["step"]: row for row in read_metrics(place.dir() / "metrics.jsonl") if "lr" in row}
    assert len(rows) == STEPS
    assert math.isnan(rows[6]["grad_norm"])
    before, after = rows[5], rows[7]
    theirs = {row["step"]: row for row in reference.metrics() if "lr" in row}
    assert before["loss"] == theirs[5]["loss"] and math.isfinite(after["loss"])
    assert after["consumed_samples"] == theirs[7]["consumed_samples"]
    assert place.steps() == [8, 10, 12]


def test_rollback_of_a_passing_fault(place: Place, undisturbed: tuple[Place, Done]) -> None:
    reference, _ = undisturbed
    fault = ["nan_gradient", bad_tensor(reference), [6], 1]
    done = place.run(policy("rollback"), fault=fault)
    assert done.code == 0, done.output
    assert "going back to step 4" in done.output and "skipped" not in done.output
    assert place.summary()["num_skipped_steps"] == 0
    for step in place.steps():
        mine, theirs = (p.checkpoint(step) / "rank0.safetensors" for p in (place, reference))
        assert mine.read_bytes() == theirs.read_bytes()
    assert timeless_metrics(place) == timeless_metrics(reference)


def test_rollback_rewinds_the_trackers(place: Place, undisturbed: tuple[Place, Done]) -> None:
    """TensorBoard has each step of metrics.jsonl once; Weights & Biases has rows that rise."""
    fault: list[object] = ["nan_gradient", bad_tensor(undisturbed[0]), [7], 1]
    more = ["exp_manager.create_tensorboard_logger=True", "trainer.log_every_n_steps=1"]
    more += ["exp_manager.checkpoint_callback_params.every_n_train_steps=4"]
    has_wandb = importlib.util.find_spec("wandb") is not None
    if has_wandb:
        more.append("exp_manager.create_wandb_logger=True")
        environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        fault = ["both", fault, ["environment", environment]]
    done = place.run(policy("rollback"), *more, fault=fault)
    assert done.code == 0 and "going back to step 4" in done.output, done.output
    rows = read_metrics(place.dir() / "metrics.jsonl")
    for tag, key in (("lm loss", "loss"), ("val_loss", "val_loss"), ("grad_norm", "grad_norm"),
                     ("consumed_samples", "consumed_samples"), ("lr", "lr"),
                     ("train_step_timing in s", "step_seconds")):  # fmt: skip
        expected = {row["step"]: np.float32(row[key]) for row in rows if key in row}
        assert scalars(place.dir(), tag) == list(expected.items()), tag
    if has_wandb:
        (folder,) = offline_folders(place.dir())
        _, in_wandb = wandb_file(folder)
        losses = [(row["_step"], row["lm loss"]) for row in in_wandb]
        assert losses == [(row["step"], row["loss"]) for row in rows if "loss" in row]
        assert f"wandb sync {folder.relative_to(place.cwd)}" in done.output
        assert place.summary()["wandb"].endswith(f"wandb sync {folder.relative_to(place.cwd)}")


def test_rollback_before_the_first_checkpoint(
    place: Place, undisturbed: tuple[Place, Done]
) -> None:
    fault = ["nan_gradient", bad_tensor(undisturbed[0]), [1], 1]
    done = place.run(policy("rollback"), fault=fault)
    assert done.code == 0, done.output
    assert "going back to step 0" in done.output
    assert place.summary()["num_skipped_steps"] == 0


def test_rollback_of_lasting_faults(place: Place, undisturbed: tuple[Place, Done]) -> None:
    """Two bad steps lie between the same two checkpoints: each is tried twice, then skipped."""
    every = "exp_manager.checkpoint_callback_params.every_n_train_steps=4"
    fault = ["nan_gradient", bad_tensor(undisturbed[0]), [6, 8]]
    done = place.run(policy("rollback"), every, fault=fault)
    assert done.code == 0, done.output
    assert done.output.count("going back to step 4") == 2
    assert place.summary()["num_skipped_steps"] == 2
    steps = [row["step"] for row in place.metrics() if "lr" in row]
    assert steps == list(range(1, STEPS + 1))


def test_ten_in_a_row_stop(place: Place, undisturbed: tuple[Place, Done]) -> None:
    name = bad_tensor(undisturbed[0])
    done = place.run(policy("skip"), fault=["nan_gradient", name, list(range(3, STEPS + 1))])
    assert done.code == 3, done.output
    assert done.output.count("its batch is skipped") == 9
    assert done.output.splitlines()[-1].startswith("error: step 12: ")


def test_ten_in_a_row_are_counted_over_starts(place: Place) -> None:
    """The same command gives the same answer; it trained ten more bad steps in each start."""
    large = ["model.optim.lr=1e12", "trainer.gradient_clip_val=0", policy("skip")]
    said = []
    for _ in range(2):
        done = place.run(*large, "trainer.max_steps=30")
        assert done.code == 3, done.output
        said.append(done.output.splitlines()[-1])
    assert said[0] == said[1] and "error: step 11: loss nan" in said[0]


LARGE = ["model.optim.lr=1e12", "trainer.gradient_clip_val=0"]
OVERFLOWS = {
    "outputs": LARGE,
    "first weights": ["model.init_method_std=1e15"],
    "decay": ["model.optim.lr=1", "model.optim.weight_decay=1e15"],
    "clip": ["model.optim.lr=1e15", "trainer.gradient_clip_val=1e15"],
    "without validation": [*LARGE, "trainer.limit_val_batches=0"],
    "two ranks": [*LARGE, *TWO_RANKS],
}


@pytest.mark.parametrize("given", OVERFLOWS.values(), ids=OVERFLOWS)
def test_a_run_whose_outputs_are_not_finite_ends_and_stays_ended(
    place: Place, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its closing sample cannot be drawn, for which it had no summary and died again each time."""
    given = [*given, policy("skip"), "trainer.max_steps=3"]
    done = place.run(*given)
    assert done.code == 3 and "Traceback" not in done.output, done.output
    summary = place.summary()
    assert (summary["status"], summary["step"]) == (place.status(), 3) == ("diverged", 3)
    assert re.search(r"\d of 3 steps were skipped", summary["continue_note"])
    assert "writes no sample" in done.output and read_run(place.dir()).status == "diverged"
    before = (place.dir() / "summary.json").stat().st_mtime_ns
    done = place.run(*given)
    assert done.code == 3 and "step 3 of 3: nothing is left to do" in done.output, done.output
    assert (place.dir() / "summary.json").stat().st_mtime_ns == before
    assert generate.main([str(place.dir()), "--prompt", "def", "--tokens", "2"]) == 2
    assert "the model's outputs are not finite" in capsys.readouterr().err


def test_a_run_of_skipped_steps_alone_is_not_called_finished(place: Place) -> None:
    given = [policy("skip"), "trainer.max_steps=3"]
    done = place.run(*given, fault=["nan_gradient", "final_norm.weight", [1, 2, 3]])
    assert done.code == 3, done.output
    assert "no step has changed a weight; 3 of 3 steps were skipped" in done.output
    assert "Lower model.init_method_std" in done.output
    assert place.run(*given).code == 3


def test_a_sample_amid_a_run_that_cannot_be_drawn_does_not_end_it(place: Place) -> None:
    few = ["trainer.max_steps=100", "trainer.val_check_interval=25", "model.num_layers=1"]
    often = ["exp_manager.checkpoint_callback_params.every_n_train_steps=50"]
    done = place.run(*few, *often, fault=["no_finite_logits"])
    assert done.code == 3 and "Traceback" not in done.output, done.output
    assert done.output.count("writes no sample") == 4 and place.status() == "diverged"


def test_a_weight_that_became_infinite_is_never_saved(
    place: Place, undisturbed: tuple[Place, Done]
) -> None:
    """The loss and gradients of the step that makes it infinite are finite.

    An FP8 cast saturates, so that such a weight may give finite losses again.
    """
    reference, _ = undisturbed
    name = bad_tensor(reference)
    done = place.run(fault=["infinite_weight", name, 6])
    assert done.code == 3, done.output
    assert f"error: step 6: model/{name} is not finite: this step was not saved." in done.output
    assert place.steps() == [2, 4]
    name = "final_norm.weight"  # computed in BF16
    done = place.run(fault=["infinite_weight", name, 5])
    assert done.code == 3
    assert f"error: step 6: loss nan, grad norm nan; first bad: weight {name}." in done.output
    assert "was saved. Continue from an earlier checkpoint" in done.output
    assert "model.optim.lr" not in done.output.splitlines()[-1]  # does not mend a weight
    assert place.steps() == [2, 4]
    assert "Traceback" not in done.output
    assert place.run().code == 0
    assert_same(place, reference)
