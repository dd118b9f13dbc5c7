"""A whole run with secrets in its environment: none is in its output or its directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.cli import export, import_hf
from tests.train.runs import ROOT, Place

PLANTED = "hf_pLaNtEd0123456789"
SECRETS = {name: PLANTED for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")}


@pytest.mark.parametrize("wandb", [False, True])
def test_a_run_leaves_no_secret(place: Place, wandb: bool) -> None:
    if wandb:
        pytest.importorskip("wandb", reason="wandb is not installed")
    argv = place.argv(
        f"exp_manager.create_wandb_logger={wandb}",
        "trainer.max_steps=2",
        "trainer.val_check_interval=1",
        "exp_manager.create_tensorboard_logger=True",
        "model.nsys_profile.enabled=True",
        "model.nsys_profile.start_step=1",
        "model.nsys_profile.end_step=1",
        "model.optim.sched.warmup_steps=1",
        "model.cpu_offloading=False",
    )
    script, folder = str(ROOT / "pretrain_gpt.py"), place.cwd.with_name(f"{place.cwd.name}-output")
    folder.mkdir()
    env = SECRETS | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = place.driver.run_python(script, *argv, cwd=place.cwd, folder=folder, env=env)
    output = (done.stdout + done.stderr).encode()
    assert done.returncode == 0, output.decode()
    assert PLANTED.encode() not in output
    files = [path for path in place.cwd.rglob("*") if path.is_file()]
    assert len(files) > 8 and any("tfevents" in path.name for path in files)
    assert any(path.suffix == ".wandb" for path in files) == wandb
    for path in files:
        assert PLANTED.encode() not in path.read_bytes(), path
    recorded = ("config.yaml", "console.log", "events.jsonl", "metrics.jsonl", "summary.json")
    for text in (output, *((place.dir() / name).read_bytes() for name in recorded)):
        assert b"***" not in text, "an ordinary run has nothing to hide"
    summary = place.summary()
    (inert,) = summary["inert_keys"]
    assert inert["key"] == "model.cpu_offloading" and inert["origin"] == "command line"
    assert b"inert: model.cpu_offloading=False" in output
    set_by = {entry["key"]: entry for entry in summary["non_default"]}
    assert set_by["trainer.max_steps"] == {
        "key": "trainer.max_steps", "value": 2, "origin": "command line", "default": 900
    }  # fmt: skip


MINE = f"""\
defaults: [pretrain_gpt, _self_]
env_vars: {{WANDB_API_KEY: {PLANTED[::-1]}, HF_TOKEN: {PLANTED}, wandb-api-key: planted-0123}}
exp_manager:
  dllogger_logger_kwargs: {{api-key: planted-0123, GITHUB_PAT: planted-0123, hfToken: planted-0123,
    OPENAI_KEY: planted-0123, AUTH: [planted-0123], url: "https://planted-0123@host/x?a=1"}}
name: a-${{oc.env:HF_TOKEN}}
run: {{results_dir: "${{env_vars.WANDB_API_KEY}}/x"}}
hydra: {{job: {{env_set: {{HF_TOKEN: {PLANTED}}}}}}}
"""
"""A file as NeMo's launcher has it: keys without effect hold secrets, and are accepted."""


def found_in(folder: Path) -> list[Path]:
    """Return the files below a folder that hold a planted secret, in their bytes or names."""
    return [
        path
        for path in folder.rglob("*")
        for secret in (PLANTED.encode(), PLANTED[::-1].encode(), b"planted-0123")
        if secret in str(path).encode() or (path.is_file() and secret in path.read_bytes())
    ]


@pytest.mark.parametrize("sweeps", [False, True])
def test_secrets_of_a_file_reach_no_byte_of_a_run_or_a_sweep(place: Place, sweeps: bool) -> None:
    conf = place.cwd.with_name(f"{place.cwd.name}-conf")
    conf.mkdir()
    text = MINE if not sweeps else MINE.partition("hydra:")[0]  # which a sweep refuses
    (conf / "mine.yaml").write_text(text)
    argv = place.argv("trainer.max_steps=1", "model.optim.sched.warmup_steps=0")
    argv += ["--config-dir", str(conf), "--config-name", "mine"]
    if sweeps:
        argv = [word for word in argv if not word.startswith("exp_manager.name")]
        argv += ["-m", "model.seed=1,2"]
    folder = place.cwd.with_name(f"{place.cwd.name}-output")
    folder.mkdir()
    script = str(ROOT / "pretrain_gpt.py")
    done = place.driver.run_python(script, *argv, cwd=place.cwd, folder=folder, env=SECRETS)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "env_vars" in output and "***" in output
    assert PLANTED not in output and PLANTED[::-1] not in output
    assert "planted-0123" not in output
    names = {path.name for path in place.cwd.rglob("*") if path.is_file()}
    assert {"summary.json", "events.jsonl", "report.html", "manifest.json"} <= names
    assert ("multirun.yaml" in names) == sweeps and not found_in(place.cwd)
    if not sweeps:
        exported_without_secrets(place, folder)


def exported_without_secrets(place: Place, folder: Path) -> None:
    """Export the model of a run, and check all that the command wrote and said."""
    command = ["-m", "megafp8", "export", str(place.dir())]
    for name, code in (("exported", 0), (f"a-{PLANTED}", 2)):
        words = [*command, str(place.cwd / name)]
        done = place.driver.run_python(*words, cwd=ROOT, folder=folder, env=SECRETS)
        output = done.stdout + done.stderr
        assert done.returncode == code and "Traceback" not in output, output
        assert PLANTED not in output and PLANTED[::-1] not in output
    written = {path.name for path in (place.cwd / "exported").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= written
    assert not found_in(place.cwd)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_an_export_copies_no_secret(
    file: str, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Someone may have put one into the files of a run, from which an export copies."""
    done = place.run("trainer.max_steps=1", "model.optim.sched.warmup_steps=0")
    assert done.code == 0, done.output
    path = place.dir() / file
    if file == "tokenizer_config.json":
        tree = json.loads(path.read_text()) | {"auth_token": PLANTED[::-1]}
        path.write_text(json.dumps(tree))
    else:
        path.write_text(f"a template with {PLANTED}")
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    ours = place.cwd / "exported"
    assert export.main([str(place.dir()), str(ours)]) == 2
    shown = capsys.readouterr()
    assert file in shown.err and not found_in(ours)
    assert PLANTED not in shown.out + shown.err and PLANTED[::-1] not in shown.out + shown.err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", f'{{"auth_token": "{PLANTED[::-1]}"}}'),
        ("tokenizer_config.json", f'{{"eos_token": "{PLANTED}"}}'),
        ("chat_template.jinja", f"a template with {PLANTED}"),
        ("config.json", None),
    ],
)
def test_an_import_copies_no_secret(
    file: str,
    content: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 32}
    theirs = tmp_path / "theirs"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(theirs)
    (theirs / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    if content is None:  # an unknown key of the model's description is refused by its name
        config = json.loads((theirs / file).read_text()) | {"use_auth_token": PLANTED}
        content = json.dumps(config)
    (theirs / file).write_text(content)
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    ours = tmp_path / "ours"
    code = import_hf.main([str(theirs), str(ours)])
    shown = capsys.readouterr()
    assert code == 2 and file in shown.err
    assert not found_in(ours) and PLANTED not in shown.out + shown.err
    assert import_hf.main([str(theirs), str(tmp_path / PLANTED)]) == 2
    assert PLANTED not in capsys.readouterr().err and not (tmp_path / PLANTED).exists()
