"""The list of files that the check of foreign folders reads is the list that runs write."""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatchcase
from pathlib import Path

from megafp8.runs.ownership import WRITTEN
from tests.train.runs import Place

NOT_HERE = {
    "memory_rank*.pickle": "only a GPU writes it, when its memory runs out",
    "tokenizer": "the data's tokenizer came with no other files",
    "tokenizer.model": "the kind of another dataset",
    "tokenizer.tiktoken.json": "the kind of another dataset",
}


def test_all_that_runs_write_is_listed(place: Place) -> None:
    more = [
        "exp_manager.create_tensorboard_logger=True",
        "model.nsys_profile.enabled=True",
        "model.nsys_profile.start_step=1",
        "model.nsys_profile.end_step=1",
        "trainer.max_steps=2",
        "trainer.max_restarts=1",
    ]
    absent = dict(NOT_HERE)
    environment = {}
    if importlib.util.find_spec("wandb") is not None:
        more += ["exp_manager.create_wandb_logger=True"]
        more += ["exp_manager.wandb_logger_kwargs.project=x"]
        environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    else:
        absent |= {"wandb": "not installed", "wandb_run_id.txt": "not installed"}
    done = place.run(*more, fault=["environment", environment])
    assert done.code == 0, done.output
    names = {path.name for path in place.dir().iterdir()}
    unlisted = {n for n in names if not any(fnmatchcase(n, pattern) for pattern in WRITTEN)}
    assert not unlisted, "add them to WRITTEN of runs/ownership.py"
    missing = {p for p in WRITTEN if not any(fnmatchcase(name, p) for name in names)}
    assert missing == set(absent), "a name in WRITTEN that no run writes"


def test_a_folder_of_another_program_keeps_its_files(place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.yaml").write_text("- mine\n")
    (folder / "tokenizer.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = place.run(f"exp_manager.explicit_log_dir={folder}", "exp_manager.name=null")
    assert done.code == 2 and "overwrite: config.yaml, tokenizer.json" in done.output, done.output
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
