"""Texts are generated along the way of a run, and training does not notice them."""

from __future__ import annotations

import json

from tests.train.runs import Place


def test_samples_after_each_quarter_change_nothing(place: Place) -> None:
    steps = ["trainer.max_steps=100", "trainer.log_every_n_steps=10"]
    rare = ["exp_manager.checkpoint_callback_params.every_n_train_steps=null"]
    done = place.run(*steps, *rare, "trainer.val_check_interval=20")
    assert done.code == 0, done.output
    lines = (place.dir() / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["step"] for sample in samples] == [40, 60, 80, 100]
    assert len({sample["prompt"] for sample in samples}) == 1 and samples[0]["prompt"]
    assert samples[0]["text"] != samples[-1]["text"]
    assert "a sample after 40 steps, the model continues " in done.output
    without = [*steps, *rare, "trainer.limit_val_batches=0", "exp_manager.name=without"]
    done = place.run(*without)
    assert done.code == 0, done.output
    both = [[row["loss"] for row in place.metrics(name) if "loss" in row]
            for name in ("job", "without")]  # fmt: skip
    assert both[0] == both[1] and len(both[0]) == 11
    assert (place.dir() / "report.html").stat().st_size > 50_000
    events = (place.dir() / "events.jsonl").read_text().splitlines()
    assert [json.loads(e)["kind"] for e in events][0] == "start"
    assert "step 100 saved and verified" in (place.dir() / "console.log").read_text()
