"""Fine-tuning takes shape, length and tokenizer from its model, and goes on when that is gone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from megafp8.cli import export, import_hf
from megafp8.config.base_model import STARTS
from megafp8.config.load import load, load_all
from megafp8.config.resolve import data_spec, resolve
from megafp8.data.tokenize import byte_tokenizer
from megafp8.errors import ConfigError, DataError
from megafp8.runs.run_data import open_data
from megafp8.runs.tokenizer import save_tokenizer
from tests.data.test_instructions import GOOD, write
from tests.train.runs import FILES, Done, Finetuning, Place
from tests.train.test_finetuning import base, tensors

TUNE = "finetune_gpt"


def taken(*argv: str) -> tuple[int, int]:
    """Return the width and the length of a sequence of a job."""
    model = load([f"{FILES}=mine.jsonl", *argv], config_name=TUNE)
    return model["model.hidden_size"], model["model.encoder_seq_length"]


@pytest.mark.parametrize("key", STARTS)
def test_each_key_that_names_a_model_gives_its_shape_and_tokenizer(
    undisturbed: tuple[Place, Done], key: str
) -> None:
    run = undisturbed[0].dir()
    for path in (run, run / "checkpoints" / "step_00000012"):
        assert taken(f"{key}={path}") == (64, 32)
        cfg = load([f"{FILES}=mine.jsonl", f"{key}={path}"], config_name=TUNE)
        for spec in (data_spec(cfg), resolve(cfg, lambda: False).data):
            assert spec.instructions is not None and spec.instructions.model == str(path)
            assert spec.instructions.train_files == ("mine.jsonl",)
    with pytest.raises(ConfigError, match=f"{re.escape(key)}=no/where: has no checkpoint"):
        taken(f"{key}=no/where")


@pytest.mark.parametrize("key", STARTS)
def test_a_path_may_be_an_interpolation(
    undisturbed: tuple[Place, Done], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = undisturbed[0].dir()
    monkeypatch.setenv("BASE_RUN", str(run))
    assert taken(f"{key}='${{oc.env:BASE_RUN}}'") == (64, 32)
    named = [f"exp_manager.explicit_log_dir={run}", f"{key}='${{exp_manager.explicit_log_dir}}'"]
    assert taken(*named) == (64, 32)
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        taken(f"{key}='${{oc.env:NO_SUCH_VARIABLE}}'")
    monkeypatch.setenv("BASE_RUN", "no/where")
    with pytest.raises(ConfigError, match=f"{re.escape(key)}=no/where: has no checkpoint"):
        taken(f"{key}='${{oc.env:BASE_RUN}}'")


def test_pretraining_keeps_its_own_shape(undisturbed: tuple[Place, Done]) -> None:
    assert load([f"restore_from_path={undisturbed[0].dir()}"])["model.hidden_size"] == 256


@pytest.mark.parametrize("defaults", ["", "defaults: [pretrain_gpt, _self_]\n"])
def test_a_file_of_the_users_is_stronger_than_the_model(
    undisturbed: tuple[Place, Done], tmp_path: Path, defaults: str
) -> None:
    """This holds too for a file that does not build on the default job."""
    whole = load([f"{FILES}=mine.jsonl", f"restore_from_path={undisturbed[0].dir()}"],
                 config_name=TUNE)  # fmt: skip
    own = resolve(whole, lambda: False).resolved
    assert isinstance(own["model"], dict)
    own["model"] |= {"num_layers": 3, "hidden_size": 64}
    del own["model"]["ffn_hidden_size"]
    (tmp_path / "mine.yaml").write_text(defaults + yaml.safe_dump(own))
    loaded = load_all([], tmp_path, "mine")
    assert loaded.values["model.num_layers"] == 3
    assert loaded.values["model.ffn_hidden_size"] == 128
    assert loaded.origins["model.ffn_hidden_size"].startswith("the model in")


def test_a_run_goes_on_when_its_base_is_gone(tuning: Finetuning) -> None:
    """A run with a checkpoint has its own shape and tokenizer, whether it has a name or not."""
    start = tuning.cwd / "base"
    shutil.copytree(tuning.data, start)
    flags = [f"restore_from_path={start}", "model.fp8=True"]
    assert tuning.run(*flags, "exp_manager.name=whole").code == 0
    for name in ("killed", "null"):
        killed = tuning.run(
            *flags, f"exp_manager.name={name}", fault=["killed_in_microbatch", 4, 1]
        )
        assert killed.code == -9, killed.output
    unnamed = next(path.name for path in (tuning.cwd / "runs").iterdir() if path.name[0] == "2")
    assert tuning.steps("killed") == tuning.steps(unnamed) == [2]
    shutil.rmtree(start)
    expected = tensors(tuning, "whole")
    for name, directory in (("killed", "killed"), ("null", unnamed)):
        done = tuning.run(*flags, f"exp_manager.name={name}")
        assert done.code == 0 and "continuing from" in done.output, done.output
        assert re.search(rf"model\.num_layers +2 +the model in runs/{directory}", done.output)
        found = tensors(tuning, directory)
        assert all(torch.equal(expected[tensor], found[tensor]) for tensor in expected)
    # A run of another name needs the weights, which are gone.
    refused = tuning.run(*flags, "exp_manager.name=new")
    assert refused.code == 2 and f"restore_from_path={start}" in refused.output, refused.output
    assert "has no checkpoint that describes its model" in refused.output


def test_a_fine_tuned_runs_whole_state_starts_another_run(tuning: Finetuning) -> None:
    done = tuning.run(base(tuning), "trainer.max_steps=4", "model.optim.sched.name=WarmupPolicy")
    assert done.code == 0, done.output
    more = tuning.run(
        f"exp_manager.resume_from_checkpoint={tuning.dir()}",
        "exp_manager.name=more",
        "model.optim.sched.name=WarmupPolicy",
    )
    assert more.code == 0 and "at step 4" in more.output, more.output
    assert tuning.steps("more")[-1] == 6


def test_a_tokenizer_in_the_working_directory_is_not_the_models(
    undisturbed: tuple[Place, Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(undisturbed[0].dir(), "runs/first")
    (tmp_path / "runs/first/tokenizer.json").unlink()
    save_tokenizer(byte_tokenizer(), tmp_path, 64)
    write(tmp_path / "mine.jsonl", *GOOD)
    for path in ("runs/first", "runs/first/checkpoints/step_00000012"):
        cfg = load([f"{FILES}=mine.jsonl", f"restore_from_path={path}"], config_name=TUNE)
        with pytest.raises(DataError, match="tokenizer: is missing"):
            open_data(data_spec(cfg), print)
    save_tokenizer(byte_tokenizer(), tmp_path / "runs/first", 64)
    for path in ("runs/first", "runs/first/checkpoints/step_00000012"):
        cfg = load([f"{FILES}=mine.jsonl", f"restore_from_path={path}"], config_name=TUNE)
        assert open_data(data_spec(cfg), print).tokenizer.digest == byte_tokenizer().digest


def test_a_killed_save_leaves_the_whole_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that continues without its base reads this file, also while the main rank writes it."""
    save_tokenizer(byte_tokenizer(), tmp_path, 64)
    before = (tmp_path / "tokenizer.json").read_bytes()

    class Half:
        """Stands for a tokenizer whose process is killed while it writes."""

        file_name, end_of_document, bos_id = "tokenizer.json", "<|endoftext|>", None

        def save(self, path: Path) -> None:
            path.write_text("{")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_tokenizer(Half(), tmp_path, 64)  # type: ignore[arg-type]
    assert (tmp_path / "tokenizer.json").read_bytes() == before


def test_an_imported_model_is_fine_tuned(
    tuning: Finetuning, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPT-2 of transformers is read; the command that import_hf prints trains on its length."""
    theirs, ours = tuning.cwd / "theirs", tuning.cwd / "ours"
    assert export.main([str(tuning.data), str(theirs)]) == 0
    assert import_hf.main([str(theirs), str(ours)]) == 0
    printed = capsys.readouterr().out
    words = printed.partition("or fine-tune it with: megafp8 finetune ")[2].split()
    assert words[:2] == [f"restore_from_path={ours}", "model.encoder_seq_length=32"]
    assert taken(words[0]) == (64, 32)
    done = tuning.run(*words[:2], "trainer.precision=32")
    assert done.code == 0, done.output
    losses = [row["loss"] for row in tuning.metrics() if "loss" in row]
    assert losses[-1] < losses[0]
