"""Test the specs that settings resolve to, and which runs may continue each other."""

from __future__ import annotations

import copy
import dataclasses
import json
import shlex
from collections.abc import Iterator
from functools import cache
from typing import get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

from megafp8.config.errors import Origin
from megafp8.config.load import Loaded, load, load_all
from megafp8.config.nemo import nemo_keys
from megafp8.config.resolve import resolve
from megafp8.config.resume import (
    check_continues,
    flat,
    full_identity,
    identity,
    last_in_effect,
    setting_differences,
    typed,
)
from megafp8.config.schema import all_keys
from megafp8.config.values import parse_interval_seconds, parse_splits
from megafp8.errors import UserError
from megafp8.specs import Fp8Recipe, RunSpec
from tests.config.helpers import check, problems, run_spec, the_problem


def test_default_job() -> None:
    spec = run_spec()
    assert spec.precision.compute == "bf16" and spec.precision.fp8 is None
    assert spec.parallel.accelerator == "cpu" and spec.parallel.dp == 1
    assert spec.model.vocab_size == 0 and spec.vocab_divisible_by == 128
    assert spec.model.head_size == 64
    assert spec.train.num_microbatches(spec.parallel.dp) == 2
    assert spec.data.splits == (900.0, 50.0, 50.0)
    assert spec.optim.betas == (0.9, 0.98)
    assert spec.optim.schedule.max_steps == spec.train.max_steps == 900


def test_resolved_is_plain_and_complete() -> None:
    spec = run_spec("model.fp8=True")
    assert json.loads(json.dumps(spec.resolved)) == spec.resolved
    assert flat(spec.resolved).keys() == all_keys().keys()


def test_fp8_formats() -> None:
    assert run_spec("model.fp8=True").precision.fp8 == Fp8Recipe()
    recipe = run_spec("model.fp8=True", "model.fp8_e4m3=True", "model.fp8_margin=2").precision.fp8
    assert recipe == Fp8Recipe(forward_format="e4m3", backward_format="e4m3", margin=2)


@pytest.mark.parametrize(
    ("asked", "gpu", "got"),
    [("auto", True, "gpu"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("gpu", True, "gpu")],
)
def test_accelerator(asked: str, gpu: bool, got: str) -> None:
    spec = run_spec(f"trainer.accelerator={asked}", gpu=gpu)
    assert spec.parallel.accelerator == got
    assert flat(spec.resolved)["trainer.accelerator"] == got


def test_a_gpu_that_is_not_there_is_refused() -> None:
    (problem,) = problems(lambda: run_spec("trainer.accelerator=gpu"))
    assert problem.key == "trainer.accelerator" and "cpu or auto" in problem.hint


@pytest.mark.parametrize("text", ["32", "'32'", "32-true"])
def test_precision_fp32(text: str) -> None:
    assert run_spec(f"trainer.precision={text}").precision.compute == "fp32"


@pytest.mark.parametrize("text", ["bf16", "bf16-mixed"])
def test_precision_bf16(text: str) -> None:
    assert run_spec(f"trainer.precision={text}").precision.compute == "bf16"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("1.5", 1.5), ("00:01:30", 90.0), ("01:00:00:01", 86401.0), ("'90'", 90.0)],
)
def test_time_interval(text: str, seconds: float) -> None:
    key = "exp_manager.checkpoint_callback_params.train_time_interval"
    assert run_spec(f"{key}={text}").checkpoint.train_time_interval_seconds == seconds


def test_values_that_are_not_numbers() -> None:
    assert parse_interval_seconds(True) is None and parse_interval_seconds("1:2") is None
    assert parse_splits("900,,50") is None and parse_splits(None) is None


def test_same_meaning_same_identity() -> None:
    same = [
        run_spec("trainer.precision=bf16-mixed"),
        run_spec("model.data.splits_string=[900.0,50,50]"),
        run_spec("trainer.accelerator=cpu"),
        run_spec("++model.seed=1234"),
    ]
    assert {full_identity(spec.resolved) for spec in same} == {full_identity(run_spec().resolved)}
    both = run_spec("model.fp8=True", "model.fp8_e4m3=True", "model.fp8_hybrid=False")
    assert both.resolved == run_spec("model.fp8=True", "model.fp8_e4m3=True").resolved


FREE = [
    "trainer.max_steps=700",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=7",
    "trainer.limit_val_batches=2",
    "trainer.devices=2",
    "trainer.nonfinite_policy=rollback",
    "model.micro_batch_size=2",
    "exp_manager.name=other",
    "exp_manager.create_wandb_logger=True",
    "exp_manager.checkpoint_callback_params.keep=1",
    "model.data.index_mapping_dir=/cache",
]
FIXED = [
    "model.num_layers=2",
    "model.global_batch_size=64",
    "model.seed=1",
    "model.fp8=True",
    "trainer.precision=32",
    "trainer.gradient_clip_val=0.5",
    "model.optim.lr=3e-3",
    "model.optim.sched.warmup_steps=10",
    "model.data.data_prefix=/my/data",
    "model.data.splits_string=[90,10,0]",
    "model.tokenizer.vocab_size=1024",
    "model.hidden_dropout=0.1",
    "model.make_vocab_size_divisible_by=64",
]


@pytest.mark.parametrize("override", FREE)
def test_length_logging_layout_and_policy_continue(override: str) -> None:
    old, new = run_spec().resolved, run_spec(override).resolved
    assert identity(old) == identity(new)
    assert full_identity(old) != full_identity(new)
    assert setting_differences(old, new) == []
    check_continues(old, new, run="runs/x")


@pytest.mark.parametrize("override", FIXED)
def test_model_data_and_optimizer_do_not(override: str) -> None:
    key = override.partition("=")[0]
    old, new = run_spec().resolved, run_spec(override).resolved
    assert identity(old) != identity(new)
    assert [difference.key for difference in setting_differences(old, new)] == [key]
    (problem,) = problems(lambda: check_continues(old, new, run="runs/x"))
    given = typed(key, flat(old)[key])
    assert problem.key == key and f"Give {given} to continue it" in problem.hint
    assert "exp_manager.name" in problem.hint
    assert setting_differences(old, run_spec(*shlex.split(given)).resolved) == [], "it can be typed"


@pytest.mark.parametrize(
    ("more", "is_sweep", "of_directory"),
    [
        ([], False, "exp_manager.name"),
        (["exp_manager.explicit_log_dir=x"], False, "exp_manager.explicit_log_dir"),
        (["exp_manager.explicit_log_dir=x"], True, "hydra.sweep.dir"),
    ],
)
def test_the_hint_names_what_chooses_the_directory(
    more: list[str], is_sweep: bool, of_directory: str
) -> None:
    old, new = run_spec(*more).resolved, run_spec("model.seed=1", *more).resolved
    (problem,) = problems(lambda: check_continues(old, new, run="runs/x", is_sweep=is_sweep))
    assert problem.hint.endswith(f"or another {of_directory} for a new run")


def test_tensor_parallel_size_may_change() -> None:
    two = run_spec("trainer.devices=2", "model.tensor_model_parallel_size=2")
    assert setting_differences(run_spec().resolved, two.resolved) == []


TWO, FP8, SHARDED = "trainer.devices=2", "model.fp8=True", "model.fsdp=True"
OF_A_LAYOUT = {
    "model.optim.grad_sync_dtype=bf16": ([TWO], [[], [TWO, "model.tensor_model_parallel_size=2"],
                                                 [TWO, SHARDED]]),
    "model.fsdp_grad_reduce_dtype=bf16": ([TWO, SHARDED], [[], [TWO]]),
    "model.reduce_amax=False": ([TWO, FP8], [[FP8]]),
    "model.tp_only_amax_red=True": (
        [TWO, FP8], [[FP8], [TWO, FP8, "model.tensor_model_parallel_size=2"]]),
}  # fmt: skip
"""For a setting: settings with which it has an effect, and some with which it has none."""


@pytest.mark.parametrize("setting", OF_A_LAYOUT)
def test_a_key_without_effect_in_a_layout_does_not_stop_a_run(setting: str) -> None:
    """Back where it has an effect, it must be given its last value; any other is refused."""
    key = setting.partition("=")[0]
    where, elsewhere = OF_A_LAYOUT[setting]
    given, left_out = run_spec(*where, setting).resolved, run_spec(*where).resolved
    last, default = flat(given)[key], flat(left_out)[key]
    for other in elsewhere:
        idle = run_spec(*other).resolved
        check_continues(given, idle, run="runs/x")
        earlier = last_in_effect(given, idle)
        assert earlier[key] == last and set(earlier) <= LAYOUTS_KEYS
        once_more = last_in_effect(idle, idle, earlier)
        assert once_more == earlier, "it is remembered through any number of layouts"
        check_continues(idle, given, once_more, run="runs/x")
        (problem,) = problems(
            lambda idle=idle, earlier=earlier: check_continues(
                idle, left_out, earlier, run="runs/x"
            )
        )
        assert problem.key == key and problem.value == default
        assert f"Give {key}={last} to continue it" in problem.hint
        assert key not in last_in_effect(idle, given, earlier), "the settings have it again"


LAYOUTS_KEYS = {setting.partition("=")[0] for setting in OF_A_LAYOUT}


@pytest.mark.parametrize("setting", OF_A_LAYOUT)
def test_a_key_of_a_layout_is_compared_where_both_have_an_effect(setting: str) -> None:
    key = setting.partition("=")[0]
    where, elsewhere = OF_A_LAYOUT[setting]
    given, left_out = run_spec(*where, setting).resolved, run_spec(*where).resolved
    for old, new in ((given, left_out), (left_out, given)):
        (problem,) = problems(lambda old=old, new=new: check_continues(old, new, run="runs/x"))
        assert problem.key == key and f"{key}={flat(old)[key]}" in problem.hint
    for other in elsewhere:
        idle = run_spec(*other).resolved
        assert setting_differences(idle, given) == [], "the run has used no value yet"
        assert setting_differences(idle, given, last_in_effect(left_out, idle))[0].key == key


def test_a_key_that_an_older_run_lacks_counts_with_its_default() -> None:
    old = run_spec().resolved
    model = {name: value for name, value in old["model"].items() if name != "fp8_margin"}
    assert setting_differences({**old, "model": model}, old) == []
    stranger = {**old, "model": {**old["model"], "gone": 1}}
    assert [d.key for d in setting_differences(stranger, old)] == ["model.gone"]


# --- any list of overrides ends in a spec or in an error that a user can mend --------------------

KEYS = [
    *all_keys(),
    *nemo_keys(),
    "model",
    "model.optim",
    "model.fp9",
    "foo",
    "hydra.job.name",
    "",
    ".",
    "a@b",
]
VALUES = st.one_of(
    st.integers(-5, 5000).map(str),
    st.sampled_from([str(2**k) for k in range(12)]),
    st.integers().map(str),
    st.floats().map(str),
    st.booleans().map(str),
    st.sampled_from(
        ["", "null", "???", "bf16", "auto", "gpu", "max", "[0.9,0.95]", "[1]", "[]", "{}", "{a:1}",
         "{lr:1}", "1,2", "range(3)", "${model.seed}", "${nope}", "${model", "${oc.env:NOPE}",
         "'900,50,50'", "[8,1,1]", "00:10:00", "${.}", "${model}", "1e400", "'", '"', "\\",
         "10" * 300, "choice(1,2)", "interval(0,1)", "glob(*)", "sort(1,2)", "${model.fp8}",
         "${trainer.precision}", "${model.micro_batch_size}"]
    ),
    st.text(max_size=8),
)  # fmt: skip
OVERRIDES = st.one_of(
    st.builds(
        lambda prefix, key, value: f"{prefix}{key}={value}",
        st.sampled_from(["", "", "", "", "+", "++", "~"]),
        st.one_of(st.sampled_from(list(all_keys())), st.sampled_from(KEYS)),
        VALUES,
    ),
    st.text(max_size=12),
)


@settings(max_examples=30)
@given(st.lists(OVERRIDES, max_size=4))
@example(["name=${.}"])
@example(["exp_manager.wandb_logger_kwargs={a:'${.}'}"])
def test_any_overrides_end_in_a_spec_or_a_user_error(overrides: list[str]) -> None:
    try:
        spec = resolve(load(overrides), lambda: False)
    except UserError as error:
        assert str(error)
        return
    assert isinstance(spec, RunSpec)


SIZES = st.fixed_dictionaries(
    {
        "trainer.devices": st.sampled_from([1, 2, 3, 4, 8]),
        "model.tensor_model_parallel_size": st.sampled_from([1, 2, 3, 4]),
        "model.pipeline_model_parallel_size": st.sampled_from([1, 1, 2]),
        "model.micro_batch_size": st.sampled_from([1, 2, 3, 4, 8]),
        "model.global_batch_size": st.sampled_from([24, 48, 96]),
        "model.hidden_size": st.sampled_from([96, 120, 128, 192, 384]),
        "model.ffn_hidden_size": st.sampled_from([384, 500, 512, 768]),
        "model.num_attention_heads": st.sampled_from([4, 6, 8, 12]),
        "model.encoder_seq_length": st.sampled_from([8, 12, 16, 64]),
        "model.fp8": st.booleans(),
        "model.make_vocab_size_divisible_by": st.sampled_from([48, 128]),
    }
)


@cache
def base() -> Loaded:
    return load_all()


def test_what_refers_to_a_changed_setting_changes_with_it() -> None:
    loaded = load_all(["model.seed=${trainer.max_steps}", "trainer.max_steps=20"])
    changed = loaded.changed_to({"trainer.max_steps": 7}, Origin("the sweep"))
    assert [changed.values[key] for key in ("model.seed", "trainer.max_steps")] == [7, 7]
    assert changed.origins["trainer.max_steps"] == "the sweep"
    assert changed.cfg.model.seed == 7 and changed.origins["model.seed"] == "command line"
    assert loaded.values["model.seed"] == loaded.cfg.model.seed == 20


def with_sizes(sizes: dict[str, object]) -> RunSpec:
    """Return a configuration as with overrides, but without Hydra, which takes most of the time."""
    values = base().changed_to(sizes).values
    try:
        check(values)
        return resolve(values, lambda: False)
    except UserError as error:
        assert str(error)
        reject()


def test_the_files_of_data_may_move_and_hints_can_be_typed() -> None:
    """Weights and last names count; a list is an override that a shell and Hydra read."""
    old, new = run_spec().resolved, copy.deepcopy(run_spec().resolved)
    data = [0.7, "data/a b", 0.3, "data/c"]
    old = {**old, "model": {**old["model"], "data": {**old["model"]["data"], "data_prefix": data}}}
    for prefix, keys in (
        ([0.7, "/there/a b", 0.3, "/there/c"], []),
        ([0.3, "data/a b", 0.7, "data/c"], ["model.data.data_prefix"]),
        ([0.7, "data/c", 0.3, "data/a b"], ["model.data.data_prefix"]),
        (["data/c"], ["model.data.data_prefix"]),
    ):
        new["model"]["data"]["data_prefix"] = prefix
        assert [found.key for found in setting_differences(old, new)] == keys, prefix
    for name, keys in (("/there/a.jsonl", []), ("b.jsonl", ["model.data.train_ds.file_names"])):
        runs = [
            {**old, "model": {**old["model"], "data": {"train_ds": {"file_names": file}}}}
            for file in ("a.jsonl", name)
        ]
        assert [found.key for found in setting_differences(*runs)] == keys, name
    (word,) = shlex.split(typed("model.data.data_prefix", data))
    assert load([word])["model.data.data_prefix"] == data


# Seven of eight drawn sizes do not fit; each of these must end in an error with a message.
MANY_ARE_REFUSED = [HealthCheck.filter_too_much]


@settings(max_examples=25, suppress_health_check=MANY_ARE_REFUSED)
@given(SIZES)
def test_sizes_that_pass_fit_on_the_ranks(sizes: dict[str, object]) -> None:
    spec = with_sizes(sizes)
    model, tp, dp = spec.model, spec.parallel.tp, spec.parallel.dp
    train = spec.train
    assert tp * dp * spec.parallel.pp == spec.parallel.world_size
    stages = spec.parallel.pipeline.layers(model.num_layers, spec.parallel.pp)
    assert [layer for stage in stages for layer in stage] == list(range(model.num_layers))
    assert train.num_microbatches(dp) * train.micro_batch_size * dp == train.global_batch_size
    assert model.num_attention_heads % tp == 0 and model.ffn_hidden_size % tp == 0
    assert model.hidden_size % model.num_attention_heads == 0
    if spec.precision.fp8:
        widths = [model.hidden_size, model.ffn_hidden_size, 3 * model.hidden_size]
        assert all(width % (16 * tp) == 0 for width in widths)
        assert train.micro_batch_size * spec.data.seq_length % 16 == 0


@settings(max_examples=30, suppress_health_check=MANY_ARE_REFUSED)
@given(SIZES)
def test_resolved_loads_again_as_the_same_run(sizes: dict[str, object]) -> None:
    spec = with_sizes(sizes)
    again = resolve(flat(json.loads(json.dumps(spec.resolved))), lambda: False)
    assert again == spec and identity(again.resolved) == identity(spec.resolved)


@pytest.mark.parametrize(
    ("given", "batches", "share"),
    [("1", 1, None), ("1.0", 8, 1.0), ("0.25", 8, 0.25), ("0", 0, None), ("0.0", 0, None)],
)
def test_validation_batches_are_a_number_or_a_share(
    given: str, batches: int, share: float | None
) -> None:
    """As in Lightning, a number with a decimal point is a share of the split."""
    train = run_spec(f"trainer.limit_val_batches={given}").train
    assert (train.limit_val_batches, train.val_share) == (batches, share)
    trial = run_spec(f"trainer.limit_val_batches={given}", "trainer.fast_dev_run=2").train
    assert (trial.limit_val_batches, trial.val_share) == (min(2, batches), None)


@pytest.mark.parametrize("given", ["2.0", "1.5", "-0.5", "-1", "true"])
def test_other_validation_batches_are_refused(given: str) -> None:
    problem = the_problem(f"trainer.limit_val_batches={given}")
    assert problem.key == "trainer.limit_val_batches" and "0.0 to 1.0" in str(problem)


def test_a_run_with_a_key_that_was_taken_out_continues_if_it_meant_what_is_left() -> None:
    new = run_spec("model.fp8=True", "model.optim.fp8_opt_level=O2").resolved

    def earlier(value: str) -> dict[str, object]:
        optim = {**new["model"]["optim"], "moments_scaling": value}
        return {**new, "model": {**new["model"], "optim": optim}}

    assert setting_differences(earlier("tensor"), new) == []
    (found,) = setting_differences(earlier("group"), new)
    assert found.key == "model.optim.moments_scaling" and found.new == "tensor"


def spec_paths(spec: type = RunSpec, section: str = "") -> Iterator[str]:
    """Yield the path of each field of a spec and of the specs in it, as `optim.lr`."""
    for name, hint in get_type_hints(spec).items():
        yield f"{section}{name}"
        for part in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from spec_paths(part, f"{section}{name}.")


def test_each_key_goes_to_a_field_of_its_own() -> None:
    named = [key.spec for key in all_keys().values() if key.spec is not None]
    assert not set(named) - set(spec_paths())
    assert len(named) == len(set(named)) > 100
