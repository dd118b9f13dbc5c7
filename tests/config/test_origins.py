"""Test layers: that the stronger one wins, that every value knows its origin, and single reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megafp8.config import checks
from megafp8.config.layers import compose_layers, find_source
from megafp8.config.load import load_all
from megafp8.config.overrides import parse_overrides
from megafp8.config.resolve import resolve
from tests.config.helpers import load_problems

MINE = (
    "defaults: [pretrain_gpt, base, {model: gpt3_125m}, _self_]\nmodel: {seed: 3, num_layers: 2}\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "base.yaml").write_text(
        "model: {seed: 2, hidden_size: 64}\ntrainer: {devices: 1}\n"
    )
    return tmp_path


def test_layers_from_the_weakest_to_the_strongest(folder: Path) -> None:
    source = find_source(folder, "mine")
    parsed, _ = parse_overrides(["precision=fp32", "model.seed=4"], source.directories)
    layers = compose_layers(source, parsed)
    assert [str(layer.origin) for layer in layers] == [
        "default", "base.yaml", "preset model=gpt3_125m", "mine.yaml", "preset precision=fp32",
        "command line",
    ]  # fmt: skip
    strengths = [layer.origin.strength for layer in layers]
    assert strengths == sorted(strengths) and len(set(strengths)) == len(strengths)
    assert [layer.origin.is_users for layer in layers] == [False, True, False, True, False, True]


def test_the_stronger_layer_wins_and_is_named(folder: Path) -> None:
    loaded = load_all(["model.seed=4"], folder, "mine")
    names = ("model.seed", "model.num_layers", "model.hidden_size")
    assert [loaded.values[name] for name in names] == [4, 2, 768]
    assert loaded.origins["model.seed"] == "command line"
    assert loaded.origins["model.num_layers"] == "mine.yaml"
    assert loaded.origins["model.hidden_size"] == "preset model=gpt3_125m"
    assert "trainer.max_steps" not in loaded.origins, "the default job's own"


def test_every_file_is_read_once_and_every_rule_runs_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_all()  # what is read once for all
    read: Counter[str] = Counter()
    original = OmegaConf.load

    def counted(file: object) -> object:
        read[str(getattr(file, "name", file))] += 1
        return original(file)  # type: ignore[arg-type]

    runs: Counter[str] = Counter()
    check_values = checks.check_values
    monkeypatch.setattr(OmegaConf, "load", counted)
    monkeypatch.setattr(
        "megafp8.config.load.check_values",
        lambda *given: runs.update(["rules"]) or check_values(*given),
    )
    monkeypatch.setattr(checks, "check_values", None)
    loaded = load_all(["precision=fp32"], folder, "mine")
    resolve(loaded.values, lambda: False)
    assert {str(folder / "mine.yaml"), str(folder / "base.yaml")} <= read.keys()
    assert set(read.values()) == {1}, read
    assert runs["rules"] == 1


def test_problems_of_all_layers_are_reported_at_once_with_their_origins(folder: Path) -> None:
    (folder / "base.yaml").write_text("model: {sed: 2, hidden_size: wide}\n")
    found = load_problems("model.fp8=maybe", config_dir=folder, config_name="mine")
    assert {(p.key, p.origin) for p in found} == {
        ("model.sed", "base.yaml"), ("model.hidden_size", "base.yaml"),
        ("model.fp8", "command line"),
    }  # fmt: skip


def test_a_users_yaml_may_choose_hydras_settings(folder: Path) -> None:
    start = "defaults: [pretrain_gpt, {override hydra/launcher: joblib}, _self_]\n"
    (folder / "sweeps.yaml").write_text(start + "hydra: {sweep: {dir: there}}\n")
    loaded = load_all([], folder, "sweeps")
    assert loaded.cfg == load_all().cfg
    inert = [(setting.key, str(setting.origin)) for setting in loaded.inert]
    assert inert == [("hydra", "sweeps.yaml"), ("hydra/launcher", "sweeps.yaml")]
