"""A folder that is neither empty nor a run's is left as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.checkpoint.step_directories import remove_leftovers
from megafp8.config.resume import full_identity
from megafp8.errors import RunError
from megafp8.runs import directory
from megafp8.runs.directory import is_locked
from megafp8.specs import RunSpec
from tests.config.helpers import run_spec as settings_of
from tests.config.helpers import the_problem
from tests.train.runs import ENVIRONMENT, ROOT


def spec_for(folder: Path) -> RunSpec:
    return settings_of(
        f'exp_manager.explicit_log_dir="{folder}"', "exp_manager.resume_if_exists=True"
    )


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Return the bytes of files, the targets of links, and None for folders, by path."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def file(name: str, text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return make


def link(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).symlink_to("elsewhere")


FOREIGN = {
    "config.yaml": file("config.yaml", "- a\n- list\n"),
    "config.yaml of another program": file("config.yaml", "model: {layers: 3}\n"),
    "metrics.jsonl": file("metrics.jsonl", '{"step": 100, "loss": 1}\n'),
    "health.jsonl": file("health.jsonl", "{}\n"),
    "events.jsonl": file("events.jsonl", "{}\n"),
    "samples.jsonl": file("samples.jsonl", "{}\n"),
    "tokenizer.json": file("tokenizer.json", "{}"),
    "tokenizer_config.json": file("tokenizer_config.json", "{}"),
    "summary.json": file("summary.json", '{"mine": 1}'),
    "report.html": file("report.html", "<p>mine"),
    "run.json": file("run.json", '{"status": "mine"}'),
    ".lock": file(".lock", "12345\n"),
    ".lock of another program": file(".lock", '{"owner": "me"}'),
    "a linked .lock": link(".lock"),
    "a linked run.json": link("run.json"),
    "restarts.json": file("restarts.json", "{}"),
    "wandb": file("wandb/settings", "mine"),
    "wandb_run_id.txt": file("wandb_run_id.txt", "abc"),
    "events.out.tfevents.1.host": file("events.out.tfevents.1.host", "x"),
    "profile_rank0.json": file("profile_rank0.json", "{}"),
    "memory_rank1.pickle": file("memory_rank1.pickle", "x"),
    "checkpoints/.trash-precious": file("checkpoints/.trash-precious/x", "mine"),
    "checkpoints/.staging-precious": file("checkpoints/.staging-precious/x", "mine"),
    "checkpoints/epoch-3.ckpt": file("checkpoints/epoch-3.ckpt", "mine"),
    "a file named checkpoints": file("checkpoints", "mine"),
    "model.safetensors": file("model.safetensors", "mine"),
    "a linked slurm-1.out": link("slurm-1.out"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_nothing_of_another_program_is_touched(tmp_path: Path, what: str) -> None:
    FOREIGN[what](tmp_path)
    before = contents(tmp_path)
    with pytest.raises(RunError, match="has no run, and other files than one: ") as raised:
        directory.enter(spec_for(tmp_path), is_sweep=False)
    name = what.split(" ")[0] if what[0] != "a" else what.split(" ")[-1]
    assert name.split("/")[0] in str(raised.value) and "new or an empty folder" in str(raised.value)
    assert contents(tmp_path) == before
    with pytest.raises(RunError, match="has no run, and other files than one: "):
        directory.check_directory(spec_for(tmp_path))


def test_output_of_others_and_empty_files_are_no_obstacle(tmp_path: Path) -> None:
    """A scheduler or a shell may have made them, and a run leaves them alone."""
    (tmp_path / "slurm-1.out").write_text("a scheduler's")
    (tmp_path / "console.log").write_text("the shell's")
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "checkpoints").mkdir()
    choice = directory.enter(spec_for(tmp_path), is_sweep=False)
    assert is_locked(tmp_path) and (tmp_path / "slurm-1.out").read_text() == "a scheduler's"
    choice.release()
    again = directory.enter(spec_for(tmp_path), is_sweep=False)
    assert again.continues
    again.release()


@pytest.mark.parametrize("kind", ["link", "fifo"])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "health.jsonl", "events.jsonl", "samples.jsonl", "console.log"]
)
def test_a_run_of_others_writes_through_no_link(tmp_path: Path, name: str, kind: str) -> None:
    """A run that goes on would add lines to the file of this user to which the link leads."""
    folder, precious = tmp_path / "run", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("mine\n")

    def put() -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(precious) if kind == "link" else os.mkfifo(folder / name)

    put()
    with pytest.raises(
        RunError, match="has no run, and other files than one: "
    ):  # it has no run yet
        directory.enter(spec_for(folder), is_sweep=False)
    (folder / name).unlink()
    directory.enter(spec_for(folder), is_sweep=False).release()
    put()
    for enters in (directory.check_directory, lambda spec: directory.enter(spec, is_sweep=False)):
        with pytest.raises(RunError, match=f"{name} is a link or no ordinary file"):
            enters(spec_for(folder))
    record = json.loads((folder / "run.json").read_text())
    with pytest.raises(RunError, match=f"{name} is a link or no ordinary file"):
        unnamed = settings_of(f'exp_manager.exp_dir="{tmp_path}"')
        (folder / "run.json").write_text(
            json.dumps(record | {"identity": full_identity(unnamed.resolved)})
        )
        directory.enter(unnamed, is_sweep=False)
    assert precious.read_text() == "mine\n"


def test_a_run_without_its_record_is_still_a_run(tmp_path: Path) -> None:
    """Its checkpoints have a state of training, as those of a model that was imported have not."""
    step_dir = tmp_path / "checkpoints" / "step_00000002"
    step_dir.mkdir(parents=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    for meta in ({"config": {}}, "no object", None):
        (step_dir / "manifest.json").write_text(json.dumps({"meta": meta}))
        with pytest.raises(RunError, match=r"other files than one: tokenizer\.json"):
            directory.check_directory(spec_for(tmp_path))
    (step_dir / "manifest.json").write_text(json.dumps({"meta": {"data_fingerprint": "x"}}))
    directory.check_directory(spec_for(tmp_path))


def test_a_process_that_died_early_does_not_block_the_folder(tmp_path: Path) -> None:
    for content in ("", '{"host": "h", "pid": 1}\n'):
        (tmp_path / ".lock").write_text(content)
        choice = directory.enter(spec_for(tmp_path), is_sweep=False)
        assert is_locked(tmp_path)
        choice.release()
        assert not is_locked(tmp_path)
        for path in tmp_path.iterdir():
            path.unlink()


def test_only_our_own_leftovers_are_deleted(tmp_path: Path) -> None:
    own = [
        ".staging-step_00000003-0123456789abcdef",
        ".trash-step_00000003-0123456789abcdef",
        ".trash-staging-step_00000003-0123456789abcdef-0123456789abcdef",
        ".trash-step_00000003.damaged-1-0123456789abcdef",
    ]
    others = [".trash-precious", ".staging-precious", ".staging-step_00000003-mine", "x"]
    for name in own + others:
        (tmp_path / name).mkdir()
    assert {path.name for path in remove_leftovers(tmp_path)} == set(own)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of torch fails
import pretrain_gpt
sys.argv = ["pretrain_gpt.py", "trainer.accelerator=cpu", "trainer.devices=2", *sys.argv[1:]]
sys.exit(pretrain_gpt.main())
"""


def test_a_foreign_folder_is_refused_before_torch_and_ranks(tmp_path: Path) -> None:
    file("config.yaml", "model: {layers: 3}\n")(tmp_path)
    words = [f"exp_manager.explicit_log_dir={tmp_path}", "model.global_batch_size=32"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "other files than one: config.yaml" in done.stderr
    assert contents(tmp_path) == {"config.yaml": b"model: {layers: 3}\n"}


@pytest.mark.parametrize("root", ["/", "//", "/../.", "/.."])
def test_the_root_is_refused_with_the_settings(root: str) -> None:
    """Also `--cfg job`, which looks at settings alone, names the key."""
    problem = the_problem(f"exp_manager.explicit_log_dir={root}")
    assert problem.key == "exp_manager.explicit_log_dir" and "root of the file" in problem.reason
    assert settings_of("exp_manager.explicit_log_dir=/x").observe.explicit_log_dir == "/x"


def test_the_root_and_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/")
    with pytest.raises(RunError, match=r"explicit_log_dir=~ is the root of the file system"):
        directory.check_directory(spec_for(Path("~")))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(RunError, match="Write the path without '~'"):
        directory.check_directory(spec_for(Path("~nobody_of_that_name/x")))
    choice = directory.enter(spec_for(Path("~/x")), is_sweep=False)
    assert choice.path == tmp_path / "home" / "x" and not (tmp_path / "~").exists()
    choice.release()
    named = settings_of('exp_manager.exp_dir="~/runs"', "exp_manager.name=a")
    choice = directory.enter(named, is_sweep=False)
    assert choice.path == tmp_path / "home" / "runs" / "a"
    choice.release()
    choice = directory.enter(settings_of('exp_manager.exp_dir="~/more"'), is_sweep=False)
    assert choice.path.parent == tmp_path / "home" / "more"
    choice.release()
    hidden = directory.enter(spec_for(tmp_path / ".hid"), is_sweep=False)
    assert hidden.path == tmp_path / ".hid"
    hidden.release()
