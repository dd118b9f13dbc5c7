"""Test which form of GELU a NeMo file asks for, and that no run changes its form silently."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from megafp8.config.gelu import FUSION, GELU
from megafp8.config.load import load_all
from megafp8.config.resume import check_continues, setting_differences
from megafp8.errors import ConfigError
from tests.config.helpers import run_spec, the_problem
from tests.config.test_nemo import nemo_yaml

DATA = ["model.data.data_prefix=builtin", "model.tokenizer.library=builtin"]
TE_LAYERS = "megatron_gpt_full_te_layer_autocast"


def activation(where: dict[str, Any], *overrides: str) -> str:
    return run_spec(*DATA, *overrides, gpu=True, **where).model.activation


# What NeMo computes with these settings: `ParallelMLP` and Megatron Core's MLP fuse, for which GELU
# is written with tanh; `openai_gelu` is a function of its own, also with tanh.
@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "gelu-tanh"),
        ({FUSION: None}, "gelu-tanh"),
        ({FUSION: None, GELU: None}, "gelu-tanh"),
        ({FUSION: None, "model.activation": "geglu"}, "geglu-tanh"),
        ({FUSION: None, "model.activation": "fast-swiglu"}, "swiglu"),
        ({FUSION: None, "model.bias": False}, "gelu"),
        ({FUSION: False}, "gelu"),
        ({FUSION: False, GELU: True}, "gelu-tanh"),
        ({FUSION: True, GELU: True}, "gelu-tanh"),
        ({FUSION: True, "model.activation": "fast-geglu"}, "geglu-tanh"),
        ({FUSION: True, "model.activation": "geglu", "model.bias": False}, "geglu-tanh"),
        ({FUSION: False, "model.activation": "geglu"}, "geglu"),
        ({FUSION: True, "model.activation": "fast-swiglu"}, "swiglu"),
        ({FUSION: True, "model.activation": "squared-relu"}, "squared-relu"),
        ({FUSION: False, "model.bias": False}, "gelu"),
        ({FUSION: False, "model.name": TE_LAYERS}, "gelu-tanh"),
        ({FUSION: False, "model.mcore_gpt": False, "model.transformer_engine": True}, "gelu-tanh"),
        ({FUSION: False, "model.mcore_gpt": True, "model.transformer_engine": True}, "gelu"),
    ],
)
def test_a_nemo_file_means_what_nemo_computes(
    changes: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    assert activation(nemo_yaml(tmp_path, **changes)) == wanted


def test_a_stronger_layer_decides(tmp_path: Path) -> None:
    where = nemo_yaml(tmp_path)
    assert activation(where, f"{GELU}=False") == "gelu"
    assert activation(where, f"{FUSION}=False") == "gelu"
    assert activation(where, f"{GELU}=False", f"{FUSION}=True") == "gelu-tanh"
    assert activation(where, "model.activation=swiglu") == "swiglu"


def test_the_start_names_what_was_translated(tmp_path: Path) -> None:
    where = nemo_yaml(tmp_path)
    lines = load_all(DATA, **where).inert_lines()
    (line,) = [line for line in lines if FUSION in line]
    assert line == (f"translated: {FUSION}=True (theirs.yaml): {GELU}=True, the tanh form of GELU")
    for exact in (f"{GELU}=False", f"{FUSION}=False"):
        (line,) = [n for n in load_all([*DATA, exact], **where).inert_lines() if FUSION in n]
        assert line.startswith("inert: ") and line.endswith(f"which here {GELU} asks for")


def test_a_file_of_nemo_has_nemos_default_for_a_fusion_that_it_leaves_out(tmp_path: Path) -> None:
    """NeMo's model reads the key with the default True."""
    where = nemo_yaml(tmp_path, **{FUSION: None})
    (line,) = [line for line in load_all(DATA, **where).inert_lines() if FUSION in line]
    assert line == (
        f"translated: {FUSION}=True (NeMo's default, as theirs.yaml leaves the key out): "
        f"{GELU}=True, the tanh form of GELU"
    )
    for exact in (f"{GELU}=False", f"{FUSION}=False"):
        assert activation(where, exact) == "gelu"


def test_a_file_with_none_of_nemos_own_keys_means_what_it_says(tmp_path: Path) -> None:
    """The settings that a run records are such a file."""
    cfg = load_all([f"{GELU}=False"]).cfg
    (tmp_path / "recorded.yaml").write_text(OmegaConf.to_yaml(cfg))
    assert activation({"config_dir": tmp_path, "config_name": "recorded"}) == "gelu"


def test_what_nemo_refuses_is_refused(tmp_path: Path) -> None:
    """There, fused GELU without a bias is an error."""
    problem = the_problem(*DATA, **nemo_yaml(tmp_path, **{"model.bias": False}))
    assert problem.key == FUSION and "model.bias=False" in problem.reason
    assert f"{FUSION}=False" in problem.hint and f"{GELU}=True" in problem.hint
    where = nemo_yaml(tmp_path, **{"model.bias": False})
    assert activation(where, f"{FUSION}=False") == "gelu"
    assert activation(where, f"{FUSION}=False", f"{GELU}=True") == "gelu-tanh"


def test_our_own_files_are_as_they_were(tmp_path: Path) -> None:
    assert run_spec().model.activation == "gelu-tanh"
    assert run_spec(f"{GELU}=False").model.activation == "gelu"
    tree = {"defaults": ["pretrain_gpt", "_self_"], "model": {"openai_gelu": False}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    mine: dict[str, Any] = {"config_dir": tmp_path, "config_name": "mine"}
    assert run_spec(**mine).model.activation == "gelu"
    assert run_spec(f"{FUSION}=True", **mine).model.activation == "gelu-tanh"


def test_a_run_of_the_exact_form_never_goes_on_with_the_other(tmp_path: Path) -> None:
    """Before NeMo's fusion was read, its files trained the exact form; the tree was this one."""
    where = nemo_yaml(tmp_path)
    old = run_spec(*DATA, f"{GELU}=False", gpu=True, **where).resolved
    new = run_spec(*DATA, gpu=True, **where).resolved
    with pytest.raises(ConfigError, match=f"Give {GELU}=False to continue it"):
        check_continues(old, new, run="runs/a")
    assert [d.key for d in setting_differences(old, new)] == [GELU]


def test_query_key_layer_scaling_acts_in_fp16_alone(tmp_path: Path) -> None:
    """NeMo sets it to False elsewhere, with a warning."""
    scaling = "model.apply_query_key_layer_scaling"
    where = nemo_yaml(tmp_path, **{scaling: True})
    for precision, acts in (("bf16", False), ("32", False), ("16", True), ("16-mixed", True)):
        given = [*DATA, f"trainer.precision={precision}"]
        spec = run_spec(*given, gpu=True, **where)
        assert spec.model.apply_query_key_layer_scaling == acts
        lines = [n for n in load_all(given, **where).inert_lines() if scaling in n]
        assert (lines == []) == acts
        if not acts:
            assert f"has no effect with trainer.precision={precision}" in lines[0]
    problem = the_problem(f"{scaling}=True", "trainer.precision=bf16")
    assert problem.key == scaling and "trainer.precision=16" in problem.hint


def test_a_run_that_had_layer_scaling_in_bf16_continues() -> None:
    """Only the rounding changes, so it does without."""
    new = run_spec("trainer.precision=bf16").resolved
    old: Any = copy.deepcopy(new)
    old["model"]["apply_query_key_layer_scaling"] = True
    check_continues(old, new, run="runs/a")
