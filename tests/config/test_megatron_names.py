"""Test that every FP8 and FP4 name of Megatron-core and Megatron Bridge is known here."""

from __future__ import annotations

import ast
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from megafp8.config.layers import conf_dir
from megafp8.config.load import load_all
from megafp8.config.megatron_flags import megatron_flags
from megafp8.config.megatron_names import REFUSED_PRESETS
from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import preset_names
from megafp8.config.schema import all_keys
from megafp8.specs import Fp8Recipe
from tests.config.helpers import load_problems, run_spec, the_problem

TABLE: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "megatron_precision_names.yaml").read_text()
)
NAMES_OF_CLASSES = {
    "TransformerConfig": "megatron/core/transformer/transformer_config.py",
    "DistributedDataParallelConfig": (
        "megatron/core/distributed/distributed_data_parallel_config.py"
    ),
    "MixedPrecisionConfig": "megatron/bridge/training/mixed_precision.py",
}
"""Where the classes of the table are."""
ROWS = [(name, row) for part in TABLE.values() for name, row in part.items() if row != "same"]

BRIDGES = {
    # name: dtype, recipe, format of gradients, weights in FP8, layers in BF16 at start and end
    "bf16_mixed": ("bf16", None),
    "fp16_mixed": ("fp16", None),
    "bf16_with_fp8_delayed_scaling_mixed": ("bf16", "delayed", "e5m2", True, 0, 0),
    "fp16_with_fp8_delayed_scaling_mixed": ("fp16", "delayed", "e5m2", True, 0, 0),
    "bf16_with_fp8_current_scaling_mixed": ("bf16", "tensorwise", "e5m2", True, 1, 1),
    "fp16_with_fp8_current_scaling_mixed": ("fp16", "tensorwise", "e5m2", True, 1, 1),
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": ("bf16", "tensorwise", "e5m2", True, 2, 2),
    "bf16_with_mxfp8_mixed": ("bf16", "mxfp8", "e4m3", False, 0, 0),
    "fp16_with_mxfp8_mixed": ("fp16", "mxfp8", "e4m3", False, 0, 0),
    "bf16_with_nvfp4_mixed": ("bf16", "nvfp4", "e4m3", False, 0, 0),
    "nemotron_3_super_bf16_with_nvfp4_mixed": ("bf16", "nvfp4", "e4m3", False, 0, 14),
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": ("bf16", "nvfp4", "e4m3", False, 0, 16),
}  # fmt: skip
"""Bridge 0.6.2, which also keeps weights of MXFP8 and NVFP4 in low precision."""


def fp8(*overrides: str, **where: Any) -> Fp8Recipe:
    found = run_spec(*overrides, **where).precision.fp8
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_every_name_does_what_the_table_says(name: str, row: dict[str, Any]) -> None:
    (kind,) = {"live", "inert", "refused"} & row.keys()
    section = f"model.{row['section']}" if "section" in row else "model"
    setting = f"{section}.{name}={row[kind]}"
    beside = [*row.get("with", ()), "model.num_layers=8"]
    beside += [] if name in ("fp4", "fp8") else ["model.fp8=True"]
    if kind == "refused":
        problem = the_problem(setting, *beside)
        assert problem.key == f"{section}.{name}" and row["hint"] in problem.hint and problem.reason
        return
    gpu = bool(row.get("gpu"))
    if section == "model.optim":
        beside += ["model.optim.name=distributed_fused_adam", "trainer.devices=2"]
    is_equal = run_spec(setting, *beside, gpu=gpu) == run_spec(*beside, gpu=gpu)
    assert is_equal is (kind == "inert")
    if kind == "inert":
        assert any(f"inert: {section}.{name}=" in x for x in load_all([setting]).inert_lines())


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES_OF_CLASSES)
def test_the_table_has_every_name_of_the_published_classes(kind: str) -> None:
    """Their files are parsed and not imported."""
    wheels = os.environ.get("MEGAFP8_AUDIT_WHEELS", "")
    if not wheels:
        pytest.skip("MEGAFP8_AUDIT_WHEELS names no folder of wheels (docs/evidence/audit.md)")
    path = NAMES_OF_CLASSES[kind]
    for wheel in Path(wheels).glob("megatron_*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if path in archive.namelist():
                tree = ast.parse(archive.read(path))
    names = {
        field.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == kind
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    found = {
        name for name in names if re.search(r"fp8|fp4|_in_bf16|layers_bf16|kitchen|amax", name)
    }
    assert found and found <= TABLE[kind].keys()


@pytest.mark.parametrize("name", ["hybrid", "e4m3"])
def test_megatrons_format_is_switch_and_format(name: str, tmp_path: Path) -> None:
    ours = f"model.fp8_{name}=True"
    others = ["model.fp8_hybrid=False"] if name == "e4m3" else ["model.fp8_e4m3=False"]
    assert fp8(f"model.fp8={name}") == fp8("model.fp8=True", ours, *others)
    assert fp8("precision=fp8_delayed_e4m3", f"model.fp8={name}").backward_format == (
        "e5m2" if name == "hybrid" else "e4m3"
    )
    start = f"defaults: [pretrain_gpt, _self_]\nmodel: {{fp8: {name}}}\n"
    (tmp_path / "mine.yaml").write_text(start)
    where = {"config_dir": tmp_path, "config_name": "mine"}
    assert fp8(**where) == fp8(f"model.fp8={name}")
    assert run_spec("model.fp8=False", **where).precision.fp8 is None
    lines = load_all(**where).inert_lines()
    assert f"translated: model.fp8={name} (mine.yaml): model.fp8=True" in lines


def test_null_is_no_fp8() -> None:
    assert run_spec("precision=fp8_tensorwise", "model.fp8=null").precision.fp8 is None
    assert "hybrid or e4m3" in the_problem("model.fp8=HYBRID").hint
    assert the_problem("model.fp8={a:1}").key == "model.fp8"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.fp8=hybrid", "model.fp8_e4m3=True"], "model.fp8_e4m3"),
        (["model.fp8=hybrid", "model.fp8_hybrid=False"], "model.fp8_hybrid"),
        (["model.fp8=e4m3", "model.fp8_hybrid=True"], "model.fp8_hybrid"),
        (["model.fp8_e4m3=False", "model.fp8=e4m3"], "model.fp8_e4m3"),
        (["model.fp8=e4m3", "model.fp4=e2m1"], "model.fp4"),
        (["model.fp8=True", "model.fp8_params=False", "model.fp8_param=True"], "model.fp8_param"),
        (["model.fp8=hybrid", "model.fp8_recipe=mxfp8"], "model.fp8_hybrid"),
        (["model.fp8=hybrid", "model.fp8_recipe=custom"], "model.fp8_recipe"),
        (["model.fp4_recipe=custom"], "model.fp4_recipe"),
        (["model.fp4_param_gather=True"], "model.fp4_param_gather"),
        (["model.fp8_param=yes"], "model.fp8_param"),
    ],
)
def test_contradictions_and_what_cannot_be_are_refused(overrides: list[str], key: str) -> None:
    assert [problem.key for problem in load_problems(*overrides)] == [key]


@pytest.mark.parametrize("overrides", [
    ["model.fp8=hybrid", "model.fp8_hybrid=True"], ["model.fp8=e4m3", "model.fp8_e4m3=True"],
    ["model.fp8=e4m3", "model.fp8_recipe=mxfp8"], ["model.fp8=True", "model.fp8_e4m3=True"],
])  # fmt: skip
def test_what_says_the_same_twice_is_accepted(overrides: list[str]) -> None:
    assert load_all(overrides).values["model.fp8"] is True


def test_the_two_names_of_weights_in_fp8() -> None:
    for name in ("fp8_param", "fp8_param_gather"):
        assert fp8("model.fp8=True", f"model.{name}=True").params_in_fp8
        assert not fp8("precision=bf16_with_fp8_delayed_scaling_mixed",
                       f"model.{name}=False").params_in_fp8  # fmt: skip


def test_the_two_names_of_nesterovs_step() -> None:
    for value in (True, False):
        spec = run_spec("model.optim.name=muon", f"model.optim.muon_nesterov={value}")
        assert spec.optim.muon.nesterov is value
    ours, theirs = "model.optim.muon_use_nesterov=False", "model.optim.muon_nesterov"
    assert the_problem("model.optim.name=muon", ours, f"{theirs}=True").key == theirs


def test_all_of_bridges_precisions_are_known() -> None:
    there = set(preset_names("precision", [conf_dir()]))
    assert BRIDGES.keys() <= there and not REFUSED_PRESETS.keys() & there
    assert {name for name in there if name.endswith("_mixed")} == BRIDGES.keys()
    for name in REFUSED_PRESETS:
        problem = the_problem(f"precision={name}")
        assert "E5M2" in problem.reason and "precision=fp8_blockwise" in problem.hint


@pytest.mark.parametrize("name", BRIDGES)
def test_bridges_precisions_mean_what_bridge_means(name: str) -> None:
    compute, recipe, *rest = BRIDGES[name]
    spec = run_spec(f"precision={name}", "model.num_layers=20").precision
    assert spec.compute == compute
    if recipe is None:
        assert spec.fp8 is None
        return
    gradients, params, start, end = rest
    assert spec.fp8 is not None
    assert (spec.fp8.name, spec.fp8.backward_format) == (recipe, gradients)
    assert spec.fp8.params_in_fp8 is params
    high = [n for n in range(20) if spec.fp8.precision_of(f"layers.{n}.mlp.fc1") != recipe]
    assert high == [*range(start), *range(20 - end, 20)]
    if recipe == "delayed":
        assert (spec.fp8.amax_history_len, spec.fp8.amax_compute_algo) == (1024, "max")


def test_patterns_name_any_recipe() -> None:
    """`te_precision_config_file` has its counterpart in `fp8_modules`."""
    assert "model.fp8_modules" in the_problem("model.te_precision_config_file=a.yaml").hint
    rules = 'model.fp8_modules=["layers.0.*:high_precision","*.fc2:mxfp8","*.fc1:delayed"]'
    found = fp8("model.fp8=True", "model.fp8_recipe=tensorwise", rules)
    linears = ("0.mlp.fc2", "1.mlp.fc2", "1.mlp.fc1", "1.attention.qkv")
    recipes = [found.precision_of(f"layers.{name}") for name in linears]
    assert recipes == ["high_precision", "mxfp8", "delayed", "tensorwise"]


@pytest.mark.parametrize(
    ("key", "reason", "hint"),
    [
        ("recompute_method", "is a name of Megatron's for model.act", "Give model.activations"),
        ("untie_embeddings_and_output_weights", "for the opposite of model.share_emb", "Give"),
        ("swiglu", "for what model.activation says here", "--help model.activation explains"),
        ("no_load_rng", "without an equivalent here; a run does not start", "Leave it out"),
        ("log_params_norm", "without an effect here; metrics.jsonl", "Leave it out"),
        ("dsa_indexer_topk", "without an effect here; it belongs to a feature", "Leave it out"),
        ("mtp_num_layers", "has no equivalent in megafp8; heads are predicted", "Leave it out"),
        ("multi_latent_attention", "attention has keys and values of each head", "Leave it out"),
        ("gated_linear_unit", "there is no such key", "Did you mean model.activation?"),
        ("moe_router_topkk", "there is no such key", "Did you mean model.moe_router_topk?"),
        ("seeds", "there is no such key", "Did you mean model.seed?"),
    ],
)
def test_a_name_of_megatrons_that_is_no_key_is_said_to_be_one(
    key: str, reason: str, hint: str
) -> None:
    problem = the_problem(f"model.{key}=1")
    assert reason in problem.reason and hint in problem.hint, str(problem)


def test_what_several_names_of_megatrons_say_has_a_key_here() -> None:
    flags = megatron_flags()
    assert set(flags.together.values()) <= {*all_keys(), *nemo_keys()}
    for name in (*flags.passed, *flags.together):
        reason, tip = flags.in_our_words(name) or ("", "")
        assert reason.startswith("is a name of Megatron's") and tip, name
