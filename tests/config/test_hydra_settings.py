"""No YAML file names code, a file to open or a variable of the environment through Hydra."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from megafp8.cli.main import AppInfo, run_app
from megafp8.config.errors import SettingError
from megafp8.config.hydra_section import IN_A_FILE, TARGETS, file_problems
from megafp8.config.layers import find_source
from megafp8.config.load import Loaded, load
from megafp8.config.overrides import parse_overrides
from megafp8.jobs.hydra import checked_loader, composed

FOLDERS = {"hydra.sweep.dir", "hydra.sweep.subdir", "hydra.run.dir"}
"""The settings that may hold a path: folders that a sweep makes, as `exp_manager.exp_dir` is."""

HOSTILE = (
    "os.system", "hydra_plugins.megafp8_slurm._answer", "/etc/passwd", "a/b", "${oc.env:HOME}",
    "$(touch x)", "`touch x`", "x\ntouch y", "x; touch y", "a'b", 'a"b', {"_target_": "os.system"},
    {"()": "os.system"}, ["/etc/passwd"], [{"_target_": "os.system"}],
)  # fmt: skip


def leaves(path: str, node: Any) -> Iterator[str]:
    """Yield the dotted paths of all values; an empty section has an invented key."""
    if isinstance(node, dict) and node:
        for name, item in node.items():
            yield from leaves(f"{path}.{name}", item)
    elif isinstance(node, dict):
        yield f"{path}.anything"
        yield path
    else:
        yield path


def hydras_settings() -> set[str]:
    """Return every setting of Hydra itself and of each launcher and sweeper that is installed."""
    Plugins.instance()  # registers launchers and sweepers
    found = set(leaves("hydra", OmegaConf.to_container(OmegaConf.structured(HydraConf))))
    found |= {"hydra.searchpath", "hydra.job_logging.handlers.file.class", "hydra.launcher.python"}
    store: Any = ConfigStore.instance().repo["hydra"]
    for section in ("launcher", "sweeper"):
        for name in store[section]:
            if name.endswith(".yaml"):
                node = OmegaConf.to_container(store[section][name].node)
                found |= set(leaves(f"hydra.{section}", node))
    return found


def tree(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def may_name(path: str) -> list[Any]:
    """Return the hostile values that a file may give to a setting."""
    return [value for value in HOSTILE if not file_problems("", tree(path, value), "x.yaml")]


def test_no_setting_of_hydra_names_code_files_or_variables() -> None:
    found = hydras_settings()
    assert len(found) > 60 and {"hydra.job.env_set", "hydra.launcher.setup"} <= found
    found |= set(IN_A_FILE)
    words = {path for path in found if "os.system" in may_name(path)} - FOLDERS
    for path in sorted(found):
        if path in FOLDERS:
            assert not [v for v in may_name(path) if not isinstance(v, str) or "\n" in v], path
        elif path in words:  # plain words: names of partitions, of studies, of jobs
            assert {"_target_", "class", "()", "setup"}.isdisjoint(path.split(".")), path
            assert [v for v in may_name(path) if v not in HOSTILE[:2]] == [], path
        elif path == "hydra.sweeper.params":
            assert not may_name(path)
        else:
            assert not may_name(path), path
    section = {"job", "launcher", "sweeper"}
    assert {path.split(".")[1] for path in words} <= section


def test_the_classes_that_a_file_may_name_are_full_names() -> None:
    for target in TARGETS:
        assert not file_problems("hydra.launcher", {"_target_": target}, "x.yaml")
        assert file_problems("hydra.launcher", {"_target_": target + ".x"}, "x.yaml")
        for place in ("launcher.x", "sweeper.params", "sweeper.sampler.x", "job_logging", "x"):
            assert file_problems(f"hydra.{place}", {"_target_": target}, "x.yaml"), place


FILES = {
    "params": {"sweeper": {"params": {
        "_target_": "hydra_plugins.megafp8_slurm._answer", "command": ["touch", "planted"]}}},
    "target": {"launcher": {"_target_": "os.system"}},
    "nested": {"launcher": {"n_jobs": {"_target_": "os.system", "command": "touch planted"}}},
    "env_set": {"job": {"env_set": {"PYTHONPATH": "evil"}}},
    "env_set of jobs": {"sweeper": {"params": {"hydra.job.env_set.PYTHONPATH": "evil"}}},
    "added to jobs": {"sweeper": {"params": {"+hydra.job.env_set.PYTHONPATH": "evil"}}},
    "env_copy": {"job": {"env_copy": ["HOME"]}},
    "class": {"hydra_logging": {"version": 1, "root": {"handlers": ["x"]}, "handlers": {
        "x": {"class": "logging.FileHandler", "filename": "precious", "mode": "w"}}}},
    "factory": {"job_logging": {"version": 1, "root": {"handlers": ["x"]}, "handlers": {
        "x": {"()": "os.system", "command": "touch planted"}}}},
    "callbacks": {"callbacks": {"x": {"_target_": "os.system", "command": "touch planted"}}},
    "setup": {"launcher": {"setup": ["touch planted"]}},
    "searchpath": {"searchpath": ["pkg://evil"]},
    "output_subdir": {"output_subdir": "../x"},
}  # fmt: skip


def refuse(loaded: Loaded, info: AppInfo) -> int:
    raise AssertionError("the task was not to run")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["section", "package", "group"])
def test_a_sweep_refuses_a_strangers_file(
    name: str,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("precious").write_text("weights")
    start = "defaults: [pretrain_gpt, _self_]\n"
    words = ["-cd", ".", "-cn", "mine", "-m", "model.seed=1,2"]
    ((section, content),) = FILES[name].items()
    if how == "section":
        Path("mine.yaml").write_text(start + yaml.safe_dump({"hydra": FILES[name]}))
    elif how == "package":
        Path("x").mkdir()
        text = f"# @package hydra.{section}\n" + yaml.safe_dump(content)
        Path("x/evil.yaml").write_text(
            text
            if isinstance(content, dict)
            else "# @package hydra\n" + yaml.safe_dump(FILES[name])
        )
        Path("mine.yaml").write_text("defaults: [pretrain_gpt, {x: evil}, _self_]\n")
    else:
        Path("x").mkdir()
        Path("x/evil.yaml").write_text(
            "# @package _global_\n" + yaml.safe_dump({"hydra": FILES[name]})
        )
        Path("mine.yaml").write_text(start)
        words.append("+x=evil")
    before, environment = sorted(Path().rglob("*")), dict(os.environ)
    assert run_app(words, refuse) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and f"hydra.{section}" in error and ".yaml)" in error
    assert sorted(Path().rglob("*")) == before and Path("precious").read_text() == "weights"
    assert dict(os.environ) == environment


CHOICES = (
    "override hydra/job_logging: stdout", "override /hydra/job_logging: default",
    "override hydra/hydra_logging: hydra_debug", "override hydra/output: default",
    "override hydra/help: default", "hydra/job_logging@model: stdout", "hydra/job_logging/stdout",
    "optional hydra/none: x", "/hydra/launcher@trainer: basic", "hydra/own@_global_: x",
)  # fmt: skip


@pytest.mark.parametrize("item", CHOICES)
def test_the_defaults_of_a_file_choose_nothing_in_vain(
    item: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hydra/own").mkdir(parents=True)
    Path("hydra/own/x.yaml").write_text("model: {seed: 77}")
    Path("mine.yaml").write_text(f"defaults:\n- pretrain_gpt\n- {item}\n- _self_\n")
    assert run_app(["-cd", ".", "-cn", "mine", "-m", "model.seed=1,2"], refuse) == 2
    words = item.removeprefix("override ").removeprefix("optional ").removeprefix("/")
    error = capsys.readouterr().err
    assert error.startswith(f"error: {words.replace(': ', '=')} (mine.yaml): has no effect")
    assert {path.name for path in tmp_path.iterdir()} == {"hydra", "mine.yaml"}
    assert run_app(["-cd", ".", "-cn", "mine", "--cfg", "job"], refuse) == 0
    said = capsys.readouterr().out
    assert f"inert: {words.replace(': ', '=')}" in said.replace("=null", "")


@pytest.mark.parametrize(
    "item",
    ["override hydra/launcher: joblib", "override hydra/sweeper: basic",
     "override hydra/job_logging: disabled", "override hydra/hydra_logging: none",
     "override hydra/job_logging: null"],
)  # fmt: skip
def test_the_defaults_of_a_file_may_choose_what_acts(item: str, tmp_path: Path) -> None:
    text = f"defaults:\n- pretrain_gpt\n- {item}\n- _self_\n"
    (tmp_path / "mine.yaml").write_text(text)
    source = find_source(tmp_path, "mine")
    cfg = composed(source, checked_loader(source), [])
    assert ("joblib" in cfg.hydra.launcher._target_) == ("joblib" in item)


OUTSIDE = (
    "/../private/hosts@{}", "/..@{}: private/hosts", "//FOLDER/private/hosts@{}", "x@{}: linked",
    "y@{}: hosts",
)  # fmt: skip


@pytest.mark.parametrize("item", OUTSIDE)
@pytest.mark.parametrize("more", [[], ["-m", "model.seed=1,2"]])
def test_a_file_does_not_take_in_files_of_other_folders(
    item: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would copy a private file of the user into the record of a run."""
    conf, private = tmp_path / "conf", tmp_path / "private"
    for folder in (conf / "x", private):
        folder.mkdir(parents=True)
    (private / "hosts.yaml").write_text("user: me\n")
    (conf / "x/linked.yaml").symlink_to(private / "hosts.yaml")
    (conf / "y").symlink_to(private)
    text = item.format("model.ub_tp_comm_overlap_cfg").replace("FOLDER", str(tmp_path))
    (conf / "mine.yaml").write_text(f"defaults:\n- pretrain_gpt\n- {text}\n- _self_\n")
    assert run_app(["-cd", str(conf), "-cn", "mine", *more], refuse) == 2
    assert "it is outside of " in capsys.readouterr().err


def test_files_beside_the_one_that_the_command_line_names(tmp_path: Path) -> None:
    (tmp_path / "conf/x").mkdir(parents=True)
    (tmp_path / "conf/x/inside.yaml").write_text("# @package _global_\nmodel: {seed: 5}\n")
    (tmp_path / "conf/linked.yaml").symlink_to("x/inside.yaml")
    (tmp_path / "conf/x/deep.yaml").write_text("# @package _global_\ndefaults: [../linked]\n")
    (tmp_path / "near.yaml").write_text("model: {seed: 6}\n")
    for item, seed in (("linked", 5), ("x: inside", 5), ("x: deep", 5)):
        text = f"defaults:\n- pretrain_gpt\n- {item}\n- _self_\n"
        (tmp_path / "conf/mine.yaml").write_text(text)
        assert load(config_dir=tmp_path / "conf", config_name="mine")["model.seed"] == seed
    (tmp_path / "other.yaml").write_text("defaults: [/pretrain_gpt, near, _self_]\n")
    assert load(config_dir=tmp_path / "conf", config_name="../other")["model.seed"] == 6


@pytest.mark.parametrize("key", ["model.seed=1 hydra.job.env_set.X", "model.seed 2", "~model.seed"])
def test_a_key_of_a_sweeps_jobs_is_one_word(key: str) -> None:
    params = {"sweeper": {"params": {key: "1,2"}}}
    (problem,) = file_problems("hydra", params, "x.yaml")
    assert problem.key == "hydra.sweeper.params"


@pytest.mark.parametrize(
    ("word", "is_good"),
    [
        ("hydra.launcher.setup=['${name}']", False),
        ("hydra.job.env_set.X='${oc.env:${name}}'", False),
        ("hydra.job.env_set.X=${oc.env:HOME}", True),
        ("hydra.sweep.dir=multirun/${name}", True),
    ],
)
def test_what_only_the_command_line_may_say_is_no_interpolation_of_a_file(
    word: str, is_good: bool
) -> None:
    good, problems = parse_overrides([word], (), multirun=True)
    assert bool(good) is is_good and bool(problems) is not is_good
    assert is_good or "what a YAML file may say" in str(problems[0])


def test_a_sweeper_of_a_file_passes_texts_on_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def task(loaded: Loaded, info: AppInfo) -> int:
        seen.append(loaded.values["model.data.data_prefix"])
        return 0

    command = ["-m", "--config-dir", str(tmp_path), "--config-name", "job"]
    for params, code in (("'3.10,3.1,12e5'", 0), ("3.10", 2), ("true", 2), ("\"'3.10'\"", 0)):
        text = f"hydra: {{sweeper: {{params: {{model.data.data_prefix: {params}}}}}}}\n"
        (tmp_path / "job.yaml").write_text(f"defaults: [pretrain_gpt, _self_]\n{text}")
        assert run_app([*command, "model.seed=1"], task) == code
    assert seen == ["3.10", "3.1", "12e5", "3.10"]
    assert "gives model.data.data_prefix a number, or True" in capsys.readouterr().err
    assert load()["model.data.data_prefix"] == "builtin"  # Hydra has changed no file of ours


@pytest.mark.parametrize("word", ["+hydra.job.env_set.X=1", "hydra/job_logging=default"])
def test_a_job_that_a_sweeper_makes_has_no_settings_of_hydra(word: str) -> None:
    source = find_source(None, "pretrain_gpt")
    loader = checked_loader(source)
    whole = composed(source, loader, [])
    assert loader.load_sweep_config(whole, ["model.seed=1"]).model.seed == 1
    with pytest.raises(SettingError, match="cannot differ between the jobs"):
        loader.load_sweep_config(whole, ["model.seed=1", word])


def test_what_a_file_may_give_has_its_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"sweeper": {"params": {"model.seed": "1,2"}}, "sweep": {"dir": "there"}}
    text = "defaults: [pretrain_gpt, _self_]\n" + yaml.safe_dump({"hydra": given})
    Path("mine.yaml").write_text(text)
    seeds: list[int] = []

    def task(loaded: Loaded, info: AppInfo) -> int:
        seeds.append(loaded.values["model.seed"])
        return 0

    assert run_app(["-cd", ".", "-cn", "mine", "-m"], task) == 0
    assert seeds == [1, 2] and Path("there/1").is_dir()


@pytest.mark.parametrize(
    "word",
    ["hydra.job.num=5", "hydra.mode=RUN", "hydra.verbose=True", "hydra/job_logging=default",
     "hydra.job_logging.root.level=INFO", "hydra.output_subdir=x", "hydra.job.chdir=True",
     "hydra.job.env_copy=[HOME]", "hydra={}", "hydra/callbacks=x", "hydra.runtime.cwd=x"],
)  # fmt: skip
def test_the_command_line_has_no_setting_without_effect(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(["-m", "model.seed=1,2", word], refuse) == 2
    assert word.partition("=")[0] in capsys.readouterr().err and not list(tmp_path.iterdir())
