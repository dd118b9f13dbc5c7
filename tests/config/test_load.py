"""Test what Hydra, the schema and the overrides make together, and how mistakes are reported."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megafp8.cli import help
from megafp8.config.base_model import why_no_checkpoint
from megafp8.config.checks import check_values
from megafp8.config.errors import SettingError
from megafp8.config.layers import default_job
from megafp8.config.load import _on_this_machine, load, load_all
from megafp8.config.merged import default_tree, default_values
from megafp8.config.overrides import parse_overrides
from megafp8.config.schema import all_keys, copied
from megafp8.config.settings import nested, read_value
from megafp8.errors import ConfigError
from scripts.configuration import differing_keys, markdown_page
from tests.config.helpers import load_problems, run_spec, the_problem

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_line_imports_no_torch() -> None:
    modules = [
        "pretrain_gpt",
        "finetune_gpt",
        "megafp8.config.resume",
        "megafp8.config.resolve",
        "megafp8.cli.main",
        "megafp8.cli.help",
        "megafp8.cli.sweep",
    ]
    imports = "; ".join(f"import {name}" for name in modules)
    code = f"import sys; {imports}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_default_job_holds_what_the_schema_leaves_open_and_no_default_again() -> None:
    assert {path for path, key in all_keys().items() if key.required} <= default_job().keys()
    again = [p for p, v in default_job().items() if all_keys()[p].is_default(v)]
    assert not again, again
    values, written = load(), help.default_values()
    assert all("${" in str(text) or values[path] == text for path, text in written.items())


def parts_of(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the nodes of a tree below a node, and the node itself."""
    yield name, node
    below = vars(node).get("_content")
    if isinstance(below, Node):  # of one of several types
        below = {"": below}
    if isinstance(below, (dict, list)):
        for key, one in below.items() if isinstance(below, dict) else enumerate(below):
            yield from parts_of(one, f"{name}.{key}")


def test_a_copied_tree_is_a_deep_copy() -> None:
    """It has the same values, types and flags at each place, and no part that changes is shared."""
    tree = default_tree()
    tree.model.data.data_prefix = [0.5, "a", 0.5, "b"]
    OmegaConf.set_struct(tree.model, False)
    copies = dict(parts_of(copied(tree)))
    originals, wanted = (dict(parts_of(each)) for each in (tree, copy.deepcopy(tree)))
    assert copies.keys() == wanted.keys() and len(copies) > 400
    for name, node in copies.items():
        assert type(node) is type(wanted[name])
        assert vars(node._metadata) == vars(wanted[name]._metadata), name
        assert vars(node).get("_val") == vars(wanted[name]).get("_val")
        parent = name.rpartition(".")[0]
        assert node._parent is (copies[parent] if name else None)
        for part in ("flags", "resolver_cache"):
            ours = getattr(node._metadata, part)
            assert ours is None or ours is not getattr(originals[name]._metadata, part)
        assert node is not originals[name] and node._metadata is not originals[name]._metadata
    copied(tree).model.hidden_size = 7
    assert tree.model.hidden_size != 7


def test_configuration_page_is_current() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert page == markdown_page(), (
        "run `python -m scripts.configuration > docs/reference/configuration.md`"
    )
    for key in differing_keys():
        assert f"| `{key.path}` |" in page


def test_every_key_is_explained() -> None:
    assert all(key.help.endswith((".", "`.")) for key in all_keys().values())


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_unknown_key_is_refused_behind_any_prefix(prefix: str) -> None:
    problem = the_problem(f"{prefix}model.fp9=True")
    assert problem.key == "model.fp9"
    assert "Did you mean model.fp8?" in str(problem)


@pytest.mark.parametrize("old", ["trainer.gpus=8", "+trainer.num_gpus=8", "gpus_per_node=8"])
def test_other_names_of_devices_are_known(old: str) -> None:
    """PyTorch Lightning's `gpus` resembles no key."""
    assert "Did you mean trainer.devices?" in str(the_problem(old))


@pytest.mark.parametrize("prefix", ["+", "++"])
def test_prefixes_of_known_keys_do_nothing(prefix: str) -> None:
    assert load([f"{prefix}model.num_layers=7"])["model.num_layers"] == 7


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("model.lr=1", "model.optim.lr"),
        ("fp8=True", "model.fp8"),
        ("model.hiden_size=64", "model.hidden_size"),
        ("trainer.precison=32", "trainer.precision"),
        ("model.optim.sched.warmup=3", "model.optim.sched.warmup_steps"),
    ],
)
def test_did_you_mean(wrong: str, meant: str) -> None:
    assert meant in the_problem(wrong).hint


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("model.fp8=maybe", "model.fp8", "'maybe' is not True or False"),
        ("model.num_layers=1.5", "model.num_layers", "1.5 is not a whole number"),
        ("model.num_layers=true", "model.num_layers", "True is not a whole number"),
        ("model.num_layers=null", "model.num_layers", "null is not a whole number"),
        ("model.optim.lr=fast", "model.optim.lr", "'fast' is not a number"),
        ("model.optim.betas=0.9", "model.optim.betas", "0.9 is not a list of numbers"),
        ("model.optim.betas=[0.9,x]", "model.optim.betas", "is not a list of numbers"),
        ("trainer.devices=auto", "trainer.devices", "'auto' is not a whole number"),
        ("trainer.precision=true", "trainer.precision", "True is not"),
        ("model.optim=5", "model.optim", "is a section"),
        ("model=null", "model", "is a section"),
        ("model.optim.lr.x=1", "model.optim.lr.x", "no such key"),
        ("model.fp8", "model.fp8", "Write model.fp8=VALUE"),
        ("nonsense", "nonsense", "not of the form KEY=VALUE"),
        ("=", "=", "without blanks around"),
        ("=True", "=True", "without blanks around"),
        ("~model.fp8", "~model.fp8", "cannot be deleted"),
        ("~model.fp8=False", "~model.fp8=False", "cannot be deleted"),
        ("exp_manager.name=]", "exp_manager.name", "cannot read it"),
        ("model.fp8=True,False", "model.fp8", "Add -m"),
        ("model.optim.betas=0.9,0.95", "model.optim.betas", "'model.optim.betas=[0.9,0.95]'"),
        (
            "model.data.splits_string=900,50,50",
            "model.data.splits_string",
            "'model.data.splits_string=\"900,50,50\"'",
        ),
        ("model.seed=range(3)", "model.seed", "Add -m"),
        ("model.num_layers=${nope}", "model.num_layers", "nope"),
        ("model.num_layers=${model.tokenizer.library}", "model.num_layers", "builtin"),
        ("model.optim.betas=${model.fp8}", "model.optim.betas", "False is not a list"),
        ("trainer.precision=${model.fp8}", "trainer.precision", "False is not"),
        ("model.num_layers=???", "model.num_layers", "must be given"),
        ("hydra.searchpath=[x]", "hydra.searchpath", "--config-dir"),
        ("model@foo=1", "model", "no such key"),
    ],
)
def test_each_mistake_names_its_key(override: str, key: str, words: str) -> None:
    problem = the_problem(override)
    assert problem.key == key
    assert words in str(problem)
    assert problem.origin in ("command line", "default") and problem.origin in str(problem)


def test_all_problems_are_reported_at_once() -> None:
    found = load_problems(
        "+model.fp9=1", "model.fp8=maybe", "nonsense", "model.optim.lr=-1",
        "model.num_attention_heads=7", "model.seed=1,2",
    )  # fmt: skip
    keys = {problem.key for problem in found}
    assert keys == {
        "model.fp9", "model.fp8", "nonsense", "model.optim.lr", "model.hidden_size", "model.seed"
    }  # fmt: skip


def test_a_bad_key_is_not_reported_again_by_rules_that_read_it() -> None:
    assert the_problem("model.hidden_size=wide", "model.num_attention_heads=7").value == "wide"
    assert (
        the_problem("model.micro_batch_size=0").reason == "must be at least 1 and at most 16777216"
    )


def test_dict_values_set_the_keys_inside() -> None:
    assert load(["model.optim={lr:0.5,sched:{min_lr:0.25}}"])["model.optim.sched.min_lr"] == 0.25
    assert the_problem("model.optim={lrr:0.5}").key == "model.optim.lrr"
    assert the_problem("model={optim.lr:0.5}").reason == "there is no such key"
    assert the_problem("model={1:0.5}").key == "model.1"


def test_own_yaml_builds_on_the_default_job(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [pretrain_gpt, _self_]\nmodel:\n  num_layers: 2\n  layernorm_epsilon: 1e-6\n"
    )
    spec = run_spec("model.seed=3", config_dir=tmp_path, config_name="mine")
    assert (spec.model.num_layers, spec.model.hidden_size, spec.train.seed) == (2, 256, 3)
    assert spec.model.layernorm_epsilon == 1e-6


def test_own_yaml_without_defaults_must_give_what_is_required(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model:\n  num_layers: 2\n")
    found = load_problems(config_dir=tmp_path, config_name="mine.yaml")
    required = {path for path, key in all_keys().items() if key.required}
    through = {"model.max_position_embeddings", "model.data.seq_length"}
    missing = {problem.key for problem in found}
    assert required - {"model.num_layers"} <= missing <= required | through
    assert "defaults: [pretrain_gpt, _self_]" in str(found[0])


def test_own_yaml_in_a_group_directory(tmp_path: Path) -> None:
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "tiny.yaml").write_text("# @package _global_\nmodel: {num_layers: 1}\n")
    assert load(["+size=tiny"], tmp_path)["model.num_layers"] == 1
    assert "size/huge" in str(the_problem("+size=huge", config_dir=tmp_path))


def test_mistakes_in_own_yaml_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [pretrain_gpt, _self_]\nname: x\nmodel: {fp9: true, num_layers: two}\n"
    )
    found = load_problems("model.seed=x", config_dir=tmp_path, config_name="mine")
    assert {problem.key for problem in found} >= {"model.fp9", "model.num_layers", "model.seed"}
    assert "(mine.yaml)" in str([p for p in found if p.key == "model.fp9"][0])


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "defaults: [nope]\n", "\t", "a: \0"])
def test_broken_yaml_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert load_problems(config_dir=tmp_path, config_name="mine")


def test_missing_files_are_named_with_those_there_are(tmp_path: Path) -> None:
    assert "pretrain_gpt" in the_problem(config_name="nope").hint
    assert the_problem(config_dir=tmp_path / "nope").key == "--config-dir"


def test_unknown_root_key_of_own_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [pretrain_gpt, _self_]\ntrainr: {devices: 2}\n")
    assert the_problem(config_dir=tmp_path, config_name="mine").key.startswith("trainr")


WRONG: tuple[object, ...] = (0, -1, 10**12, 0.5, float("nan"), "", "x", "fp8", [], [0], {}, None)


@pytest.mark.parametrize("fp8", [False, True])
def test_no_value_of_any_key_is_a_traceback(fp8: bool) -> None:
    """On a machine with a GPU and without: rules meet only values that their keys accept."""
    base, tree = {**default_values(), "model.fp8": fp8}, default_tree()
    met = 0
    for path in all_keys():
        for value in WRONG:
            OmegaConf.update(tree, path, base[path])
            try:
                OmegaConf.update(tree, path, value)
                read = read_value(tree, path)
            except (OmegaConfBaseException, ValueError, OverflowError):
                continue  # not of the key's type, which `read_values` reports
            met += 1
            with_gpu = {**base, path: read}
            without = _on_this_machine(with_gpu, lambda: False)
            for values in [with_gpu] if without == with_gpu else [with_gpu, without]:
                check_values(values)
        OmegaConf.update(tree, path, base[path])
    assert met > 5 * len(all_keys())


@pytest.mark.parametrize(
    "override",
    [
        "trainer.precision=fp8",
        "model.tensor_model_parallel_size=0",
        "model.pipeline_model_parallel_size=0",
        "model.fsdp_grad_reduce_dtype=float32",
    ],
)
def test_a_wrong_value_is_one_error_where_a_gpu_is_looked_for(override: str) -> None:
    with pytest.raises(SettingError) as caught:
        load_all([override, "model.fp8=True"], gpu_available=lambda: False)
    assert caught.value.key == override.partition("=")[0]


def test_a_short_fine_tuning_does_not_fail_at_a_warm_up_that_nobody_set() -> None:
    """It is a tenth of the run, as in pretraining, so that only errors of data are left."""
    with pytest.raises(ConfigError) as caught:  # no model and no data are named
        load_all(["trainer.max_steps=5"], None, "finetune_gpt")
    assert "warmup_steps" not in str(caught.value) and "no data is named" in str(caught.value)


def test_a_file_that_was_changed_is_read_again(tmp_path: Path) -> None:
    """What is kept of a file that was parsed belongs to its text."""
    for layers in (3, 5, 3):
        text = f"defaults: [pretrain_gpt, _self_]\nmodel: {{num_layers: {layers}}}\n"
        (tmp_path / "mine.yaml").write_text(text)
        assert load([], tmp_path, "mine")["model.num_layers"] == layers
        assert load(["model.num_layers=7"], tmp_path, "mine")["model.num_layers"] == 7


def test_a_flag_that_refers_to_a_number_is_not_on() -> None:
    problem = the_problem("model.fp8=${model.seed}")
    assert (problem.key, problem.value) == ("model.fp8", 1234) and "is not True" in problem.reason
    for text, expected in (("${model.num_layers}", True), ("${model.sequence_parallel}", False)):
        assert load([f"model.fp8={text}", "model.num_layers=1"])["model.fp8"] is expected


# ---- texts that look like numbers


LIKE_NUMBERS = (
    "12e5", "3.10", "3.1", "1_000", "0x10", "010", "08", "0o17", "5.", "-5", "+5", "1e400",
    "inf", "NaN", "true", "False", "on", "yes", "n", "2024-01-01", "1:30", "190:20:30",
)  # fmt: skip


@pytest.mark.parametrize("text", LIKE_NUMBERS)
def test_a_name_keeps_its_characters(text: str, tmp_path: Path) -> None:
    """The runs 3.10 and 3.1 shared a directory, and that of 12e5 was called 1200000.0."""
    begin = "defaults: [pretrain_gpt, _self_]\n"
    (tmp_path / "plain.yaml").write_text(f"{begin}exp_manager: {{name: {text}}}\n")
    (tmp_path / "quoted.yaml").write_text(f"{begin}exp_manager: {{name: '{text}'}}\n")
    block = f"{begin}x: &x {{name: {text}}}\nexp_manager:\n  <<: *x\n  exp_dir: {text}\n"
    (tmp_path / "merged.yaml").write_text(block.replace("x: &x", "name: &y a\nenv_vars: &x"))
    (tmp_path / "by_name.yaml").write_text(
        f"{begin}name: {text}\nexp_manager: {{name: '${{name}}'}}"
    )
    found = [load([f"exp_manager.name={text}"]), load([f"+exp_manager.name= {text} "])]
    found += [load([], tmp_path, f"{file}") for file in ("plain", "quoted", "merged", "by_name")]
    if ":" not in text:
        found.append(load([f"exp_manager={{name: {text}, resume_if_exists: true}}"]))
    assert [cfg["exp_manager.name"] for cfg in found] == [text] * len(found)
    again = tmp_path / "again.yaml"  # as a run records it
    again.write_text(yaml.safe_dump(nested(found[0])))
    assert load([], tmp_path, "again")["exp_manager.name"] == text


def test_null_is_no_text() -> None:
    assert load(["exp_manager.name=null"])["exp_manager.name"] is None
    assert load(["exp_manager.name='null'"])["exp_manager.name"] == "null"


@pytest.mark.parametrize("text", ["3.10", "12e5", "true", "007"])
def test_every_setting_that_is_a_text_keeps_its_characters(text: str, tmp_path: Path) -> None:
    texts = [path for path, key in all_keys().items() if "text" in key.type_text]
    texts = [path for path in texts if "number" not in all_keys()[path].type_text]
    assert len(texts) > 55
    for path in (*texts, "model.data.data_prefix", "model.data.train_ds.file_names"):
        is_list = all_keys()[path].type_text == "a list of texts" or path.endswith("file_names")
        given, value = (f"[{text},'a b']", [text, "a b"]) if is_list else (text, text)
        ((parsed,), problems) = parse_overrides([f"{path}={given}"], ())
        assert [s.value for s in parsed.settings] == [value] and not problems, path


def test_numbers_stay_numbers() -> None:
    cfg = load(
        [
            "model.optim.lr=3.10",
            "trainer.precision=16",
            "trainer.max_time=90",
            "model.seed=1_000",
            "exp_manager={resume_if_exists: true, name: 1_000}",
            "model.data.data_prefix=[0.30,a,0.70,2024x]",
        ]
    )
    assert (cfg["model.optim.lr"], cfg["trainer.precision"], cfg["trainer.max_time"]) == (
        3.1,
        16,
        90,
    )
    assert cfg["model.seed"] == 1000 and cfg["exp_manager.resume_if_exists"] is True
    assert cfg["exp_manager.name"] == "1_000"
    assert cfg["model.data.data_prefix"] == [0.3, "a", 0.7, "2024x"]


def test_lists_of_a_yaml_keep_their_texts(tmp_path: Path) -> None:
    tags = "wandb_logger_kwargs: {project: 3.10, tags: [3.10, 1e5, yes, 2024-01-01, 'x y']}"
    text = f"exp_manager: {{create_wandb_logger: true, {tags}}}\n"
    text += "model: {data: {data_prefix: 2024}}"
    (tmp_path / "job.yaml").write_text(f"defaults: [pretrain_gpt, _self_]\n{text}\n")
    cfg = load([], tmp_path, "job")
    kwargs = "exp_manager.wandb_logger_kwargs"
    assert cfg[f"{kwargs}.project"] == "3.10" and cfg["model.data.data_prefix"] == "2024"
    assert cfg[f"{kwargs}.tags"] == ["3.10", "1e5", "yes", "2024-01-01", "x y"]


def test_a_preset_may_be_called_by_a_number(tmp_path: Path) -> None:
    for name, seed in (("3.10", 3), ("3.1", 4), ("7", 5)):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / f"{name}.yaml").write_text(f"# @package model\nseed: {seed}\n")
        assert load([f"model={name}"], tmp_path, "pretrain_gpt")["model.seed"] == seed
    ((parsed,), problems) = parse_overrides(["model=3.10,7"], (tmp_path,), multirun=True)
    assert parsed.text == "model='3.10','7'" and not problems


def test_a_sweep_passes_texts_on_as_they_are() -> None:
    for given, passed in (
        ("model.te_version=2.10,2.1,null", "model.te_version='2.10','2.1',null"),
        ("model.te_version=choice(2.10, 2.1)", "model.te_version=choice('2.10', '2.1')"),
        ("model.data.data_prefix=2024,[1,a]", "model.data.data_prefix='2024',[1,a]"),
        ("model.optim.lr=3.10,1e-4", "model.optim.lr=3.10,1e-4"),
        ("model.data.data_prefix=range(1,3)", "model.data.data_prefix=range(1,3)"),
    ):
        ((parsed,), problems) = parse_overrides([given], (), multirun=True)
        assert parsed.text == passed and not problems


def test_jobs_share_the_tree_of_the_default_job_until_one_changes_it() -> None:
    first, other, again = load_all(), load_all(["model.seed=7"]), load_all()
    assert first.merged.tree is again.merged.tree
    assert first.merged.tree is not other.merged.tree and other.values["model.seed"] == 7
    default_tree().model.seed = 3
    first.cfg.model.seed = 4
    assert first.changed_to({"model.seed": 5}).values["model.seed"] == 5
    seeds = [job.values["model.seed"] for job in (first, again, load_all())]
    assert {*seeds, again.cfg.model.seed} == {default_values()["model.seed"]}


def test_the_name_of_a_run_is_no_folder_and_the_hint_names_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = tmp_path / "runs" / "mine" / "checkpoints" / "step_00000020" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"meta": {"config": {"model": {}}}}')
    assert why_no_checkpoint("mine")[1] == "Give the run's directory: runs/mine"
    assert "runs/other" not in why_no_checkpoint("other")[1]
