"""Make the specs that the rest of the program reads from a checked tree of settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megafp8.config.architecture import gpt_spec
from megafp8.config.base_model import STARTS, folder_of_model
from megafp8.config.checks import rule_findings
from megafp8.config.data_values import file_list, parse_data_prefix, unescaped
from megafp8.config.errors import SettingError
from megafp8.config.keys import Values
from megafp8.config.precision_changes import SCHEDULE
from megafp8.config.precision_spec import gradient_format, precision_spec
from megafp8.config.rules import Finding, effective
from megafp8.config.schema import all_keys, spec_fields
from megafp8.config.settings import nested
from megafp8.config.values import (
    DEFAULT_EXP_DIR,
    PRECISIONS,
    parse_layout,
    parse_splits,
    plain,
    recipes_in,
    schedule_of,
    schedule_steps,
    shortest_number,
    steps_or_ratio,
    storage_of,
    warmup_steps,
    wsd_decay_steps,
)
from megafp8.ops.torch_build import why_no_gpu
from megafp8.specs import (
    CheckpointSpec,
    DataSpec,
    FsdpSpec,
    HealthMode,
    HealthSpec,
    InstructionSpec,
    MuonSpec,
    ObserveSpec,
    OptimSpec,
    ParallelSpec,
    PipelineSpec,
    ProfileSpec,
    RampupSpec,
    RunSpec,
    ScheduleSpec,
    StorageSpec,
    TokenizerSpec,
    TrainSpec,
    backends,
)
from megafp8.specs.parallel import MIB
from megafp8.specs.precision import AutoBackend
from megafp8.specs.recipes import find_recipe, recipes_where

VALIDATION_BATCHES = 8  # global batches of a validation during training, if none are given


def resolve(settings: Values, accelerator_available: Callable[[], bool]) -> RunSpec:
    """Return the run that settings ask for.

    Args:
        settings: The values that `load` returned.
        accelerator_available: Returns whether this machine has a GPU. It is called only if the
            answer matters.

    Raises:
        ConfigError: A setting needs a GPU that the run does not have, or excludes the one it has.
    """
    values = canonical(settings, accelerator_available)
    spec = RunSpec(
        **spec_fields("", values),
        model=gpt_spec(values),
        precision=precision_spec(values, _auto(values)),
        parallel=_parallel(values),
        optim=optim_of(values),
        data=data_spec(values),
        train=_train(values),
        checkpoint=_checkpoint(values),
        observe=observe_spec(values),
        profile=ProfileSpec(**spec_fields("profile", values)),
        resolved=nested(values),
    )
    _refuse_idle_graphs(spec)
    return spec


def _refuse_idle_graphs(spec: RunSpec) -> None:
    """Refuse CUDA graphs of a run in which each step would be measured, and so run without them."""
    if spec.health_stops_graphs and spec.train.log_every_n_steps == 1:
        raise SettingError(
            "model.enable_cuda_graph",
            True,
            "no step would run as a graph: with trainer.log_every_n_steps=1 each step measures FP8 "
            f"health (model.fp8_health={spec.observe.health.mode}), which a graph cannot",
            "Set trainer.log_every_n_steps=10 or model.fp8_health=off",
        )


def canonical(settings: Values, accelerator_available: Callable[[], bool]) -> dict[str, Any]:
    """Return the resolved settings by their dotted paths: plain values, in one spelling.

    Keys without effect have their defaults. Equal runs therefore have equal settings, and the
    result can be loaded again as a configuration. Arguments and errors are those of `resolve`.
    """
    keys, asked = all_keys(), settings["trainer.accelerator"]
    given = {**settings, "trainer.accelerator": _accelerator(asked, accelerator_available)}
    values = {path: keys[path].spelled(value) for path, value in effective(given).items()}
    resume = "resume_from_checkpoint"
    resumed = values[f"model.{resume}"] or values[f"exp_manager.{resume}"]
    values[f"model.{resume}"] = values[f"exp_manager.{resume}"] = resumed
    if values["model.optim.fp8_opt_level"] == "O3":
        values["model.fp8_params"] = True
    if values["model.fp8"]:  # null is what the recipe does
        traits = find_recipe(values["model.fp8_recipe"]).traits
        is_e4m3 = gradient_format(values, traits) == "e4m3"
        # A schedule or single linears may have a recipe with two formats beside one with E4M3.
        others = set(recipes_in(values)) - {values["model.fp8_recipe"]}
        has_choice = recipes_where(others, lambda traits: not traits.is_e4m3)
        if bool(values["model.fp8_e4m3"]) == is_e4m3 or not (values[SCHEDULE] or has_choice):
            values |= {"model.fp8_e4m3": is_e4m3, "model.fp8_hybrid": not is_e4m3}
    on_cpu = values["trainer.accelerator"] == "cpu"
    if not on_cpu and values["model.te_version"] is not None:
        reason = "applies to CPUs; on a GPU the installed Transformer Engine runs"
        raise SettingError("model.te_version", values["model.te_version"], reason, "Leave it out")
    return values


def _accelerator(asked: str, available: Callable[[], bool]) -> str:
    if asked == "cpu":
        return asked
    if available():
        return "gpu"
    if asked == "auto":
        return "cpu"
    if (why := why_no_gpu()) is not None:
        hint = f"{why.hint}, or use trainer.accelerator=cpu or auto"
        reason = f"PyTorch finds no GPU: {why.reason}"
        raise SettingError("trainer.accelerator", asked, reason, hint)
    raise SettingError(
        "trainer.accelerator",
        asked,
        "PyTorch finds no GPU",
        "Use trainer.accelerator=cpu or auto, or check the driver and the container with "
        "nvidia-smi",
    )


def _auto(values: Values) -> AutoBackend | None:
    """Return what the settings say of Transformer Engine, on a GPU where no backend was named."""
    if values["model.fp8_backend"] != "auto" or values["trainer.accelerator"] != "gpu":
        return None
    with_te = {**values, "model.fp8_backend": "te"}
    reasons = [_why_not_te(found, with_te[found.key]) for found in rule_findings(with_te)]
    if not reasons and not backends.TE_IS_PROVEN_ON_GPUS:
        reasons = ["its layers are unproven on GPUs, and model.fp8_backend=te asks for them"]
    return AutoBackend("; ".join(reasons) or None)


def _why_not_te(finding: Finding, value: object) -> str:
    """Return why a setting rules Transformer Engine out, for the line about `auto`."""
    if finding.key == "model.fp8_backend":
        return finding.reason
    return f"{finding.key}={plain(value)}: {finding.reason}"


# --- the specs: fields that keys name with `spec=`, and those that follow from several keys -------


def _parallel(values: Values) -> ParallelSpec:
    return ParallelSpec(
        **spec_fields("parallel", values),
        pipeline=PipelineSpec(
            schedule=schedule_of(values),
            stages_per_rank=values["model.virtual_pipeline_model_parallel_size"] or 1,
            layout=parse_layout(values["model.pipeline_model_parallel_layout"]),
        ),
        grad_bucket_bytes=values["model.grad_allreduce_chunk_size_mb"] * MIB,
        fsdp=_fsdp(values) if values["model.fsdp"] else None,
    )


def _fsdp(values: Values) -> FsdpSpec:
    return FsdpSpec(
        **spec_fields("parallel.fsdp", values),
        grad_reduce_dtype=PRECISIONS[values["model.fsdp_grad_reduce_dtype"]],
    )


def _train(values: Values) -> TrainSpec:
    trial, limit = values["trainer.fast_dev_run"], values["trainer.limit_val_batches"]
    return TrainSpec(
        **spec_fields("train", values),
        max_steps=trial or values["trainer.max_steps"],
        limit_val_batches=_validation_batches(limit, trial),
        val_share=limit if isinstance(limit, float) and limit > 0 and not trial else None,
        last_validation_is_whole=limit is None and not trial,
        rampup=rampup_of(values["model.rampup_batch_size"]),
        fast_dev_run=bool(trial),
    )


def _validation_batches(limit: float | None, trial: int) -> int:
    """Return the global batches of one validation; a trial of N steps has at most N.

    A share of the split becomes a number when the data is open.
    """
    is_number = isinstance(limit, int) or limit == 0
    batches = int(limit) if limit is not None and is_number else VALIDATION_BATCHES
    return min(batches, trial) if trial else batches


def rampup_of(sizes: Sequence[int] | None) -> RampupSpec | None:
    """Return how the batch grows, given `model.rampup_batch_size`; None: it does not grow."""
    if sizes is None:
        return None
    start, increment, samples = sizes
    return RampupSpec(start=start, increment=increment, samples=samples)


def optim_of(values: Values) -> OptimSpec:
    """Return the optimizer of a whole configuration, as `resume.with_defaults` returns it."""
    sharded = values["model.optim.data_parallel_sharding_strategy"]
    formats: dict[str, Any] = dict(storage_of(values))
    return OptimSpec(
        **spec_fields("optim", values),
        clip_grad_norm=values["trainer.gradient_clip_val"] or None,
        schedule=_schedule(values),
        muon=MuonSpec(**spec_fields("optim.muon", values)),
        storage=StorageSpec(
            **spec_fields("optim.storage", values),
            **formats,
            linears_only=values["model.optim.low_precision_moments_of"] == "linears",
            sums_in_fp32=values["model.optim.main_grads_sum_dtype"] == "fp32",
        ),
        shards_grads=sharded == "optim_grads",
    )


def _schedule(values: Values) -> ScheduleSpec:
    max_steps = schedule_steps(values)

    def steps(part: str) -> int | None:
        name = f"model.optim.sched.{part}"
        return steps_or_ratio(values[f"{name}_steps"], values[f"{name}_ratio"], max_steps)

    return ScheduleSpec(
        **spec_fields("optim.schedule", values),
        warmup_steps=warmup_steps(steps("warmup"), max_steps),
        constant_steps=steps("constant") or 0,
        max_steps=max_steps,
        hold_steps=steps("hold"),
        wsd_decay_steps=wsd_decay_steps(steps("wsd_decay"), max_steps),
        d_model=values["model.optim.sched.d_model"] or values["model.hidden_size"],
    )


def data_spec(values: Values) -> DataSpec:
    """Return the data that settings name, without a look at devices."""
    return DataSpec(
        **spec_fields("data", values),
        prefix=parse_data_prefix(values["model.data.data_prefix"]),
        splits=parse_splits(values["model.data.splits_string"]) or (),
        tokenizer=TokenizerSpec(**spec_fields("data.tokenizer", values)),
        seed=values["model.seed"],
        validates=values["trainer.limit_val_batches"] != 0,
        instructions=_instructions(values),
    )


def _instructions(values: Values) -> InstructionSpec | None:
    files = file_list(values["model.data.train_ds.file_names"])
    if files is None:
        return None
    weights = values["model.data.train_ds.concat_sampling_probabilities"]
    return InstructionSpec(
        **spec_fields("data.instructions", values),
        train_files=files,
        validation_files=file_list(values["model.data.validation_ds.file_names"]) or (),
        model=folder_of_model(values) or next((values[key] for key in STARTS if values[key]), ""),
        prompt_template=unescaped(values["model.data.train_ds.prompt_template"]),
        probabilities=None if weights is None else tuple(shortest_number(w) for w in weights),
    )


def _checkpoint(values: Values) -> CheckpointSpec:
    """Return when checkpoints are saved: never by themselves in a trial, or if it is not asked."""
    spec = CheckpointSpec(**spec_fields("checkpoint", values))
    if values["exp_manager.create_checkpoint_callback"] and not values["trainer.fast_dev_run"]:
        return spec
    return replace(
        spec,
        every_n_train_steps=None,
        train_time_interval_seconds=None,
        save_last=False,
        async_save=False,
    )


def observe_spec(values: Values) -> ObserveSpec:
    """Return what is recorded and where, without a look at devices.

    A trial (`fast_dev_run`) never uses a named run's directory.
    """
    health = HealthSpec(**spec_fields("observe.health", values), mode=_health_mode(values))
    spec = ObserveSpec(
        **spec_fields("observe", values),
        exp_dir=values["exp_manager.exp_dir"] or DEFAULT_EXP_DIR,
        health=health,
    )
    if not values["trainer.fast_dev_run"]:
        return spec
    return replace(
        spec,
        name=None,
        resume_if_exists=False,
        create_tensorboard_logger=False,
        create_wandb_logger=False,
    )


def _health_mode(values: Values) -> HealthMode:
    """Return what is measured: `auto` is `off` or `scales` where less is known or shown.

    On GPUs the cost of full measures is not known, and a backend may hide its casts.
    """
    asked: HealthMode = values["model.fp8_health"]
    if asked != "auto":
        return asked
    backend, traits = values["model.fp8_backend"], find_recipe(values["model.fp8_recipe"]).traits
    of_te = backend == "te" and not traits.has_history
    in_graph = backend == "torchao" and values["model.compile"] != "off"
    if of_te or in_graph:
        return "off"
    on_cpu = values["trainer.accelerator"] == "cpu" and backend != "te"
    return "auto" if on_cpu else "scales"


def has_our_casts(backend: str) -> bool:
    """Whether the layers of a run with this `model.fp8_backend` cast by our own code on a CPU."""
    return backend in ("auto", "native")
