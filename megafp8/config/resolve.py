"""Make the specs that the rest of the program reads from a checked tree of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megafp8.config.architecture import gpt_spec
from megafp8.config.base_model import folder_of_tree
from megafp8.config.checks import check_values
from megafp8.config.errors import SettingError
from megafp8.config.precision import precision_spec
from megafp8.config.rules import effective
from megafp8.config.schema import (
    Config,
    ExpManager,
    Model,
    NsysProfile,
    Optim,
    Sched,
    Trainer,
    all_keys,
    schema_tree,
)
from megafp8.config.settings import read_value, read_values
from megafp8.config.values import (
    DEFAULT_EXP_DIR,
    PRECISIONS,
    file_list,
    format_number,
    parse_data_prefix,
    parse_interval_seconds,
    parse_layout,
    parse_splits,
    plain,
    steps_or_ratio,
    storage_of,
    unescaped,
    warmup_steps,
)
from megafp8.ops.torch_build import HINT, why_no_gpu
from megafp8.specs import (
    CheckpointSpec,
    DataSpec,
    FsdpSpec,
    HealthMode,
    HealthSpec,
    InstructionSpec,
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
)
from megafp8.specs.parallel import MIB
from megafp8.specs.precision import AutoBackend
from megafp8.specs.recipes import find_recipe

VALIDATION_BATCHES = 8  # global batches of a validation during training, if none are given


def resolve(cfg: DictConfig, accelerator_available: Callable[[], bool]) -> RunSpec:
    """Return the run that a tree asks for.

    Args:
        cfg: A tree that `load` returned.
        accelerator_available: Returns whether this machine has a GPU. It is called only if the
            answer matters.

    Raises:
        ConfigError: A setting needs a GPU that the run does not have, or excludes the one it has.
    """
    resolved = canonical(cfg, accelerator_available)
    tree = OmegaConf.to_object(OmegaConf.merge(schema_tree(), resolved))
    assert isinstance(tree, Config)
    trainer, model = tree.trainer, tree.model
    spec = RunSpec(
        model=gpt_spec(model),
        precision=precision_spec(trainer, model, _auto(trainer, model, resolved)),
        parallel=_parallel(trainer, model),
        optim=_optim(model, trainer),
        data=_data(tree),
        train=TrainSpec(
            max_steps=int(trainer.fast_dev_run) or trainer.max_steps,
            max_time_seconds=parse_interval_seconds(trainer.max_time),
            micro_batch_size=model.micro_batch_size,
            global_batch_size=model.global_batch_size,
            log_every_n_steps=trainer.log_every_n_steps,
            val_check_interval=trainer.val_check_interval,
            limit_val_batches=_validation_batches(trainer),
            val_share=_validation_share(trainer),
            last_validation_is_whole=trainer.limit_val_batches is None and not trainer.fast_dev_run,
            seed=model.seed,
            nonfinite_policy=trainer.nonfinite_policy,  # type: ignore[arg-type]  # validated
            rampup=_rampup(model),
            compile=model.compile,  # type: ignore[arg-type]  # validated
            cuda_graph=model.enable_cuda_graph,
            overfit_batches=trainer.overfit_batches,
            num_sanity_val_steps=trainer.num_sanity_val_steps,
            fast_dev_run=bool(trainer.fast_dev_run),
            deterministic=trainer.deterministic,
            gc_interval=model.gc_interval,
            max_restarts=trainer.max_restarts,
        ),
        checkpoint=_checkpoint(tree.exp_manager, trial=bool(trainer.fast_dev_run)),
        observe=_observe(tree, model),
        profile=_profile(model.nsys_profile, trainer),
        vocab_divisible_by=model.make_vocab_size_divisible_by,
        restore_from_path=tree.restore_from_path,
        resume_from_checkpoint=model.resume_from_checkpoint,
        resolved=resolved,
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


def canonical(cfg: DictConfig, accelerator_available: Callable[[], bool]) -> dict[str, object]:
    """Return the resolved settings: the tree as plain dicts and lists, in one spelling.

    Keys without effect have their defaults. Equal runs therefore have equal settings, and the
    result can be loaded again as a configuration. Arguments and errors are those of `resolve`.
    """
    keys = all_keys()
    given = {path: read_value(cfg, path) for path in keys}
    given["trainer.accelerator"] = _accelerator(given["trainer.accelerator"], accelerator_available)
    values = {path: keys[path].spelled(value) for path, value in effective(given).items()}
    resume = "resume_from_checkpoint"
    resumed = values[f"model.{resume}"] or values[f"exp_manager.{resume}"]
    values[f"model.{resume}"] = values[f"exp_manager.{resume}"] = resumed
    if values["model.optim.fp8_opt_level"] == "O3":
        values["model.fp8_params"] = True
    if values["model.fp8"]:  # null is what the recipe does
        traits = find_recipe(values["model.fp8_recipe"]).traits
        is_e4m3 = bool(values["model.fp8_e4m3"]) or traits.is_e4m3
        values |= {"model.fp8_e4m3": is_e4m3, "model.fp8_hybrid": not is_e4m3}
    on_cpu = values["trainer.accelerator"] == "cpu"
    if not on_cpu and values["model.te_version"] is not None:
        reason = "applies to CPUs; on a GPU the installed Transformer Engine runs"
        raise SettingError("model.te_version", values["model.te_version"], reason, "Leave it out")
    return _nested(values)


def _accelerator(asked: str, available: Callable[[], bool]) -> str:
    if asked == "cpu":
        return asked
    if available():
        return "gpu"
    if asked == "auto":
        return "cpu"
    if (why := why_no_gpu()) is not None:
        hint = f"{HINT}, or use trainer.accelerator=cpu or auto"
        raise SettingError("trainer.accelerator", asked, f"PyTorch finds no GPU: {why}", hint)
    raise SettingError(
        "trainer.accelerator",
        asked,
        "PyTorch finds no GPU",
        "Use trainer.accelerator=cpu or auto, or check the driver and the container with "
        "nvidia-smi",
    )


def _parallel(trainer: Trainer, model: Model) -> ParallelSpec:
    stages = model.virtual_pipeline_model_parallel_size or 1
    pipeline = PipelineSpec(
        schedule=model.pipeline_schedule or ("1F1B" if stages == 1 else "Interleaved1F1B"),  # type: ignore[arg-type]  # validated
        stages_per_rank=stages,
        layout=parse_layout(model.pipeline_model_parallel_layout),
    )
    return ParallelSpec(
        num_nodes=trainer.num_nodes,
        devices_per_node=trainer.devices,
        tp=model.tensor_model_parallel_size,
        sequence_parallel=model.sequence_parallel,
        cp=model.context_parallel_size,
        pp=model.pipeline_model_parallel_size,
        accelerator=trainer.accelerator,
        pipeline=pipeline,
        tp_only_amax_red=model.tp_only_amax_red,
        grad_bucket_bytes=model.grad_allreduce_chunk_size_mb * MIB,
        grad_reduce_dtype=model.optim.grad_sync_dtype,  # type: ignore[arg-type]  # validated
        fsdp=_fsdp(model),
        step_timeout_seconds=trainer.step_timeout,
    )


def _fsdp(model: Model) -> FsdpSpec | None:
    if not model.fsdp:
        return None
    return FsdpSpec(
        strategy=model.fsdp_sharding_strategy,  # type: ignore[arg-type]  # validated
        grad_reduce_dtype=PRECISIONS[model.fsdp_grad_reduce_dtype],
        torchao_in_fp8=model.enable_fsdp_float8_all_gather,
    )


def _auto(trainer: Trainer, model: Model, resolved: Mapping[str, object]) -> AutoBackend | None:
    """Return what the settings say of Transformer Engine, on a GPU where no backend was named."""
    if model.fp8_backend != "auto" or trainer.accelerator != "gpu":
        return None
    values, _ = read_values(OmegaConf.merge(schema_tree(), resolved), {})  # type: ignore[arg-type]
    found = check_values(values | {"model.fp8_backend": "te"})
    return AutoBackend("; ".join(map(_why_not_te, found)) or None)


def _why_not_te(problem: SettingError) -> str:
    """Return why a setting rules Transformer Engine out, for the line about `auto`."""
    if problem.key == "model.fp8_backend":
        return problem.reason
    return f"{problem.key}={plain(problem.value)}: {problem.reason}"


def _rampup(model: Model) -> RampupSpec | None:
    if model.rampup_batch_size is None:
        return None
    start, increment, samples = model.rampup_batch_size
    return RampupSpec(start=start, increment=increment, samples=samples)


def _optim(model: Model, trainer: Trainer) -> OptimSpec:
    optim = model.optim
    return OptimSpec(
        name=optim.name,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        decays_vectors=model.do_layer_norm_weight_decay,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        clip_grad_norm=trainer.gradient_clip_val or None,
        clip_algorithm=trainer.gradient_clip_algorithm,  # type: ignore[arg-type]  # validated
        schedule=_schedule(optim.sched, trainer.max_steps, model.hidden_size),
        storage=_storage(optim),
        shards_grads=optim.data_parallel_sharding_strategy == "optim_grads",
        shard_by=optim.shard_by,  # type: ignore[arg-type]  # validated
    )


def _storage(optim: Optim) -> StorageSpec:
    prefix = "model.optim."
    formats = storage_of({prefix + name: value for name, value in vars(optim).items()})
    return StorageSpec(
        **formats,
        linears_only=optim.low_precision_moments_of == "linears",
        sums_in_fp32=optim.main_grads_sum_dtype == "fp32",
        reduction=optim.fp8_grad_reduction,  # type: ignore[arg-type]  # validated
        stochastic_rounding=optim.stochastic_rounding,
    )


def _schedule(sched: Sched, max_steps: int, hidden_size: int) -> ScheduleSpec:
    warmup = steps_or_ratio(sched.warmup_steps, sched.warmup_ratio, max_steps)
    constant = steps_or_ratio(sched.constant_steps, sched.constant_ratio, max_steps)
    return ScheduleSpec(
        name=sched.name,
        warmup_steps=warmup_steps(warmup, max_steps),
        constant_steps=constant or 0,
        min_lr=sched.min_lr,
        max_steps=max_steps,
        hold_steps=steps_or_ratio(sched.hold_steps, sched.hold_ratio, max_steps),
        power=sched.power,
        decay_rate=sched.decay_rate,
        d_model=sched.d_model or hidden_size,
    )


def data_spec(cfg: DictConfig) -> DataSpec:
    """Return the data that a checked tree names, without a look at devices."""
    tree = OmegaConf.to_object(cfg)
    assert isinstance(tree, Config)
    return _data(tree)


def observe_spec(cfg: DictConfig) -> ObserveSpec:
    """Return where a checked tree records its run, and what, without a look at devices."""
    tree = OmegaConf.to_object(cfg)
    assert isinstance(tree, Config)
    return _observe(tree, tree.model)


def _data(tree: Config) -> DataSpec:
    model, data, tokenizer = tree.model, tree.model.data, tree.model.tokenizer
    return DataSpec(
        prefix=parse_data_prefix(data.data_prefix),
        cache_dir=model.data.index_mapping_dir,
        splits=parse_splits(model.data.splits_string) or (),
        seq_length=model.data.seq_length,
        tokenizer=TokenizerSpec(
            library=tokenizer.library,
            vocab_size=tokenizer.vocab_size,
            type=tokenizer.type,
            model=tokenizer.model,
            vocab_file=tokenizer.vocab_file,
            merge_file=tokenizer.merge_file,
        ),
        seed=model.seed,
        shuffle_documents=data.shuffle_documents,
        dataloader_type=data.dataloader_type,  # type: ignore[arg-type]  # validated
        num_workers=data.num_workers,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        validation_drop_last=data.validation_drop_last,
        instructions=_instructions(tree),
    )


def _instructions(tree: Config) -> InstructionSpec | None:
    model, data = tree.model, tree.model.data.train_ds
    files = file_list(data.file_names)
    if files is None:
        return None
    weights = data.concat_sampling_probabilities
    return InstructionSpec(
        train_files=files,
        validation_files=file_list(model.data.validation_ds.file_names) or (),
        model=folder_of_tree(tree),
        label_key=data.label_key,
        prompt_template=unescaped(data.prompt_template),
        truncation_field=data.truncation_field,
        truncation_method=data.truncation_method,  # type: ignore[arg-type]  # validated
        answer_only_loss=model.answer_only_loss,
        packed=data.packed_sequence,
        shuffle=data.shuffle,
        probabilities=None if weights is None else tuple(format_number(w) for w in weights),
    )


def _profile(profile: NsysProfile, trainer: Trainer) -> ProfileSpec:
    return ProfileSpec(
        enabled=profile.enabled,
        start_step=profile.start_step,
        end_step=profile.end_step,
        ranks=tuple(profile.ranks),
        gen_shape=profile.gen_shape,
        memory_snapshot_on_oom=trainer.memory_snapshot_on_oom,
    )


def _checkpoint(manager: ExpManager, *, trial: bool) -> CheckpointSpec:
    params = manager.checkpoint_callback_params
    if trial or not manager.create_checkpoint_callback:
        return CheckpointSpec(
            every_n_train_steps=None,
            train_time_interval_seconds=None,
            save_last=False,
            keep=params.keep,
            save_top_k=params.save_top_k,
            monitor=params.monitor,
            mode=params.mode,  # type: ignore[arg-type]  # validated
        )
    return CheckpointSpec(
        every_n_train_steps=params.every_n_train_steps,
        train_time_interval_seconds=parse_interval_seconds(params.train_time_interval),
        save_last=params.save_last,
        keep=params.keep,
        save_top_k=params.save_top_k,
        monitor=params.monitor,
        mode=params.mode,  # type: ignore[arg-type]  # validated
        async_save=params.async_save,
    )


def _observe(tree: Config, model: Model) -> ObserveSpec:
    """Return what is recorded; a trial (`fast_dev_run`) never uses a named run's directory."""
    manager, trainer = tree.exp_manager, tree.trainer
    trial = bool(trainer.fast_dev_run)
    return ObserveSpec(
        exp_dir=manager.exp_dir or DEFAULT_EXP_DIR,
        name=None if trial else manager.name,
        explicit_log_dir=manager.explicit_log_dir,
        resume_if_exists=manager.resume_if_exists and not trial,
        create_tensorboard_logger=manager.create_tensorboard_logger and not trial,
        create_wandb_logger=manager.create_wandb_logger and not trial,
        progress_bar=trainer.enable_progress_bar,
        wandb_project=manager.wandb_logger_kwargs.project,
        wandb_name=manager.wandb_logger_kwargs.name,
        wandb_entity=manager.wandb_logger_kwargs.entity,
        wandb_group=manager.wandb_logger_kwargs.group,
        wandb_tags=tuple(manager.wandb_logger_kwargs.tags),
        wandb_mode=manager.wandb_logger_kwargs.mode,  # type: ignore[arg-type]  # validated
        health=HealthSpec(
            mode=_health_mode(model),
            max_underflow=model.fp8_health_max_underflow,
            max_overflow=model.fp8_health_max_overflow,
            min_snr_db=model.fp8_health_min_snr_db,
        ),
    )


def _health_mode(model: Model) -> HealthMode:
    """Return the mode that `auto` stands for: `scales`, or `off` if a backend hides its casts."""
    if model.fp8_health != "auto":
        return model.fp8_health  # type: ignore[return-value]  # validated
    of_te = model.fp8_backend == "te" and not find_recipe(model.fp8_recipe).traits.has_history
    in_graph = model.fp8_backend == "torchao" and model.compile != "off"
    return "off" if of_te or in_graph else "scales"


def _validation_batches(trainer: Trainer) -> int:
    """Return the global batches of one validation; a trial of N steps has at most N.

    A share of the split becomes a number when the data is open.
    """
    given = trainer.limit_val_batches
    is_number = isinstance(given, int) or given == 0
    limit = int(given) if given is not None and is_number else VALIDATION_BATCHES
    return min(limit, int(trainer.fast_dev_run)) if trainer.fast_dev_run else limit


def _validation_share(trainer: Trainer) -> float | None:
    """Return the share of the validation split that is read, if that is given; not in a trial."""
    given = trainer.limit_val_batches
    return given if isinstance(given, float) and given > 0 and not trainer.fast_dev_run else None


def _nested(values: dict[str, Any]) -> dict[str, object]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        *sections, leaf = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree
