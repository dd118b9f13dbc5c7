"""Test what `model=NAME` and `precision=NAME` set, and that every pair is a valid job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megafp8.cli.job import resolved_table
from megafp8.config.layers import conf_dir
from megafp8.config.load import load, load_all
from megafp8.config.overrides import PRESET_GROUPS, preset_names
from megafp8.specs import GPTSpec
from megafp8.specs.parameters import num_active_parameters, num_parameters
from tests.config.helpers import load_problems, run_spec, the_problem
from tests.config.test_megatron_names import BRIDGES

GPT2_VOCABULARY = 50304  # 50257, padded to a multiple of 128

PARAMETERS = {
    "default": 16_102_912,
    "gpt3_125m": 125_262_336,
    "gpt3_1.3b": 1_315_819_520,
    "gpt3_2.7b": 2_651_673_600,
    "gpt3_5b": 5_047_558_144,
    "gpt3_6.7b": 6_658_596_864,
    "gpt3_13b": 12_853_626_880,
    "gpt3_175b": 174_604_836_864,
    "llama3_8b": 8_030_261_248,  # as published
    "llama3_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "mistral_7b": 7_248_023_552,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
}
"""By hand: L (12 h² + 13 h) + (V + S + 2) h, with GPT-2's vocabulary V. Those from Llama 3 on are
the counts of the published weights."""
ACTIVE = {"mixtral_8x7b": 12_879_925_248, "qwen3_30b_a3b": 3_353_032_704}
"""The parameters that a token visits, of models with experts."""
DENSE = sorted(PARAMETERS.keys() - ACTIVE)
VOCABULARIES = {"llama": 128256, "qwen3": 151936, "mistral": 32768, "mixtral": 32000}
HEADS = {
    (4096, 32): (32, 8), (4096, 36): (32, 8), (8192, 80): (64, 8), (1024, 28): (16, 8),
    (2048, 48): (32, 4),
}  # fmt: skip
"""Heads of queries and of keys by width and layers."""


def sum_of_parameters(spec: GPTSpec, vocabulary: int, *, active: bool = False) -> int:
    """Return the sum of embedding (tied), positions, layers and final norm.

    A layer has four linears with biases and two norms. Models from Llama 3 on have no positions and
    no biases, three linears in the MLP, fewer heads of keys, and perhaps norms of heads. Some have
    a router and several such MLPs, of which a token visits a few.
    """
    if spec.normalization == "rmsnorm":
        assert not spec.bias and spec.position_embedding_type == "rope"
        h, heads, groups, width = spec.hidden_size, *HEADS[spec.hidden_size, spec.num_layers], 128
        assert (spec.num_attention_heads, spec.num_kv_heads, spec.head_size) == (
            heads, groups, width,
        )  # fmt: skip
        layer = 2 * h * heads * width + 2 * h * groups * width
        if (moe := spec.moe) is None:
            layer += 3 * h * spec.ffn_hidden_size
        else:
            number = moe.top_k if active else moe.num_experts
            layer += moe.num_experts * h + number * 3 * h * moe.ffn_hidden_size
        layer += 2 * h + 2 * width * spec.qk_layernorm
        embeddings = 1 if spec.share_embeddings_and_output_weights else 2
        return embeddings * vocabulary * h + spec.num_layers * layer + h
    hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
    linears = 4 * hidden * hidden + 4 * hidden + 2 * hidden * ffn + ffn + hidden
    layers = spec.num_layers * (linears + 4 * hidden)
    return (vocabulary + spec.max_position_embeddings) * hidden + layers + 2 * hidden


def test_every_preset_of_a_model_is_counted() -> None:
    assert {*PARAMETERS, "moe_tiny"} == {*preset_names("model", [conf_dir()])}


def test_the_preset_with_experts() -> None:
    spec = replace(run_spec("model=moe_tiny").model, vocab_size=GPT2_VOCABULARY)
    width, expert = 256, 3 * 256 * 128  # no linear has a bias, and an expert has three
    whole = [
        GPT2_VOCABULARY * width + width + 4 * (4 * width**2 + 2 * width + 8 * width + n * expert)
        for n in (8, 2)
    ]
    assert [num_parameters(spec), num_active_parameters(spec)] == whole


@pytest.mark.parametrize("precision", preset_names("precision", [conf_dir()]))
def test_the_preset_with_experts_in_every_precision(precision: str) -> None:
    job = (f"precision={precision}", "model=moe_tiny", "model.num_layers=40")  # some keep many high
    if precision.startswith("fp8_lm"):
        keys = {problem.key for problem in load_problems(*job)}
        assert "model.optim.fp8_opt_level" in keys
    else:
        assert run_spec(*job).model.moe is not None


@pytest.mark.parametrize("model", PARAMETERS)
def test_model_presets(model: str) -> None:
    spec = run_spec(f"model={model}").model
    rows = next((n for name, n in VOCABULARIES.items() if model.startswith(name)), GPT2_VOCABULARY)
    assert sum_of_parameters(spec, rows) == PARAMETERS[model]
    counted = replace(spec, vocab_size=rows)
    assert num_parameters(counted) == PARAMETERS[model]
    active = sum_of_parameters(spec, rows, active=True)
    assert num_active_parameters(counted) == active == ACTIVE.get(model, PARAMETERS[model])


@pytest.mark.parametrize("model", PARAMETERS)
@pytest.mark.parametrize("precision", ["fp8_delayed_hybrid", "fp8_delayed_e4m3"])
def test_all_pairs_in_fp8(model: str, precision: str) -> None:
    spec = run_spec(f"precision={precision}", f"model={model}")
    assert spec.precision.fp8 is not None and spec.precision.compute == "bf16"
    assert spec.precision.fp8.backward_format == ("e4m3" if "e4m3" in precision else "e5m2")


@pytest.mark.parametrize("model", DENSE)
def test_fp8_lm_with_either_backend(model: str) -> None:
    ours, theirs = (run_spec(f"precision={each}", f"model={model}")
                    for each in ("fp8_lm", "fp8_lm_te"))  # fmt: skip
    storage = ours.optim.storage
    assert (storage.main_grads, storage.main_params) == ("fp8", "fp16")
    assert (storage.exp_avg, storage.exp_avg_sq) == ("fp8", "fp16")
    assert theirs.optim == ours.optim and theirs.precision.fp8 == ours.precision.fp8
    assert (ours.precision.backend, theirs.precision.backend) == ("native", "te")


def test_precision_presets_without_fp8() -> None:
    assert run_spec("precision=bf16").resolved == run_spec().resolved
    assert run_spec("precision=fp32").resolved == run_spec("trainer.precision=32").resolved
    assert sorted(set(preset_names("precision", [conf_dir()])) - set(BRIDGES)) == [
        "bf16", "fp32", "fp8_blockwise", "fp8_delayed_e4m3", "fp8_delayed_hybrid", "fp8_lm",
        "fp8_lm_te", "fp8_rowwise", "fp8_rowwise_with_gw_hp", "fp8_tensorwise", "mxfp8",
        "nvfp4",
    ]  # fmt: skip


def test_the_default_preset_is_the_default_job() -> None:
    assert load(["model=default"]) == load()


def test_overrides_win_over_presets_wherever_they_stand() -> None:
    spec = run_spec("model.num_layers=2", "model=gpt3_125m", "model.fp8=True")
    assert (spec.model.num_layers, spec.model.hidden_size) == (2, 768)
    assert spec.precision.fp8 is not None
    assert run_spec("precision=fp8_delayed_e4m3", "model.fp8=False").resolved == run_spec().resolved


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_presets_behind_any_prefix(prefix: str) -> None:
    assert load([f"{prefix}model=gpt3_125m"])["model.hidden_size"] == 768


@pytest.mark.parametrize("group", PRESET_GROUPS)
def test_an_unknown_preset_is_refused_with_those_there_are(group: str) -> None:
    problem = the_problem(f"{group}=nope")
    assert problem.key == group and preset_names(group, [conf_dir()])[0] in problem.hint
    assert the_problem(f"{group}=../model/default").key == group
    assert the_problem(f"{group}='\0'").key == group


def test_presets_do_not_hide_the_section() -> None:
    assert the_problem("model=null").reason == "is a section, not a value"
    assert the_problem("model={optim:{lr:1}}").reason == "is a section, not a value"


def test_a_preset_over_a_yaml_and_in_one(tmp_path: Path) -> None:
    start = "defaults: [pretrain_gpt, {model: gpt3_125m}, _self_]\n"
    (tmp_path / "mine.yaml").write_text(start + "model: {num_layers: 2, fp8: true}\n")
    where = {"config_dir": tmp_path, "config_name": "mine"}
    spec = run_spec(**where)
    assert (spec.model.num_layers, spec.model.hidden_size) == (2, 768)
    loaded = load_all(**where)
    assert loaded.origins["model.hidden_size"] == "preset model=gpt3_125m"
    assert loaded.origins["model.num_layers"] == "mine.yaml"
    assert run_spec("precision=bf16", **where).precision.fp8 is None


def test_own_presets(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("num_layers: 1\ncpu_offloading: true\n")
    problem = the_problem("model=mine", config_dir=tmp_path)
    assert problem.key == "model.cpu_offloading" and problem.origin == "preset model=mine"
    (tmp_path / "model" / "mine.yaml").write_text("num_layers: 1\nnonsense: 2\n")
    assert load_problems("model=mine", config_dir=tmp_path)
    (tmp_path / "model" / "mine.yaml").write_text("num_layers: 1\n")
    assert load(["model=mine"], tmp_path)["model.num_layers"] == 1
    assert load(["model=gpt3_125m"], tmp_path)["model.num_layers"] == 12


# --- the resolved table --------------------------------------------------------------------------


def test_table_of_the_default_job_is_empty() -> None:
    assert resolved_table(load_all()) == []
    assert resolved_table(load_all(["model=default", "model.seed=1234"])) == []


def test_table_says_who_said_what(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [pretrain_gpt, _self_]\nmodel: {seed: 7}\ntrainer: {precision: bf16}\n"
    )
    loaded = load_all(
        ["precision=fp8_delayed_hybrid", "model.encoder_seq_length=512", "name=x"], tmp_path, "mine"
    )
    assert resolved_table(loaded) == [
        "model.encoder_seq_length = 512 (command line; default job: 256)",
        "model.max_position_embeddings = 512 (default, from ${.encoder_seq_length}; "
        "default job: 256)",
        "model.fp8 = True (preset precision=fp8_delayed_hybrid; default job: False)",
        "model.fp8_e4m3 = False (preset precision=fp8_delayed_hybrid; default job: null)",
        "model.fp8_hybrid = True (preset precision=fp8_delayed_hybrid; default job: null)",
        "model.seed = 7 (mine.yaml; default job: 1234)",
        "model.data.seq_length = 512 (default, from ${model.encoder_seq_length}; default job: 256)",
    ]
