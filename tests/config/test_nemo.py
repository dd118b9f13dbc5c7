"""Test that every key of NeMo's GPT configuration has an effect, is inert, or is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import MISSING, DictConfig, OmegaConf

from megafp8.config import nemo
from megafp8.config.gelu import FUSION
from megafp8.config.keys import NOT_IN_NEMO
from megafp8.config.load import load, load_all
from megafp8.config.nemo import NemoKey, nemo_keys
from megafp8.config.resume import flat, identity, setting_differences
from megafp8.config.schema import all_keys
from megafp8.config.settings import is_text, known_sections
from megafp8.specs import LossScaleSpec
from tests.config.helpers import load_problems, run_spec, the_problem

LATER_KEYS = [
    "model.fp8_params",
    "model.fp8_recipe",
    "model.fp8_wgrad",
    "model.tp_only_amax_red",
    "model.first_last_layers_bf16",
    "model.num_layers_at_start_in_bf16",
    "model.num_layers_at_end_in_bf16",
]
"""Not in that version of NeMo's file."""

CANNOT_BE_HONOURED = {
    "model.data.data_prefix",
    "model.tokenizer.vocab_file",
    "model.tokenizer.merge_file",
}
"""NeMo's own defaults that are refused."""


def fixture() -> dict[str, Any]:
    """Return the keys and defaults in `nemo_keys.txt`."""
    lines = (Path(__file__).parent / "nemo_keys.txt").read_text().splitlines()
    pairs = (line.split(" = ", 1) for line in lines if not line.startswith("#"))
    return {key: json.loads(value) for key, value in pairs}


NEMO = fixture()


def nemo_yaml(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Write NeMo's file with some keys changed; return the arguments with which `load` finds it."""
    tree = OmegaConf.create({})
    for path, value in (NEMO | changes).items():
        if value is not None or path not in changes:
            OmegaConf.update(tree, path, value, force_add=True)
    assert isinstance(tree, DictConfig)
    start = "defaults:\n  - _self_\n  - optional tp_overlap@model.ub_tp_comm_overlap_cfg:\n\n"
    (tmp_path / "theirs.yaml").write_text(start + OmegaConf.to_yaml(tree))
    return {"config_dir": tmp_path, "config_name": "theirs"}


def override(key: NemoKey, value: Any) -> str:
    return f"{key.path}={json.dumps(value)}" if value != "" else f"{key.path}=''"


def default_of(key: NemoKey) -> Any:
    """Return a key's default, or a path for one that NeMo's launcher fills in."""
    return "/data" if key.nemo == MISSING else key.nemo


def another(key: NemoKey) -> Any:
    """Return a value that a key does not accept."""
    others: dict[type, list[Any]] = {
        bool: [True, False, "yes"],
        int: [7],
        float: [0.5],
        str: ["other"],
        list: [[3]],
    }
    candidates = others.get(type(key.nemo), []) + ["other"]
    candidates += ["megatron_falcon_gpt"] if is_text(key.path) else [7]  # there 7 is a text
    values = {"trainer.max_steps": 900, "trainer.precision": "bf16", "model.bias": True,
              "model.encoder_seq_length": 256, "model.init_method_std": 0.02,
              "model.hidden_size": 256, "model.num_attention_heads": 4, "model.num_layers": 4,
              "model.tensor_model_parallel_size": 1,
              "model.pipeline_model_parallel_size": 1, "model.num_moe_experts": 4}  # fmt: skip
    candidates += [[3], {"a": 1}, [["x"]]]
    return next(value for value in candidates if not key.passes(value, values))


def test_every_key_of_nemo_is_known_with_its_default() -> None:
    assert len(NEMO) == 181
    for path, default in NEMO.items():
        if path in all_keys():
            nemo = all_keys()[path].nemo
            assert nemo == default or nemo == float(default), path
            assert path not in nemo_keys()
        else:
            assert nemo_keys()[path].nemo == default, path
            assert nemo_keys()[path].in_megatron_gpt_config


def test_what_the_tables_say_of_nemo_is_true() -> None:
    in_schema = {path for path, key in all_keys().items() if key.nemo is not NOT_IN_NEMO}
    in_table = {path for path, key in nemo_keys().items() if key.in_megatron_gpt_config}
    assert in_schema | in_table == NEMO.keys()
    assert not all_keys().keys() & nemo_keys().keys()
    assert set(LATER_KEYS) <= all_keys().keys() | nemo_keys().keys()


def test_features_that_will_not_come_are_refused() -> None:
    for never in ("model.optim.name=lion", "model.optim.sched.name=StepLR",
                  "model.normalization=low_precision_layernorm", "model.fp8_recipe=custom",
                  "model.position_embedding_type=kerple"):  # fmt: skip
        problem = the_problem(never, "model.fp8=True")
        assert problem.reason == "is not supported" and problem.hint, never


def test_texts_read_well() -> None:
    for key in nemo_keys().values():
        assert key.note and not key.note.endswith("."), key.path
        assert key.hint[0].isupper() and not key.hint.endswith("."), key.path


TABLE = list(nemo_keys().values())
IDS = [key.path for key in TABLE]


@pytest.fixture(scope="module")
def inert_all() -> set[str]:
    given = [override(key, default_of(key)) for key in TABLE if "${" not in str(key.nemo)]
    loaded = load_all(given)
    assert loaded.values == load()
    return {setting.key for setting in loaded.inert}


@pytest.mark.parametrize("key", TABLE, ids=IDS)
def test_nemos_default_passes_and_is_named(key: NemoKey, inert_all: set[str]) -> None:
    if "${" in str(key.nemo):
        loaded = load_all([f"++{key.path}='{key.nemo}'"])
        assert [setting.key for setting in loaded.inert] == [key.path]
    else:
        assert key.path in inert_all


@pytest.fixture(scope="module")
def refused_all() -> dict[str, Any]:
    given = ["model.num_moe_experts=4", *(override(key, another(key)) for key in TABLE)]
    return {problem.key: problem for problem in load_problems(*given)}


@pytest.mark.parametrize("key", TABLE, ids=IDS)
def test_any_other_value_is_refused_by_name(key: NemoKey, refused_all: dict[str, Any]) -> None:
    problem = refused_all[key.path]
    text = str(problem)
    assert text.startswith(f"{key.path}={another(key)} (command line): ")
    assert key.note in text and text.endswith(key.hint)


def test_inert_keys_leave_no_trace() -> None:
    plain, loaded = run_spec(), load_all(["++model.cpu_offloading=False", "name=mine"])
    assert loaded.inert_lines() == [
        "inert: name=mine (command line): a label, which other keys can use as ${name}",
        "inert: model.cpu_offloading=False (command line): nothing is moved to the host's memory",
    ]
    assert load_all(["model.cpu_offloading=False", "model.mcore_gpt=True",
                     "model.cpu_offloading_weights=True"]).inert_lines() == [
        "inert: model.mcore_gpt=True (command line): the one implementation has Megatron Core's "
        "architecture",
        "inert: model.cpu_offloading=False, model.cpu_offloading_weights=True (command line): "
        "nothing is moved to the host's memory",
    ]  # fmt: skip
    assert run_spec("model.cpu_offloading=False").resolved == plain.resolved
    assert load_all().inert == ()


def test_keys_may_refer_to_inert_ones() -> None:
    cfg = load(["name=mine", "exp_manager.name=${name}", "model.seed=${model.hysteresis}"])
    assert cfg["exp_manager.name"] == "mine" and cfg["model.seed"] == 2


def test_a_misspelt_inert_key_is_refused() -> None:
    assert "Did you mean model.cpu_offloading" in str(the_problem("+model.cpu_ofloading=1"))
    assert the_problem("model.nsys_profile.on=True").key == "model.nsys_profile.on"
    assert the_problem("model.nsys_profile=5").reason == "is a section, not a value"


def test_of_a_list_and_a_section_for_one_key_the_later_one_counts() -> None:
    key = "exp_manager.early_stopping_callback_params"
    for given in (["[]", "{patience:2}"], ["{patience:[1]}", "{patience:{a:1}}"]):
        loaded = load_all([f"{key}={value}" for value in given])
        lines = [line.replace(" ", "").replace("'", "") for line in loaded.inert_lines()]
        assert any(given[-1] in line for line in lines)
    assert the_problem(f"{key}={{patience:2}}", f"{key}=[1]").key == key


NEEDED_SECTIONS = {
    "exp_manager", "model", "model.data", "model.optim", "model.optim.sched", "model.tokenizer",
    "trainer",
}  # fmt: skip


@pytest.mark.parametrize("section", sorted(known_sections()))
def test_null_says_that_a_section_is_not_used(section: str, tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    OmegaConf.update(whole := OmegaConf.create(tree), section, None, force_add=True)
    start = "defaults: [pretrain_gpt, _self_]\n"
    (tmp_path / "mine.yaml").write_text(start + OmegaConf.to_yaml(whole))
    given: dict[str, Any] = {"config_dir": tmp_path, "config_name": "mine"}
    if section in NEEDED_SECTIONS:
        for problem in (the_problem(f"{section}=null"), the_problem(**given)):
            assert (problem.key, problem.reason) == (section, "is a section, not a value")
            assert problem.hint.startswith("Leave it out, or set the keys in the section")
        return
    for loaded in (load_all([f"{section}=null"]), load_all(**given)):
        assert [(s.key, s.value) for s in loaded.inert] == [(section, None)]
        (line,) = loaded.inert_lines()
        assert line.startswith(f"inert: {section}=null (") and "section that is not used" in line
        assert loaded.cfg == load_all().cfg


def test_null_replaces_the_section_of_a_weaker_layer(tmp_path: Path) -> None:
    below = {"exp_manager": {"ema": {"enable": True}}, "model": {"nsys_profile": {"enabled": True}}}
    OmegaConf.save(OmegaConf.create(below), tmp_path / "below.yaml")
    text = "defaults: [pretrain_gpt, below, _self_]\nexp_manager: {ema: null}\n"
    (tmp_path / "mine.yaml").write_text(text + "model: {nsys_profile: null}\n")
    given: dict[str, Any] = {"config_dir": tmp_path, "config_name": "mine"}
    loaded = load_all(**given)
    assert loaded.cfg == load_all().cfg
    assert {s.key for s in loaded.inert} == {"exp_manager.ema", "model.nsys_profile"}
    above = load_all(["model.nsys_profile.enabled=True"], **given)
    assert above.values["model.nsys_profile.enabled"]
    assert the_problem("exp_manager.ema.enable=True", **given).key == "exp_manager.ema.enable"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.bias=False"], "model.qkv_bias=True"),
        (["model.bias=True"], "model.qkv_bias=False"),
        (["trainer.precision=32"], "model.precision=32"),
    ],
)  # fmt: skip
def test_what_follows_from_other_keys_passes(overrides: list[str], key: str) -> None:
    load([*overrides, key])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["trainer.precision=32"], "model.precision=bf16"),
    ],
)
def test_what_differs_from_other_keys_is_refused(overrides: list[str], key: str) -> None:
    assert the_problem(*overrides, key).key == key.partition("=")[0]


@pytest.mark.parametrize("false", ["0", "'false'", "''"])
def test_zero_is_not_false(false: str) -> None:
    assert the_problem(f"model.cpu_offloading={false}").key == "model.cpu_offloading"


# --- keys that are live in a way of their own ----------------------------------------------------


@pytest.mark.parametrize("name", ["fused_adam", "distributed_fused_adam"])
def test_fused_adams_are_adamw(name: str) -> None:
    fused = run_spec(f"model.optim.name={name}")
    assert fused.optim.name == name
    assert identity(fused.resolved) == identity(run_spec().resolved)
    assert setting_differences(run_spec().resolved, fused.resolved) == []


def test_exp_dir_null_is_runs() -> None:
    assert run_spec("exp_manager.exp_dir=null").observe.exp_dir == "runs"


def test_no_checkpoint_callback() -> None:
    checkpoint = run_spec("exp_manager.create_checkpoint_callback=False").checkpoint
    assert checkpoint.every_n_train_steps is None and not checkpoint.save_last
    params = "exp_manager.checkpoint_callback_params"
    problem = the_problem(
        "exp_manager.create_checkpoint_callback=False", f"{params}.every_n_train_steps=5"
    )
    assert problem.key == f"{params}.every_n_train_steps"


# --- NeMo's file as it is ------------------------------------------------------------------------


def test_nemo_yaml_gives_just_what_cannot_be_honoured(tmp_path: Path) -> None:
    where = nemo_yaml(tmp_path)
    found = load_problems(**where)
    assert {problem.key for problem in found} == CANNOT_BE_HONOURED
    assert all(problem.origin == "theirs.yaml" and problem.hint for problem in found)


def test_nemo_yaml_runs_when_these_are_decided(tmp_path: Path) -> None:
    decided = {
        "model.data.data_prefix": "builtin",
        "model.tokenizer.library": "builtin",
    }
    where = nemo_yaml(tmp_path)
    loaded = load_all([f"{key}={value}" for key, value in decided.items()], **where)
    translated = {t.setting.key for t in loaded.translated}
    assert translated == {FUSION}
    named = {setting.key for setting in loaded.inert} | translated
    assert named == NEMO.keys() - all_keys().keys()
    spec = run_spec(*[f"{key}={value}" for key, value in decided.items()], gpu=True, **where)
    assert spec.model.hidden_size == 768 and spec.optim.lr == 2e-4
    assert spec.precision.compute == "fp16" and not spec.precision.half_weights
    assert spec.precision.loss_scale == LossScaleSpec()
    assert spec.optim.name == "fused_adam" and spec.optim.schedule.warmup_steps == 500
    assert spec.optim.schedule.min_lr == 2e-5 and spec.model.layernorm_epsilon == 1e-5
    assert spec.observe.name == "megatron_gpt" and spec.observe.exp_dir == "runs"
    assert flat(spec.resolved).keys() == all_keys().keys()
    where = nemo_yaml(tmp_path, **decided, **{"model.fp8": True, "model.transformer_engine": True})
    assert run_spec(gpu=True, **where).precision.fp8 is not None


def test_problems_of_a_nemo_yaml_name_the_file(tmp_path: Path) -> None:
    where = nemo_yaml(
        tmp_path,
        **{"model.cpu_offloading": True, "model.fp8_recipe": "custom", "model.oops": 1,
           "trainer.devices": "${sum:1,${nope}}"},
    )  # fmt: skip
    problems = {problem.key: problem for problem in load_problems("trainer.max_time=-1", **where)}
    wanted = {"model.cpu_offloading", "model.fp8_recipe", "model.oops", "trainer.devices"}
    assert wanted | {"trainer.max_time"} <= problems.keys()
    assert {problems[key].origin for key in wanted} == {"theirs.yaml"}


@pytest.mark.parametrize("text", ["${sum:1,x}", "${multiply:[1],2}", "${sum:true,1}"])
def test_resolvers_take_numbers_only(text: str, tmp_path: Path) -> None:
    where = nemo_yaml(tmp_path, **{"model.num_layers": text})
    assert "model.num_layers" in {problem.key for problem in load_problems(**where)}


DPA, MHA = "model.fp8_dot_product_attention", "model.fp8_multi_head_attention"
DATA = ["model.data.data_prefix=builtin", "model.tokenizer.library=builtin"]
ON_GPU = "trainer.accelerator=gpu"


@pytest.mark.parametrize("asked", [{DPA: True}, {DPA: True, MHA: True}, {MHA: True}])
def test_attention_in_fp8_of_a_nemo_file_takes_effect_or_is_refused(
    asked: dict[str, bool], tmp_path: Path
) -> None:
    fp8 = {"model.fp8": True, "model.transformer_engine": True, "model.fp8_hybrid": True}
    where = nemo_yaml(tmp_path, **fp8 | asked)
    te = [*DATA, "model.fp8_backend=te", "model.megatron_amp_O2=True", "model.openai_gelu=True"]
    for given, way in (
        ([*DATA, ON_GPU], "model.fp8_backend=auto"),
        ([*DATA, "model.fp8_backend=native", ON_GPU], "model.fp8_backend=native"),
        ([*te, "trainer.accelerator=cpu"], "trainer.accelerator=cpu"),
    ):
        found = load_problems(*given, **where)
        assert {problem.key for problem in found} == set(asked)
        for problem in found:
            assert problem.origin == "theirs.yaml"
            if DPA in asked:
                assert problem.reason == f"has no effect with {way}"
                assert "model.fp8_backend=te on a GPU, or leave it out (False)" in problem.hint
    if DPA in asked:
        chosen = "whole" if MHA in asked else "core"
        assert run_spec(*te, ON_GPU, gpu=True, **where).precision.attention_in_fp8 == chosen
    else:
        assert the_problem(*te, ON_GPU, **where).reason == f"has no effect with {DPA}=False"
    off = [f"{key}=False" for key in asked]
    assert run_spec(*DATA, *off, gpu=True, **where).precision.attention_in_fp8 == "none"
    loaded = load_all([*DATA, "model.fp8=False"], **where)
    assert asked.keys() <= {setting.key for setting, _ in loaded.unused}


GRAPH = "model.enable_cuda_graph"


def test_graphs_of_a_nemo_file_change_nothing_unless_the_layers_are_ours_by_choice(
    tmp_path: Path,
) -> None:
    where = nemo_yaml(tmp_path, **{GRAPH: True})
    for pipeline in ([], ["trainer.devices=2", "model.pipeline_model_parallel_size=2"]):
        loaded = load_all([*DATA, *pipeline], gpu_available=lambda: True, **where)
        lines = [line for line in loaded.inert_lines() if "cuda_graph" in line]
        assert len(lines) == 1
        assert f"{GRAPH}=True" in lines[0] and "(theirs.yaml): has no effect with" in lines[0]
        spec = run_spec(*DATA, *pipeline, gpu=True, **where)
        assert not spec.train.cuda_graph
        assert spec == run_spec(*DATA, *pipeline, f"{GRAPH}=False", gpu=True, **where)
    able = ["trainer.precision=bf16", "model.hidden_dropout=0", "model.attention_dropout=0"]
    for given in ("model.fp8_backend=native", f"{GRAPH}=True"):
        assert run_spec(*DATA, *able, given, gpu=True, **where).train.cuda_graph
    on_cpu = [*DATA, "model.fp8_backend=native", "trainer.accelerator=cpu"]
    (line,) = [line for line in load_all(on_cpu, **where).inert_lines() if "cuda_graph" in line]
    assert line.endswith("has no effect with trainer.accelerator=cpu")


def test_graphs_of_a_users_own_file_are_the_users(tmp_path: Path) -> None:
    start = "defaults: [pretrain_gpt, _self_]\nmodel: {enable_cuda_graph: true}\n"
    (tmp_path / "mine.yaml").write_text(start)
    spec = run_spec(gpu=True, config_dir=tmp_path, config_name="mine")
    assert spec.train.cuda_graph


HARMLESS = {
    "exp_manager.version": None,
    "exp_manager.use_datetime_version": False,
    "exp_manager.files_to_copy": None,
    "exp_manager.create_preemption_callback": True,
    "exp_manager.create_early_stopping_callback": False,
    "exp_manager.early_stopping_callback_params": {"monitor": "val_loss", "patience": 10},
    "exp_manager.create_mlflow_logger": False,
    "exp_manager.ema": {"enable": False, "decay": 0.999},
    "exp_manager.log_tflops_per_sec_per_gpu": True,
    "exp_manager.resume_past_end": True,
    "exp_manager.max_time_per_run": None,
    "exp_manager.create_straggler_detection_callback": False,
    "exp_manager.straggler_detection_params": {"report_time_interval": 300},
    "exp_manager.checkpoint_callback_params.save_weights_only": False,
    "exp_manager.wandb_logger_kwargs.log_model": False,
    "trainer.strategy": "auto",
    "trainer.callbacks": [],
    "trainer.check_val_every_n_epoch": 1,
    "trainer.sync_batchnorm": False,
    "model.optim.store_param_remainders": True,
    "model.optim.average_grad_sync": True,
    "model.multi_latent_attention": False,
    "model.attention_backend": "auto",
}
"""Values of NeMo's exp_manager, Lightning's trainer and NeMo's optimizers that ask for nothing."""


def test_harmless_values_of_a_nemo_file_are_listed(tmp_path: Path) -> None:
    own = {"model.data.data_prefix": "/data", "model.tokenizer.vocab_file": "/v",
           "model.tokenizer.merge_file": "/m"}  # fmt: skip
    plain = load_all(**nemo_yaml(tmp_path, **own))
    loaded = load_all(**nemo_yaml(tmp_path, **own | HARMLESS))
    assert loaded.cfg == plain.cfg
    named = "\n".join(loaded.inert_lines())
    for path, value in HARMLESS.items():
        assert value is None or path in named, path


@pytest.mark.parametrize(
    ("given", "reason", "hint"),
    [
        ("trainer.callbacks=[{_target_:mine.Callback}]",
         "is not allowed, since settings must not name code to run", "Leave it out"),
        ("trainer.plugins=[mine]", "must not name code", "Leave it out"),
        ("exp_manager.version=3", "run's directory", "exp_manager.name"),
        ("exp_manager.ema.enable=true", "no moving average", "Leave it out"),
        ("exp_manager.create_early_stopping_callback=true", "trainer.max_steps", "compare"),
        ("exp_manager.max_time_per_run='00:04:00:00'", "trainer.max_time", "Use trainer.max_time"),
        ("exp_manager.create_fault_tolerance_callback=true", "max_restarts", "step_timeout"),
        ("exp_manager.wandb_logger_kwargs.offline=true", "mode says", "mode=offline"),
        ("trainer.strategy=fsdp", "the sizes under model", "model.fsdp=True"),
        ("model.optim.amsgrad=true", "no largest second moments", "Leave it out"),
        ("model.multi_latent_attention=true", "has no equivalent in megafp8", "Leave it out"),
    ],
)  # fmt: skip
def test_harmful_values_are_refused_by_name_with_the_reason(
    given: str, reason: str, hint: str
) -> None:
    problem = the_problem(given)
    assert problem.key == given.partition("=")[0]
    assert reason in problem.reason and hint in problem.hint


def test_the_table_of_inert_keys_is_valid() -> None:
    """Each key stands once, and is no key with an effect; what an entry names exists."""
    entries = [entry for part in nemo.read_table() for entry in part["entries"]]
    keys = {path for entry in entries for path in entry["keys"]}
    assert keys == nemo_keys().keys() and not keys & all_keys().keys()
    written = re.findall(r"(?m)(?:^    |\{|, )([\w.]+): ", nemo.TABLE.read_text(encoding="utf-8"))
    assert sorted(path for path in written if path in keys) == sorted(keys)
    names = {"free": nemo.FREE, "same_as": {*nemo.COMPUTED, *all_keys()}, "where": nemo.WHERE}
    for entry in entries:
        assert entry["note"] and entry.keys() <= {"keys", "accepts", "note", "why", "hint", *names}
        assert all(entry[field] in known for field, known in names.items() if field in entry), entry


def test_what_a_nemo_file_lacks_is_asked_for_without_a_word_of_the_default_job(
    tmp_path: Path,
) -> None:
    own = {"model.tokenizer.vocab_file": "/v", "model.tokenizer.merge_file": "/m"}
    problem = the_problem(**nemo_yaml(tmp_path, **own))
    assert problem.key == "model.data.data_prefix" and problem.reason == "must be given"
    assert problem.hint.startswith("Give builtin") and "defaults" not in problem.hint


def test_a_short_file_is_told_of_the_default_job(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model:\n  num_layers: 2\n")
    found = load_problems(config_dir=tmp_path, config_name="mine")
    found = [problem for problem in found if problem.reason == "must be given"]
    assert found and all("defaults: [pretrain_gpt, _self_]" in p.hint for p in found)


def test_a_file_of_nemos_fine_tuning_is_told_of_each_key_that_stands_elsewhere_here() -> None:
    """Those that docs/guide/finetuning.md names."""
    train = "max_seq_length global_batch_size micro_batch_size num_workers add_sep min_seq_length"
    keys = [
        "model.restore_from_path",
        *(f"model.data.train_ds.{name}" for name in train.split()),
        "model.data.validation_ds.label_key",
        "model.data.validation_ds.metric.name",
        "model.data.validation_ds.write_predictions_to_file",
        "model.data.test_ds.file_names",
        "model.peft.peft_scheme",
    ]
    found = load_problems(*(f"++{key}=1" for key in keys), config_name="finetune_gpt")
    assert {problem.key for problem in found} >= set(keys)
