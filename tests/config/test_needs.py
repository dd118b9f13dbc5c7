"""Test the rule for keys without effect: an error, or a line at the start, by who set the key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megafp8.config.checks import check_values
from megafp8.config.errors import CombinedConfigError, SettingError
from megafp8.config.load import Loaded, load, load_all
from megafp8.config.resume import setting_differences
from megafp8.config.rules import effective, unmet_need
from megafp8.config.schema import all_keys
from megafp8.plan.memory import all_ranks
from megafp8.plan.pipeline import planned_orders
from megafp8.plan.traffic import rank_traffic
from tests.config.helpers import load_problems, problems, run_spec, the_problem

VALUES: dict[str, Any] = {
    "model.optim.muon_momentum": 0.5,
    "model.optim.muon_scale_mode": "unit_rms_norm",
    "model.optim.muon_tp_mode": "blockwise",
    "model.optim.sched.wsd_decay_ratio": 0.5,
    "model.optim.sched.wsd_decay_style": "linear",
    "exp_manager.exp_dir": "elsewhere",
    "exp_manager.name": "elsewhere",
    "exp_manager.checkpoint_callback_params.train_time_interval": 90,
    "exp_manager.checkpoint_callback_params.monitor": "reduced_train_loss",
    "exp_manager.checkpoint_callback_params.mode": "max",
    "exp_manager.wandb_logger_kwargs.project": "elsewhere",
    "exp_manager.wandb_logger_kwargs.mode": "offline",
    "model.nsys_profile.ranks": [0, 0],
    "model.pipeline_schedule": "GPipe",
    "model.pipeline_model_parallel_layout": "2,2",
    "model.activations_checkpoint_method": "block",
    "model.fsdp_sharding_strategy": "grad",
    "model.fsdp_grad_reduce_dtype": "bf16",
    "model.fp8_amax_compute_algo": "most_recent",
    "model.fp8_recipe": "rowwise",
    "model.override_linear_precision": [True, False, False],
    "model.fp8_split_accumulator": [True, True, True],
    "model.fp8_modules": ["*.fc2:delayed"],
    "model.precision_schedule": [{"from": 0.5, "recipe": "high_precision"}],
    "model.fp8_health": "full",
    "model.fp8_accuracy_check": "warn",
    "model.tokenizer.type": "gpt2",
    "model.tokenizer.model": "m",
    "model.tokenizer.vocab_file": "v",
    "model.tokenizer.merge_file": "m",
    "trainer.gradient_clip_algorithm": "value",
    "model.rotary_percentage": 0.5,
    "model.window_attn_skip_freq": 2,
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_load_balancing_type": "seq_aux_loss",
    "model.optim.fp8_opt_level": "O2",
    "model.optim.grad_sync_dtype": "bf16",
    "model.optim.low_precision_moments_of": "linears",
    "model.optim.main_grads_sum_dtype": "fp32",
    "model.optim.fp8_grad_reduction": "auto",
    "model.optim.data_parallel_sharding_strategy": "optim_grads",
    "model.optim.shard_by": "elements",
    "model.optim.sched.constant_ratio": 0.5,
    "model.optim.sched.hold_ratio": 0.5,
    "model.data.index_mapping_dir": "elsewhere",
    "model.data.splits_string": "800,100,100",
    "model.data.dataloader_type": "cyclic",
    "model.data.train_ds.concat_sampling_probabilities": [1.0],
    "model.data.train_ds.truncation_method": "left",
    "model.data.validation_ds.file_names": ["held_out.jsonl"],
}
"""A value for each key that needs another, where twice the default or its opposite is none."""
OFF = {
    "exp_manager.checkpoint_callback_params.save_top_k": -1,
    "trainer.gradient_clip_val": 0,
    "exp_manager.explicit_log_dir": "here",
    "exp_manager.create_checkpoint_callback": False,
    "model.fsdp": True,
    "model.activation": "swiglu",
    "trainer.precision": 32,
    "model.position_embedding_type": "alibi",
    "model.megatron_amp_O2": False,
    "model.optim.sched.name": "WarmupHoldPolicy",
    "model.data.train_ds.file_names": ["mine.jsonl"],
    "trainer.accelerator": "cpu",
    "model.optim.weight_decay": 0.0,
    "model.data.data_prefix": "mock",
}
"""What switches off the keys that have an effect in the default job."""
BESIDE = {
    "model.transformer_engine": {"trainer.accelerator": "cpu"},
    "model.tokenizer.vocab_size": {"model.data.data_prefix": "/data/mine"},
}
"""Settings beside which a key has no effect, where its need holds in the default job."""
DEPENDENT = [path for path, key in all_keys().items() if key.needs is not None]


def another(path: str) -> Any:
    default = all_keys()[path].default
    if path in VALUES:
        return VALUES[path]
    if isinstance(default, bool):
        return not default
    return 2 * default if default else 2


def without_its_need(path: str) -> dict[str, Any]:
    """Return the default job's values with `path` changed and without what `path` needs."""
    values = load()
    values |= BESIDE.get(path, {})
    need = all_keys()[path].needs
    assert need is not None
    if unmet_need(path, values) is None:
        values[need.key] = OFF[need.key]
    return values | {path: another(path)}


@pytest.mark.parametrize("path", DEPENDENT)
def test_a_key_without_what_it_needs_is_refused_by_name_and_else_at_its_default(path: str) -> None:
    values = without_its_need(path)
    need = unmet_need(path, values)
    assert need is not None and effective(values)[path] == all_keys()[path].default
    (problem,) = [problem for problem in check_values(values) if problem.key == path]
    assert problem.reason.startswith(f"has no effect with {need.key}=")
    assert problem.hint == need.hint


def test_needs_are_keys_and_end() -> None:
    for path in DEPENDENT:
        seen, key = [path], all_keys()[path]
        while key.needs is not None:
            key = all_keys()[key.needs.key]
            assert key.path not in seen
            seen.append(key.path)


def test_the_outermost_need_is_named() -> None:
    assert the_problem("model.tp_only_amax_red=True").hint.startswith("Set model.fp8=True")
    recipe = ["model.fp8=True", "model.fp8_recipe=rowwise"]
    problem = the_problem(*recipe, "model.tp_only_amax_red=True")
    assert problem.reason == "has no effect with model.fp8_recipe=rowwise"
    off = the_problem(
        "trainer.devices=2",
        "model.fp8=True",
        "model.reduce_amax=False",
        "model.tp_only_amax_red=True",
    )
    assert off.reason == "has no effect with model.reduce_amax=False"


FP8 = ["model.fp8=True"]
LAYOUTS = {
    "one rank": [],
    "2 replicas": ["trainer.devices=2"],
    "2 tensor-parallel ranks": ["trainer.devices=2", "model.tensor_model_parallel_size=2"],
    "2 context-parallel ranks": ["trainer.devices=2", "model.context_parallel_size=2"],
    "2 stages": ["trainer.devices=2", "model.pipeline_model_parallel_size=2"],
    "2 sharded replicas": ["trainer.devices=2", "model.fsdp=True"],
}
COUNTS = {
    "model.reduce_amax=False": (FP8, {"2 replicas", "2 tensor-parallel ranks",
                                      "2 context-parallel ranks", "2 sharded replicas"}),
    "model.tp_only_amax_red=True": (FP8, {"2 replicas", "2 sharded replicas"}),
    "model.optim.grad_sync_dtype=bf16": ([], {"2 replicas", "2 context-parallel ranks"}),
    "model.grad_allreduce_chunk_size_mb=7": ([], {"2 replicas", "2 context-parallel ranks"}),
    "model.transformer_engine=False": (["trainer.accelerator=cpu"], set()),
    "model.fp8_amax_history_len=7": ([*FP8, "model.fp8_amax_compute_algo=most_recent"], set()),
    "exp_manager.wandb_logger_kwargs.project=p": ([], set()),
    "exp_manager.wandb_logger_kwargs.name=n": ([], set()),
}  # fmt: skip
"""For a setting: the job beside it, and the layouts in which the setting changes something."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setting", COUNTS)
def test_a_layout_decides_whether_a_setting_counts(setting: str, layout: str) -> None:
    job, counts = COUNTS[setting]
    path = setting.partition("=")[0]
    given = [*LAYOUTS[layout], *job, setting]
    if layout in counts:
        values = load([word for word in given if word != setting])
        assert unmet_need(path, values) is None
        return
    found = {problem.key: problem for problem in load_problems(*given)}
    assert path in found and found[path].reason.startswith("has no effect with ")


NO_TE = "model.transformer_engine=False"


def loaded_on(*given: str, gpu: bool, **where: Any) -> Loaded:
    folder, name = where.get("config_dir"), where.get("config_name", "pretrain_gpt")
    return load_all(given, folder, name, lambda: gpu)


def test_a_layer_definition_is_of_no_effect_on_a_cpu_without_fp8(tmp_path: Path) -> None:
    """On a GPU the key decides which backend runs; `auto` is the device of the machine."""
    for given in ([NO_TE], [NO_TE, "trainer.accelerator=cpu"]):
        (problem,) = problems(lambda given=given: loaded_on(*given, gpu=False))
        assert problem.key == "model.transformer_engine"
        assert problem.reason == "has no effect with model.fp8=False"
    assert loaded_on(NO_TE, gpu=True).unused == ()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("transformer_engine: false\n")
    assert loaded_on("model=mine", gpu=True, config_dir=tmp_path).unused == ()
    loaded = loaded_on("model=mine", gpu=False, config_dir=tmp_path)
    ((setting, _),) = loaded.unused
    assert setting.key == "model.transformer_engine" and setting.origin == "preset model=mine"
    assert loaded.values["trainer.accelerator"] == "auto", (
        "what was asked for stays in the settings"
    )
    assert run_spec("model=mine", config_dir=tmp_path).resolved == run_spec().resolved


def test_a_run_of_a_gpu_with_that_key_continues_on_a_cpu() -> None:
    """The key chooses which backend runs, and no number, so the resolved values may differ."""
    on_gpu, on_cpu = (run_spec(NO_TE, gpu=gpu).resolved for gpu in (True, False))
    assert on_gpu != on_cpu and setting_differences(on_gpu, on_cpu) == []


def test_the_device_is_looked_for_only_if_a_key_depends_on_it() -> None:
    def never() -> bool:
        raise AssertionError("no key depends on the device")

    load_all(["model.fp8=True", "trainer.max_steps=3"], gpu_available=never)
    load_all(["model.fp8=True", "trainer.accelerator=cpu"], gpu_available=never)


# --- in every layout a value that is accepted changes what ranks send, hold or run ---------------

SIZES = (
    "trainer.max_steps=3", "model.num_layers=8", "model.hidden_size=256",
    "model.ffn_hidden_size=1024", "model.micro_batch_size=1", "model.global_batch_size=16",
    "trainer.accelerator=cpu",
)  # fmt: skip
KINDS = {"BF16": [], "FP8": FP8}
VALUES_IN_LAYOUTS = {
    "model.pipeline_model_parallel_layout": "3,5",
    "model.grad_allreduce_chunk_size_mb": 7,
}


def planned(given: Sequence[str]) -> object:
    """Return what ranks send, hold and run in a step, and in which order, from the plan."""
    spec = run_spec(*SIZES, *given)
    spec = replace(spec, model=replace(spec.model, vocab_size=4096))
    parallel, ranks = spec.parallel, range(spec.parallel.pp)
    count = spec.train.num_microbatches(parallel.dp)
    gradients = 4 * max(memory.num_params for memory in all_ranks(spec))
    replicas, fsdp = parallel.dp * parallel.cp, parallel.fsdp
    return (
        [rank_traffic(spec, rank) for rank in ranks],
        all_ranks(spec),
        planned_orders(parallel.pipeline, parallel.pp, count),
        -(-gradients // parallel.grad_bucket_bytes) if replicas > 1 and fsdp is None else 0,
    )


def refused(given: Sequence[str], path: str) -> bool:
    """Whether the settings are refused, with an error that names the key."""
    try:
        load([*SIZES, *given])
    except (SettingError, CombinedConfigError) as error:
        assert path in str(error)
        return True
    return False


def keys_of_layouts() -> list[str]:
    """Return the keys whose need is met in some layouts only."""
    values = load(SIZES)
    jobs = []
    for given in LAYOUTS.values():
        split = (word.partition("=") for word in given)
        own = {key: True if text == "True" else int(text) for key, _, text in split}
        jobs.append(values | {"model.fp8": True} | own)
    return [p for p in DEPENDENT if len({unmet_need(p, job) is None for job in jobs}) > 1]


OF_LAYOUTS = keys_of_layouts()


def test_the_keys_that_depend_on_ranks_are_found() -> None:
    listed = {setting.partition("=")[0] for setting in COUNTS if COUNTS[setting][1]}
    assert listed <= set(OF_LAYOUTS) and "model.sequence_parallel" in OF_LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", OF_LAYOUTS)
def test_in_each_layout_a_key_changes_the_plan_or_is_refused(path: str, layout: str) -> None:
    """The plan's messages are those that ranks send (tests/plan/test_traffic.py)."""
    value = str(VALUES_IN_LAYOUTS.get(path, another(path))).replace(" ", "")
    for kind in KINDS.values():
        given = [*LAYOUTS[layout], *kind]
        if not refused([*given, f"{path}={value}"], path):
            assert planned(given) != planned([*given, f"{path}={value}"]), kind


def test_what_a_preset_sets_for_more_ranks_is_a_line_on_one(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "reduce_amax: false\noptim: {grad_sync_dtype: bf16}\n"
    )
    loaded = load_all(["model=mine", "model.fp8=True"], tmp_path)
    assert {s.key for s, _ in loaded.unused} == {
        "model.reduce_amax", "model.optim.grad_sync_dtype"
    }  # fmt: skip


START = "defaults: [pretrain_gpt, _self_]\n"
DETAIL = "model: {position_embedding_type: alibi, rotary_base: 5e5, fp8_margin: 3}\n"


def test_in_a_users_file_it_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(START + DETAIL)
    found = load_problems(config_dir=tmp_path, config_name="mine")
    assert {p.key for p in found} == {"model.rotary_base", "model.fp8_margin"}
    assert {p.origin for p in found} == {"mine.yaml"}


def test_of_a_preset_it_is_listed_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("rotary_base: 5e5\nfp8_margin: 3\n")
    loaded = load_all(["model=mine"], tmp_path)
    assert loaded.inert_lines() == [
        "inert: model.rotary_base=500000.0 (preset model=mine): has no effect with "
        "model.position_embedding_type=learned_absolute",
        "inert: model.fp8_margin=3 (preset model=mine): has no effect with model.fp8=False",
    ]
    assert run_spec("model=mine", config_dir=tmp_path).resolved == run_spec().resolved


def test_of_a_nemo_file_it_is_listed_once(tmp_path: Path) -> None:
    """A file that does not build on the default job counts as NeMo's own."""
    required = {path: key for path, key in all_keys().items() if key.required}
    values = {path: value for path, value in load().items() if path in required}
    lines = [f"  {path.removeprefix('trainer.')}: {value}" for path, value in values.items()
             if path.startswith("trainer.")]  # fmt: skip
    overrides = [f"{path}={value}" for path, value in values.items() if "trainer" not in path]
    (tmp_path / "theirs.yaml").write_text("trainer:\n" + "\n".join(lines) + "\n" + DETAIL)
    loaded = load_all(overrides, tmp_path, "theirs")
    assert {s.key for s, _ in loaded.unused} == {"model.rotary_base", "model.fp8_margin"}
    assert loaded.inert == ()
    spec = run_spec(*overrides, config_dir=tmp_path, config_name="theirs")
    same = ["model.position_embedding_type=alibi", "model.openai_gelu=False"]
    assert spec.resolved == run_spec(*same).resolved


def test_the_default_jobs_own_choices_just_give_way() -> None:
    assert run_spec().model.activation == "gelu-tanh"
    loaded = load_all(["model.activation=swiglu"])
    assert loaded.unused == () and run_spec("model.activation=swiglu").model.activation == "swiglu"
    assert run_spec("model=llama3_8b").model.activation == "swiglu"


def test_a_stronger_layer_may_switch_off_what_a_weaker_one_details(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        START + "model: {position_embedding_type: rope, rotary_base: 5e5}\n"
    )
    where = {"config_dir": tmp_path, "config_name": "mine"}
    assert load_all([], **where).unused == ()
    loaded = load_all(["model.position_embedding_type=none"], **where)
    ((setting, found),) = loaded.unused
    assert (setting.key, setting.origin) == ("model.rotary_base", "mine.yaml")
    assert found.setting == "model.position_embedding_type=none"
    problem = the_problem("model.position_embedding_type=none", "model.rotary_base=7e5", **where)
    assert problem.key == "model.rotary_base"


@pytest.mark.parametrize("setting", ["monitor=reduced_train_loss", "mode=max", "keep=1"])
def test_where_all_checkpoints_are_kept_none_is_chosen(setting: str) -> None:
    callback = "exp_manager.checkpoint_callback_params"
    given = f"{callback}.{setting}"
    load([given, f"{callback}.save_top_k=1"])
    found = the_problem(given, f"{callback}.save_top_k=-1")
    assert found.key == given.partition("=")[0]
    assert "has no effect with exp_manager.checkpoint_callback_params.save_top_k=-1" in str(found)
    load([f"{callback}.save_top_k=-1", "trainer.limit_val_batches=0"])


def test_a_name_beside_the_directory_itself_is_refused() -> None:
    found = the_problem("exp_manager.name=a", "exp_manager.explicit_log_dir=b")
    assert found.key == "exp_manager.name" and "Leave one of the two out" in str(found)
