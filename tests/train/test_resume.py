"""A new run can continue another run's state bit for bit (`resume_from_checkpoint`)."""

from __future__ import annotations

import gc

from megafp8.train.process import Garbage
from tests.train.runs import TIMING_KEYS, Place

STEPS = ("trainer.max_steps=4", "trainer.val_check_interval=9")


def losses(place: Place, name: str) -> list[dict[str, object]]:
    rows = place.metrics(name)
    return [{k: v for k, v in row.items() if k not in TIMING_KEYS} for row in rows]


def test_a_new_run_continues_from_a_checkpoint(place: Place) -> None:
    assert place.run(*STEPS, "exp_manager.name=whole").code == 0
    assert place.steps("whole") == [2, 4]
    middle = place.checkpoint(2, "whole")
    for key, name in (("model", "one"), ("exp_manager", "other")):
        given = f"{key}.resume_from_checkpoint={middle}"
        done = place.run(*STEPS, f"exp_manager.name={name}", given)
        assert done.code == 0, done.output
        assert f"starting from {middle}, at step 2" in done.output
        assert losses(place, name) == losses(place, "whole")[2:]
        for file in place.checkpoint(4, "whole").glob("*.safetensors"):
            assert file.read_bytes() == (place.checkpoint(4, name) / file.name).read_bytes()

    # The run now has a checkpoint of its own. Another shape or a missing file is refused by name.
    more = ("trainer.max_steps=6", STEPS[1], "exp_manager.name=one")
    again = place.run(*more, "model.resume_from_checkpoint=gone")
    assert again.code == 0 and "continuing from" in again.output, again.output
    resume = f"model.resume_from_checkpoint={middle.parent.parent}"
    refused = place.run(*STEPS, "exp_manager.name=new", resume, "model.num_layers=1")
    assert refused.code == 2 and "was made with 2" in refused.output, refused.output
    assert "restore_from_path" in refused.output and "Traceback" not in refused.output
    gone = place.run(*STEPS, "exp_manager.name=newer", "model.resume_from_checkpoint=gone")
    assert gone.code == 2 and "gone: has no checkpoint" in gone.output, gone.output
    for name in ("new", "newer"):
        assert not place.dir(name).exists(), "a refused run leaves nothing"


def test_a_refused_run_leaves_no_directory_but_what_was_there(place: Place) -> None:
    gone = "model.data.data_prefix=/nowhere/at/all"
    assert place.run(*STEPS, gone, "exp_manager.name=null").code == 2
    assert not list((place.cwd / "runs").glob("*"))
    (place.dir("mine")).mkdir(parents=True)
    (place.dir("mine") / "notes.txt").write_text("keep")
    assert place.run(*STEPS, gone, "exp_manager.name=mine").code == 2
    assert [path.name for path in place.dir("mine").iterdir()] == ["notes.txt"]
    assert place.run(*STEPS).code == 0
    assert place.run(*STEPS, gone, "model.micro_batch_size=2").code == 2
    assert place.steps() == [2, 4], "what continues is left alone"


def test_garbage_is_collected_at_its_steps_only() -> None:
    seen: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            seen.append(info["collected"])

    assert gc.isenabled()
    gc.callbacks.append(count)
    try:
        with Garbage(2) as garbage:
            assert not gc.isenabled()
            began = len(seen)
            for step in range(1, 6):
                garbage.after_step(step)
            assert len(seen) - began == 2
        assert gc.isenabled()
        with Garbage(0):
            assert gc.isenabled()
    finally:
        gc.callbacks.remove(count)
