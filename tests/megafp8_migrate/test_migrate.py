"""Test that a NeMo or Accelerate file becomes one of ours and that no key is lost silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.config.errors import SettingError
from megafp8.config.gelu import FUSION, GELU
from megafp8.config.load import load_all
from megafp8.config.resume import flat
from megafp8.config.schema import all_keys
from megafp8.errors import UserError
from megafp8_migrate import main, migrate
from megafp8_migrate.megatron import is_script
from megafp8_migrate.report import Migration
from tests.backends.te.recipe_signatures import VERSIONS, recipe_classes
from tests.config.helpers import load_problems, run_spec, the_problem
from tests.config.test_nemo import CANNOT_BE_HONOURED, NEMO, nemo_yaml
from tests.config.test_nemo_launcher import launcher_yaml
from tests.foreign.fuzz import limited

TE_BLOCK = """\
mixed_precision: fp8
fp8_config:
    amax_compute_algo: max
    amax_history_len: 1024
    backend: TE
    fp8_format: HYBRID
    interval: 1
    margin: 0
    override_linear_precision: (false, false, false)
    use_autocast_during_eval: false
"""
"""As in Accelerate's documentation."""


def keys_of(lines: list[str]) -> set[str]:
    return {line.partition(":")[0].partition(" ")[0] for line in lines}


def write(tmp_path: Path, m: Migration) -> dict[str, Any]:
    (tmp_path / "new.yaml").write_text(m.text("old.yaml"))
    return {"config_dir": tmp_path, "config_name": "new"}


TOKENIZER_FILES = {"model.tokenizer.vocab_file", "model.tokenizer.merge_file"}


def decide(tmp_path: Path) -> None:
    """Remove the lines of what must be decided, as a user does after deciding."""
    tree = yaml.safe_load((tmp_path / "new.yaml").read_text())
    assert list(tree)[0] == "undecided", "what needs a decision comes first"
    tree["undecided"] = []
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))


def test_nemos_file(tmp_path: Path) -> None:
    nemo_yaml(tmp_path)
    m = migrate((tmp_path / "theirs.yaml").read_text(), "theirs.yaml")
    assert keys_of(m.undecided) == CANNOT_BE_HONOURED
    assert keys_of(m.inert) == NEMO.keys() - all_keys().keys() - {FUSION}
    assert keys_of(m.kept) == NEMO.keys() & all_keys().keys() - CANNOT_BE_HONOURED - {GELU}
    assert f"{FUSION}: True -> {GELU}=True (the tanh form of GELU)" in m.changes
    where = write(tmp_path, m)
    problems = {problem.key: problem for problem in load_problems(**where)}
    assert problems.keys() == {"undecided", "model.data.data_prefix"} | TOKENIZER_FILES
    assert problems["undecided"].reason.startswith("3 of the migrated file's settings")
    assert all(key in problems["undecided"].reason for key in CANNOT_BE_HONOURED)
    decide(tmp_path)
    decisions = ["trainer.precision=bf16", "model.data.data_prefix=builtin",
                 "model.tokenizer.library=builtin"]  # fmt: skip
    assert load_all(decisions, **where).inert == ()
    theirs = run_spec(*decisions, gpu=True, config_dir=tmp_path, config_name="theirs")
    assert run_spec(*decisions, gpu=True, **where).resolved == theirs.resolved


@pytest.mark.parametrize(
    ("fusion", "line"),
    [
        (None, f"{FUSION}: True -> {GELU}=True (the tanh form of GELU, by NeMo's default)"),
        (False, f"{FUSION}: False (NeMo's default is the tanh form of GELU)"),
    ],
)
def test_a_migrated_file_keeps_the_form_of_gelu(
    fusion: bool | None, line: str, tmp_path: Path
) -> None:
    nemo_yaml(tmp_path, **{FUSION: fusion})
    m = migrate((tmp_path / "theirs.yaml").read_text(), "theirs.yaml")
    assert line in m.changes + m.kept
    where = write(tmp_path, m)
    decide(tmp_path)
    decisions = ["model.data.data_prefix=builtin", "model.tokenizer.library=builtin"]
    theirs = run_spec(*decisions, gpu=True, config_dir=tmp_path, config_name="theirs").model
    assert run_spec(*decisions, gpu=True, **where).model == theirs
    assert theirs.activation == ("gelu" if fusion is False else "gelu-tanh")


def test_a_launchers_switch_of_the_masks_fusion_is_kept(tmp_path: Path) -> None:
    fusion = "model.get_attention_mask_from_fusion"
    launcher_yaml(tmp_path, **{"model.data.reset_attention_mask": True, fusion: False})
    m = migrate((tmp_path / "5b.yaml").read_text(), "5b.yaml")
    assert m.out["model"]["get_attention_mask_from_fusion"] is False


def test_mock_data_become_random_tokens(tmp_path: Path) -> None:
    """A migrated file has the data that a run of NeMo's file as it is has."""
    for prefix in (["/a"], [], None):
        nemo_yaml(tmp_path, **{"model.data.data_impl": "mock", "model.data.data_prefix": prefix})
        m = migrate((tmp_path / "theirs.yaml").read_text(), "theirs.yaml")
        assert "model.data.data_impl: mock -> model.data.data_prefix=mock" in m.renamed
        assert m.out["model"]["data"]["data_prefix"] == "mock"
        assert not [line for line in m.undecided if line.startswith("model.data")]
        dropped = [line for line in m.inert if line.startswith("model.data.data_prefix:")]
        assert dropped or prefix is None, "nemo_yaml leaves out a key without a value"


def test_the_format_that_nemo_does_not_take_is_dropped(tmp_path: Path) -> None:
    both = {"model.fp8": True, "model.fp8_e4m3": True, "model.fp8_hybrid": True}
    nemo_yaml(tmp_path, **both)
    m = migrate((tmp_path / "theirs.yaml").read_text(), "theirs.yaml")
    assert [line for line in m.inert if line.startswith("model.fp8_hybrid: True: model.fp8_e4m3")]
    assert "fp8_hybrid" not in m.out["model"] and m.out["model"]["fp8_e4m3"] is True


def test_what_refers_to_an_inert_key_keeps_it(tmp_path: Path) -> None:
    m = migrate(
        "defaults: [pretrain_gpt, _self_]\nname: mine\nexp_manager: {name: '${name}'}\n", "x.yaml"
    )
    assert load_all(**write(tmp_path, m)).values["exp_manager.name"] == "mine"


def test_unknown_keys_and_missing_ones_must_be_decided() -> None:
    m = migrate("model: {fp9: true, num_layers: two, optim: {lr: '1e-3'}}\nhydra: {x: 1}\n", "x")
    assert {"model.fp9", "model.num_layers", "trainer.max_steps"} <= keys_of(m.undecided)
    assert m.out["model"] == {"optim": {"lr": 1e-3}}, "what is refused is not in the new file"
    assert "Did you mean model.fp8?" in m.report()


def test_accelerates_documented_block(tmp_path: Path) -> None:
    m = migrate(TE_BLOCK, "old.yaml")
    assert m.undecided == []
    spec = run_spec(**write(tmp_path, m))
    validates_high = "model.use_autocast_during_eval=False"
    assert spec.resolved == run_spec("model.fp8=True", validates_high).resolved


@pytest.mark.parametrize("flags", ["(true, false, true)", "[True, False, True]"])
def test_accelerates_overridden_products(flags: str, tmp_path: Path) -> None:
    m = migrate(TE_BLOCK.replace("(false, false, false)", flags), "old.yaml")
    recipe = run_spec(**write(tmp_path, m)).precision.fp8
    assert recipe is not None
    assert recipe.high_precision_gemms == {"output", "grad_weight"}


def test_what_transformer_engine_ignored_is_said_to_change_the_numbers() -> None:
    """Its classes from 2.0 on drop both arguments; at their defaults nothing changes."""
    report = migrate(TE_BLOCK, "old.yaml").report()
    assert "numbers change" not in report
    assert "on a GPU Transformer Engine where it can run the job" in report
    text = TE_BLOCK.replace("interval: 1", "interval: 4")
    lines = migrate(text.replace("(false, false, false)", "(false, false, true)"), "o.yaml").changes
    said = {line.partition(":")[0]: line for line in lines if "the numbers change if" in line}
    assert set(said) == {"fp8_config.interval", "fp8_config.override_linear_precision"}
    assert "model.fp8_interval=1" in said["fp8_config.interval"]
    assert "all three products in FP8" in said["fp8_config.override_linear_precision"]


@pytest.mark.parametrize(
    ("line", "key"), [("fp8_interval: 4", "fp8_interval"), ("fp8_wgrad: false", "fp8_wgrad")]
)
def test_what_transformer_engine_ignored_in_nemo_is_said_too(line: str, key: str) -> None:
    text = f"trainer:\n  max_steps: 9\nmodel:\n  fp8: true\n  fp8_hybrid: true\n  {line}\n"
    (said,) = [c for c in migrate(text, "nemo.yaml").changes if "the numbers change if" in c]
    assert said.startswith(f"model.{key}: ")


def test_its_recipe_classes_have_neither_argument() -> None:
    """The note holds for every version whose signatures are kept here."""
    for version in VERSIONS:
        fields = vars(recipe_classes(version).DelayedScaling)["__dataclass_fields__"]
        assert "margin" in fields and not {"interval", "override_linear_precision"} & set(fields)


def test_accelerates_own_defaults_are_written_out(tmp_path: Path) -> None:
    m = migrate("mixed_precision: fp8\nnum_processes: 2\nuse_cpu: false\n", "old.yaml")
    spec = run_spec(**write(tmp_path, m))
    assert spec.precision.fp8 is not None and spec.parallel.devices_per_node == 2
    assert spec.precision.fp8.amax_compute_algo == "max", "most_recent is not passed on"
    assert "most_recent" not in m.report()


def test_accelerates_recipe_is_kept(tmp_path: Path) -> None:
    text = TE_BLOCK.replace("HYBRID", "E4M3").replace("margin: 0", "margin: 1")
    text = (
        text.replace("interval: 1", "interval: 4")
        .replace("1024", "16")
        .replace(": max", ": most_recent")
    )
    m = migrate(text, "old.yaml")
    assert "model.fp8_amax_history_len: 16: it has no effect with" in m.report()
    assert "so that Transformer Engine used its default, max" in m.report()
    recipe = run_spec(**write(tmp_path, m)).precision.fp8
    assert recipe is not None
    assert (recipe.backward_format, recipe.margin) == ("e4m3", 1)
    assert recipe.interval == 4
    assert not recipe.fp8_in_evaluation, "Accelerate's default"
    assert recipe.amax_compute_algo == "most_recent"


QUESTIONNAIRE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
fp8_config:
  amax_compute_algorithm: max
  amax_history_length: 16
  backend: TE
  fp8_format: HYBRID
  interval: 1
  margin: 0
  override_linear_precision:
  - false
  - false
  - true
  use_autocast_during_eval: true
fsdp_config: {}
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: fp8
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""As `accelerate config` of accelerate 1.15 writes it; the names are of its `cluster.py`."""


def test_what_accelerates_questionnaire_writes(tmp_path: Path) -> None:
    m = migrate(QUESTIONNAIRE, "old.yaml")
    assert m.undecided == []
    recipe = run_spec(**write(tmp_path, m)).precision.fp8
    assert recipe is not None and recipe.fp8_in_evaluation
    assert (recipe.amax_history_len, recipe.amax_compute_algo) == (16, "max")
    assert recipe.high_precision_gemms == {"grad_weight"}
    report = m.report()
    assert "fp8_config.amax_history_length: 16 -> model.fp8_amax_history_len=16" in report
    assert "what Accelerate runs without it" not in report
    assert "launcher does not read it" in report


@pytest.mark.parametrize("prefix", ["", "fp8_"])
def test_every_spelling_of_the_history(prefix: str) -> None:
    for length, algorithm in [
        ("amax_history_len", "amax_compute_algo"),
        ("amax_history_length", "amax_compute_algorithm"),
    ]:
        block = {f"{prefix}{length}": 7, f"{prefix}{algorithm}": "max", f"{prefix}margin": 2}
        m = migrate(yaml.safe_dump({"mixed_precision": "fp8", "fp8_config": block}), "x")
        assert not m.undecided
        model = m.out["model"]
        assert (model["fp8_amax_history_len"], model["fp8_amax_compute_algo"]) == (7, "max")
        assert model["fp8_margin"] == 2


def test_a_value_that_stands_for_none_must_be_decided() -> None:
    m = migrate("mixed_precision: fp8\nfp8_config: {interval: '???', margin: 2}\n", "a.yaml")
    assert keys_of(m.undecided) == {"model.fp8_interval"}
    assert m.out["model"]["fp8_margin"] == 2 and "fp8_interval" not in m.out["model"]


def test_two_spellings_that_disagree_must_be_decided() -> None:
    m = migrate(TE_BLOCK + "    amax_history_length: 16\n", "x")
    assert keys_of(m.undecided) == {"fp8_config.amax_history_length"}
    assert not migrate(TE_BLOCK + "    amax_history_length: 1024\n", "x").undecided


@pytest.mark.parametrize("backend", ["TE", "AO", "MSAMP"])
def test_no_key_of_the_block_goes_unnamed(backend: str) -> None:
    block = {
        "backend": backend, "fp8_format": "HYBRID", "margin": 1, "opt_level": "O1", "fp8_new": 1,
        "optimization_level": "O1", "amax_histories": 3, "pad_inner_dim": False,
        "enable_fsdp_float8_all_gather": False,
    }  # fmt: skip
    m = migrate(yaml.safe_dump({"mixed_precision": "fp8", "fp8_config": block}), "x")
    named = keys_of([*m.undecided, *m.translated, *m.inert])
    assert {f"fp8_config.{key}" for key in block} - {"fp8_config.optimization_level"} <= named
    assert {"fp8_config.amax_histories", "fp8_config.fp8_new"} <= keys_of(m.undecided)


def test_torchaos_gathering_is_about_fsdp() -> None:
    text = (
        "mixed_precision: fp8\ndistributed_type: {}\n"
        "fp8_config: {{backend: AO, enable_fsdp_float8_all_gather: {}}}\n"
    )
    for kind, value, gathers in [
        ("MULTI_GPU", "true", False),
        ("FSDP", "true", True),
        ("FSDP", "false", False),
    ]:
        m = migrate(text.format(kind, value), "x")
        model = m.out["model"]
        assert model.get("enable_fsdp_float8_all_gather", False) is gathers
        assert model.get("fsdp", False) is (kind == "FSDP")
        key = "fp8_config.enable_fsdp_float8_all_gather"
        assert (key in keys_of(m.changes), key in keys_of(m.inert)) == (gathers, not gathers)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("interval: 1", "interval: 0", "model.fp8_interval"),
        ("HYBRID", "E5M2", "fp8_config.fp8_format"),
        ("(false, false, false)", "yes please", "fp8_config.override_linear_precision"),
        ("1024", "0", "model.fp8_amax_history_len"),
        (": max", ": min", "model.fp8_amax_compute_algo"),
        ("margin: 0", "magrin: 0", "fp8_config.magrin"),
        ("margin: 0", "use_mxfp8_block_scaling: true", "fp8_config.use_mxfp8_block_scaling"),
        ("mixed_precision: fp8", "mixed_precision: int8", "mixed_precision"),
    ],
)
def test_what_accelerate_asks_and_cannot_be_had(old: str, new: str, key: str) -> None:
    assert old in TE_BLOCK
    assert keys_of(migrate(TE_BLOCK.replace(old, new), "x").undecided) == {key}


@pytest.mark.parametrize(
    ("line", "level"), [("opt_level: O1", "O1"), ("optimization_level: O2", "O2"), ("x: 1", "O2")]
)
def test_ms_amps_level_is_kept(line: str, level: str, tmp_path: Path) -> None:
    m = migrate(f"mixed_precision: fp8\nfp8_config:\n  backend: MSAMP\n  {line}\n", "x")
    assert m.out["model"]["optim"]["fp8_opt_level"] == level
    assert keys_of(m.undecided) == ({"fp8_config.x"} if line == "x: 1" else set())
    if not m.undecided:
        resolved = flat(run_spec(**write(tmp_path, m)).resolved)
        assert resolved["model.optim.fp8_opt_level"] == level


def test_a_level_that_ms_amp_does_not_have_must_be_decided() -> None:
    m = migrate("mixed_precision: fp8\nfp8_config: {backend: MSAMP, opt_level: O3}\n", "x")
    assert keys_of(m.undecided) == {"fp8_config.opt_level"}


def test_torchao_is_a_backend(tmp_path: Path) -> None:
    start = "use_cpu: true\nmixed_precision: fp8\nfp8_config:\n  backend: AO\n"
    m = migrate(start + "  pad_inner_dim: true\n  margin: 1\n", "x")
    assert not m.undecided
    assert keys_of(m.inert) == {"fp8_config.margin", "fp8_config.pad_inner_dim"}
    assert "give model.pad_inner_dim=True to a model that has such sizes" in " ".join(m.inert)
    spec = run_spec(**write(tmp_path, m))
    assert spec.precision.backend == "torchao" and spec.precision.fp8 is not None
    assert spec.precision.fp8.name == "tensorwise"
    sharded = migrate(start + "  enable_fsdp_float8_all_gather: true\nnum_processes: 2\n", "x")
    assert not sharded.undecided
    fsdp = run_spec(**write(tmp_path, sharded)).parallel.fsdp
    assert fsdp is not None and fsdp.torchao_in_fp8


def test_keys_of_other_backends_are_inert_under_te() -> None:
    m = migrate(TE_BLOCK + "    opt_level: O1\n    pad_inner_dim: true\n", "x")
    assert {"fp8_config.opt_level", "fp8_config.pad_inner_dim"} <= keys_of(m.inert)


@pytest.mark.parametrize(
    ("name", "value"), [("bf16", "bf16"), ("fp16", 16), ("no", 32), ("'no'", 32)]
)
def test_mixed_precision_without_fp8(name: str, value: object, tmp_path: Path) -> None:
    m = migrate(f"mixed_precision: {name}\nfp8_config: {{margin: 3}}\n", "x")
    assert keys_of(m.inert) == {"fp8_config.margin"}
    spec = run_spec(**write(tmp_path, m))
    assert spec.precision.fp8 is None and m.out["trainer"]["precision"] == value


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "acc.yaml"
    file.write_text(TE_BLOCK)
    assert main([str(file)]) == 0
    assert "must be decided: nothing" in capsys.readouterr().out
    made = tmp_path / "acc.megafp8.yaml"
    first = made.read_text()
    run_spec(config_dir=tmp_path, config_name="acc.megafp8")
    assert main([str(file)]) == 2 and made.read_text() == first
    assert "exists already" in capsys.readouterr().err
    assert main([str(file), "-o", str(tmp_path / "b.yaml")]) == 0
    assert yaml.safe_load((tmp_path / "b.yaml").read_text()) == yaml.safe_load(first)
    assert main([str(tmp_path / "none.yaml")]) == 2
    assert main([str(file), "-o", str(tmp_path / "no" / "b.yaml")]) == 2
    assert file.read_text() == TE_BLOCK


def test_a_file_with_open_decisions_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "acc.yaml"
    file.write_text(TE_BLOCK.replace("margin: 0", "magrin: 0"))
    assert main([str(file)]) == 2
    out = capsys.readouterr().out
    assert out.startswith("must be decided: 1\n  fp8_config.magrin: 0")
    assert "megafp8 pretrain" not in out and "A run refuses the file" in out
    problem = the_problem(config_dir=tmp_path, config_name="acc.megafp8")
    assert problem.key == "undecided" and "fp8_config.magrin" in problem.reason


def test_only_a_file_that_loads_is_said_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What only a load of the whole file finds is added to what must be decided."""
    file = tmp_path / "wide.yaml"
    file.write_text("defaults: [pretrain_gpt, _self_]\nmodel: {num_attention_heads: 7}\n")
    assert main([str(file)]) == 2
    assert "model.num_attention_heads" in capsys.readouterr().out.splitlines()[1]
    assert "undecided" in (tmp_path / "wide.megafp8.yaml").read_text()


def test_the_launchers_paths_must_be_decided(tmp_path: Path) -> None:
    launcher_yaml(tmp_path)
    m = migrate((tmp_path / "5b.yaml").read_text(), "5b.yaml")
    assert keys_of(m.undecided) == {"base_results_dir"}
    assert "model.optim.name: mcore_distributed_optim -> model.optim.name" in m.report()
    where = write(tmp_path, m)
    decide(tmp_path)
    paths = ["data_dir=/data", "base_results_dir=/results"]
    theirs = run_spec(*paths, gpu=True, config_dir=tmp_path, config_name="5b")
    assert run_spec(*paths, gpu=True, **where).resolved == theirs.resolved


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [", "!!python/object:os.system {}", "x"])
def test_what_is_no_configuration(text: str) -> None:
    with pytest.raises(SettingError):
        migrate(text, "x.yaml")


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6))
NAMES = st.sampled_from(
    ["model", "trainer", "optim", "fp8", "num_layers", "fp8_config", "backend", "mixed_precision",
     "margin", "lr", "data", "nsys_profile", "enabled", "override_linear_precision", "${x}", "a.b"]
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.dictionaries(NAMES, inner, max_size=4), st.lists(inner)),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.dictionaries(NAMES, TREES, max_size=4))
def test_any_tree_ends_in_a_file_or_a_user_error(tree: dict[str, Any]) -> None:
    try:
        m = migrate(yaml.safe_dump(tree), "x.yaml")
    except UserError:
        return
    assert isinstance(yaml.safe_load(m.text("x.yaml")), dict)


@pytest.mark.parametrize("letters", ["x", "x.py ", "(", "\\\n", "--", " "])
def test_a_long_line_is_told_from_a_script_in_one_pass(letters: str) -> None:
    with limited():
        assert not is_script("a", f"name: {letters * (300_000 // len(letters))}\n")


@pytest.mark.parametrize(
    "text",
    [
        "python pretrain_gpt.py --num-layers 2\n",
        "torchrun train.py $A \\\n  --num-layers 2\n",
        "ARGS=(\n  --num-layers 2\n)\n",
        "x=1 # a note\nARGS=( --num-layers 2)\n",
        "\n#!/bin/sh\n",
    ],
)
def test_what_a_script_looks_like(text: str) -> None:
    assert is_script("a", text)
    assert not is_script("a", "\n".join(f"# {line}" for line in text.splitlines()))


AUTOMODEL = """
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained}
fp8: {enabled: true, recipe_name: rowwise, filter_fqns: [lm_head]}
"""


@pytest.mark.parametrize(
    ("text", "source", "framework"),
    [
        (AUTOMODEL, "a.yaml", "NeMo Automodel"),
        ("model: {name: x}\nfp8: {enabled: true}", "a.yaml", "NeMo Automodel"),
        ("base_model: x/y\nadapter: lora\nsequence_len: 8", "a.yml", "Axolotl"),
        ("model_name_or_path: x\nstage: sft\nfp8: true", "a.yaml", "LLaMA-Factory"),
        ("model: x\ntrain_type: full", "a.yaml", "ms-swift"),
        ("actor_rollout_ref: {model: {path: x}}", "a.yaml", "verl"),
        ("[job]\ndump_folder = './x'", "llama.toml", "torchtitan"),
    ],
)
def test_a_file_of_a_neighbour_is_one_line(text: str, source: str, framework: str) -> None:
    with pytest.raises(SettingError) as caught:
        migrate(text, source)
    said = str(caught.value)
    assert said.startswith(f"{source}: is a file of {framework}, which is not translated")
    assert "\n" not in said
    if text == AUTOMODEL:
        assert "model.fp8=True model.fp8_recipe=rowwise" in said


@pytest.mark.parametrize("arguments", ["[]", "{a: 1}", "null", "3", "[[1]]", "[a, b]", "[{b: 1}]"])
def test_arguments_of_another_form_are_no_traceback(arguments: str) -> None:
    text = "model: {_target_: megatron.bridge.models.GPTProvider, num_layers: 2}\n"
    migrate(f"{text}logger:\n  x: {{_target_: y, _args_: {arguments}}}\n", "a.yaml").report()
