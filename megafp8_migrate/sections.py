"""Translate Accelerate's sections about sharding, parallel ranks and compilation.

Accelerate reads a section only if `distributed_type` asks for it. The names and defaults are those
of Accelerate 1.15: `commands/config/cluster.py` writes them, `utils/dataclasses.py` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megafp8.config.api import plain
from megafp8_migrate.report import Migration

Handler = Callable[[str, Any, Migration], None]

SECTIONS = {
    "fsdp_config": "FSDP",
    "deepspeed_config": "DEEPSPEED",
    "megatron_lm_config": "MEGATRON_LM",
    "dynamo_config": None,
    "parallelism_config": None,
}
"""Accelerate's sections, each with the `distributed_type` without which it is not read."""

_STRATEGIES = {
    "FULL_SHARD": "full", "1": "full", "TRUE": "full",
    "SHARD_GRAD_OP": "grad", "2": "grad", "FALSE": "grad",
    "HYBRID_SHARD": "hybrid", "4": "hybrid",
}  # fmt: skip
_NOT_SHARDED = ("NO_SHARD", "3")
_REDUCES = {"bf16": "bf16", "fp8": "bf16", "fp16": 16}
"""The dtype in which Accelerate's FSDP sums gradients, by `mixed_precision`; FP32 otherwise."""

_BATCH = "${{multiply:${{model.micro_batch_size}},{}}}"
_LAYERS = "each transformer layer is sharded by itself; this changes no number"
_ORDER = "it changes when weights are sent, and no number"
_LOADING = "initial weights are drawn by name, the same on all ranks"
_FILES = "checkpoints are sharded safetensors, which load into any layout"
_STARTS = "srun, torchrun or trainer.devices starts the ranks; see docs/guide/slurm.md"
_NO_OFFLOAD = "asks for weights or states in host memory, which megafp8 does not have"
_USE_FSDP = "Give none, and use model.fsdp=True, which shards them over more ranks"

_STAGES: dict[int, dict[str, Any]] = {
    1: {"model.optim.name": "distributed_fused_adam"},
    2: {"model.fsdp": True, "model.fsdp_sharding_strategy": "grad"},
    3: {"model.fsdp": True, "model.fsdp_sharding_strategy": "full"},
}
_STAGE_2_OF_LEVELS = {
    "model.optim.name": "distributed_fused_adam",
    "model.optim.data_parallel_sharding_strategy": "optim_grads",
}
_DEFAULT_STAGE = 2  # of Accelerate's DeepSpeedPlugin


def translate_section(
    name: str, section: Mapping[Any, Any], tree: Mapping[str, Any], m: Migration
) -> None:
    """Translate the section `name` of the file `tree` into the migration `m`."""
    kind = tree.get("distributed_type")
    needed = SECTIONS[name]
    if needed is not None and kind is not None and str(kind).upper() != needed:
        for key, value in section.items():
            m.drop(f"{name}.{key}", value, f"distributed_type={kind} does not read it")
        return
    handlers = _HANDLERS[name](section, tree)
    for key, value in section.items():
        handler = handlers.get(_plain_name(name, str(key)))
        path = f"{name}.{key}"
        if handler is None:
            m.decide(path, value, "cannot be translated", "Look for a similar key in --help")
        else:
            handler(path, value, m)
    if name == "fsdp_config":
        _defaults_of_fsdp(section, tree, m)
    if name == "deepspeed_config":
        _default_of_deepspeed(section, tree, m)


def accumulation(tree: Mapping[str, Any]) -> Handler:
    """Return the handler of a number of microbatches, with which a step's samples grow."""

    def change(path: str, value: Any, m: Migration) -> None:
        count = whole_number(_read(value))
        if str(value).lower() == "auto":
            m.drop(path, value, "model.global_batch_size and model.micro_batch_size give it")
        elif count is None:
            m.decide(path, value, "is not a number of microbatches", "Give 1 or more")
        elif (replicas := _replicas(tree)) is None:
            m.decide(
                path, value, "multiplies the batches of the replicas, and num_processes does not "
                "say how many there are", "Give model.global_batch_size",
            )  # fmt: skip
        else:
            samples = _BATCH.format(count * replicas)
            m.change(path, value, {"model.global_batch_size": samples})

    return change


def whole_number(value: Any) -> int | None:
    """Return a number of 1 or more as it is, and None for any other value."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return value if is_int and value > 0 else None


def per_node(tree: Mapping[str, Any]) -> int | None:
    """Return the number of ranks of a node; None if the file does not say it by whole numbers."""
    processes = whole_number(tree.get("num_processes"))
    machines = whole_number(tree.get("num_machines", 1))
    if processes is None or machines is None:
        return None
    return max(1, processes // machines)


def without_section(value: Any, tree: Mapping[str, Any], m: Migration) -> None:
    """Translate `distributed_type` where it asks for a section that the file does not have.

    FSDP then has Accelerate's defaults. What the other types do is in their sections alone.
    """
    section = next(name for name, kind in SECTIONS.items() if kind == str(value).upper())
    if section == "fsdp_config":
        m.drop("distributed_type", value, f"without {section}, FSDP has Accelerate's defaults")
        _defaults_of_fsdp({}, tree, m)
        return
    m.decide(
        "distributed_type", value, f"the file has no {section}, which says how the ranks share the "
        "work",
        f"Write the settings of {section} under their names here (docs/guide/parallelism.md)",
    )  # fmt: skip


def lacks_section(tree: Mapping[str, Any]) -> bool:
    """Whether a file's `distributed_type` asks for a section that is missing or empty."""
    kind = str(tree.get("distributed_type")).upper()
    return any(kind == needed and not tree.get(name) for name, needed in SECTIONS.items())


def _plain_name(section: str, key: str) -> str:
    """Return a key without its section's prefix, which some versions of Accelerate write."""
    prefix = {"dynamo_config": "dynamo_", "deepspeed_config": "deepspeed_"}.get(
        section, section.removesuffix("_config") + "_"
    )
    if section == "parallelism_config":
        prefix = "parallelism_config_"
    return key.removeprefix(prefix)


def _size(tree: Mapping[str, Any], section: str, name: str) -> int:
    given = tree.get(section)
    for key, value in (given if isinstance(given, dict) else {}).items():
        if _plain_name(section, str(key)) == name:
            return whole_number(_read(value)) or 1
    return 1


def _read(value: Any) -> Any:
    """Return a text of digits as its number, as Accelerate reads a section's numbers."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _replicas(tree: Mapping[str, Any]) -> int | None:
    """Return the number of data-parallel replicas; None if the file does not say it."""
    processes = whole_number(tree.get("num_processes", 1))
    shared = 1
    for section, name in (
        ("parallelism_config", "tp_size"), ("parallelism_config", "cp_size"),
        ("megatron_lm_config", "tp_degree"), ("megatron_lm_config", "pp_degree"),
    ):  # fmt: skip
        shared *= _size(tree, section, name)
    return None if processes is None else max(1, processes // shared)


# --- handlers of single keys ----------------------------------------------------------------------


def _drop(reason: str) -> Handler:
    return lambda path, value, m: m.drop(path, value, reason)


def _to(key: str) -> Handler:
    return lambda path, value, m: m.change(path, value, {key: value})


def _switch(on: dict[str, Any], off: str) -> Handler:
    """Return the handler of a flag: the settings of true, and what is so with false."""

    def change(path: str, value: Any, m: Migration) -> None:
        if str(value).lower() in ("true", "1", "yes"):
            m.change(path, value, dict(on))
        else:
            m.drop(path, value, off)

    return change


def _no_offload(path: str, value: Any, m: Migration) -> None:
    if str(value).lower() in ("none", "false", "no"):
        m.drop(path, value, "nothing is moved to host memory")
    else:
        m.decide(path, value, _NO_OFFLOAD, _USE_FSDP)


def _clipping(path: str, value: Any, m: Migration) -> None:
    if str(value).lower() == "auto":
        m.drop(path, value, "the training script gives it; here trainer.gradient_clip_val does")
    else:
        m.change(path, value, {"trainer.gradient_clip_val": value})


# --- FSDP -----------------------------------------------------------------------------------------


def _fsdp(section: Mapping[Any, Any], tree: Mapping[str, Any]) -> dict[str, Handler]:
    whole_layers = {
        "model.activations_checkpoint_granularity": "full",
        "model.activations_checkpoint_method": "uniform",
        "model.activations_checkpoint_num_layers": 1,
    }
    return {
        "version": _drop("megafp8 shards with FSDP2; both versions compute the same"),
        "sharding_strategy": _strategy(tree),
        "reshard_after_forward": _strategy(tree),
        "offload_params": _no_offload,
        "activation_checkpointing": _switch(whole_layers, "nothing is recomputed"),
        "auto_wrap_policy": _drop(_LAYERS),
        "transformer_layer_cls_to_wrap": _drop(_LAYERS),
        "min_num_params": _drop(_LAYERS),
        "backward_prefetch": _drop(_ORDER),
        "backward_prefetch_policy": _drop(_ORDER),
        "forward_prefetch": _drop(_ORDER),
        "limit_all_gathers": _drop(_ORDER),
        "state_dict_type": _drop(_FILES),
        "use_orig_params": _drop("FSDP2 always keeps the original parameters"),
        "sync_module_states": _drop(_LOADING),
        "cpu_ram_efficient_loading": _drop(_LOADING),
    }


def _strategy(tree: Mapping[str, Any]) -> Handler:
    one_node = tree.get("num_machines", 1) == 1

    def change(path: str, value: Any, m: Migration) -> None:
        name = str(value).upper()
        chosen = _STRATEGIES.get(name)
        if name in _NOT_SHARDED:
            m.drop(path, value, "weights are not sharded by default")
        elif chosen is None:
            m.decide(
                path, value, "has no equivalent in megafp8",
                "Give FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD",
            )  # fmt: skip
        else:
            same = chosen == "hybrid" and one_node
            settings = {"model.fsdp_sharding_strategy": "full" if same else chosen}
            note = "on one node both are the same" if same else ""
            m.change(path, value, {"model.fsdp": True} | settings, note=note)

    return change


def _defaults_of_fsdp(section: Mapping[Any, Any], tree: Mapping[str, Any], m: Migration) -> None:
    """Write what Accelerate does without being asked: whole shards, sums in the compute dtype."""
    names = {_plain_name("fsdp_config", str(key)) for key in section}
    if not names & {"sharding_strategy", "reshard_after_forward"}:
        default = "fsdp_config.fsdp_sharding_strategy (Accelerate's default)"
        _strategy(tree)(default, "FULL_SHARD", m)
    dtype = _REDUCES.get(str(tree.get("mixed_precision", "no")).lower())
    if dtype is not None and m.out.get("model", {}).get("fsdp"):
        m.change(
            "mixed_precision, as FSDP's dtype of gradients", tree["mixed_precision"],
            {"model.fsdp_grad_reduce_dtype": dtype},
        )  # fmt: skip


# --- DeepSpeed ------------------------------------------------------------------------------------


def _deepspeed(section: Mapping[Any, Any], tree: Mapping[str, Any]) -> dict[str, Handler]:
    return {
        "zero_stage": _zero_stage(tree),
        "gradient_accumulation_steps": accumulation(tree),
        "gradient_clipping": _clipping,
        "offload_optimizer_device": _no_offload,
        "offload_param_device": _no_offload,
        "offload_optimizer_nvme_path": _drop("nothing is moved to NVMe"),
        "offload_param_nvme_path": _drop("nothing is moved to NVMe"),
        "zero3_init_flag": _drop("each rank makes only its own part of the weights"),
        "zero3_save_16bit_model": _drop("megafp8 export writes the weights of a checkpoint"),
        "moe_layer_cls_names": _drop("models have no experts"),
        "multinode_launcher": _drop(_STARTS),
        "hostfile": _drop(_STARTS),
        "inclusion_filter": _drop(_STARTS),
        "exclusion_filter": _drop(_STARTS),
        "config_file": lambda path, value, m: m.decide(
            path, value, "names a file with settings that are not read here",
            "Write zero_stage, gradient_accumulation_steps and gradient_clipping of that file "
            "below deepspeed_config, and leave it out",
        ),
    }  # fmt: skip


def _default_of_deepspeed(
    section: Mapping[Any, Any], tree: Mapping[str, Any], m: Migration
) -> None:
    """Write the stage that Accelerate takes if neither the section nor its own file has one."""
    names = {_plain_name("deepspeed_config", str(key)) for key in section}
    if not names & {"zero_stage", "config_file"}:
        path = "deepspeed_config.zero_stage (Accelerate's default)"
        _zero_stage(tree)(path, _DEFAULT_STAGE, m)


def _has_level(tree: Mapping[str, Any]) -> bool:
    """Whether a file asks for FP8 by MS-AMP, which has the levels of FP8-LM."""
    block = tree.get("fp8_config")
    keys = block.items() if isinstance(block, Mapping) else ()
    backends = {str(v).lower() for key, v in keys if str(key).removeprefix("fp8_") == "backend"}
    return backends == {"msamp"} and str(tree.get("mixed_precision")).lower() == "fp8"


def _zero_stage(tree: Mapping[str, Any]) -> Handler:
    # FSDP refuses levels
    stages = _STAGES | ({2: _STAGE_2_OF_LEVELS} if _has_level(tree) else {})

    def translate(path: str, value: Any, m: Migration) -> None:
        value = _read(value)
        settings = stages.get(whole_number(value) or 0)
        if value == 0 and not isinstance(value, bool):
            m.drop(path, value, "nothing is sharded by default")
        elif settings is not None:
            m.change(
                path, value, settings,
                note="gradients are summed in FP32; DeepSpeed's communication_data_type may be "
                "another",
            )  # fmt: skip
        else:
            m.decide(path, value, "is not a stage of ZeRO", "Give 0, 1, 2 or 3")

    return translate


# --- Megatron-LM and parallel sizes ---------------------------------------------------------------


def _megatron(section: Mapping[Any, Any], tree: Mapping[str, Any]) -> dict[str, Handler]:
    return {
        "tp_degree": _to("model.tensor_model_parallel_size"),
        "pp_degree": _to("model.pipeline_model_parallel_size"),
        "num_micro_batches": accumulation(tree),
        "sequence_parallelism": _switch(
            {"model.sequence_parallel": True}, "sequences are not sharded by default"
        ),
        "recompute_activations": _switch(
            {"model.activations_checkpoint_granularity": "selective"}, "nothing is recomputed"
        ),
        "use_distributed_optimizer": _switch(
            {"model.optim.name": "distributed_fused_adam"}, "states are not sharded by default"
        ),
        "gradient_clipping": _clipping,
    }


def _parallelism(section: Mapping[Any, Any], tree: Mapping[str, Any]) -> dict[str, Handler]:
    replicates = _size(tree, "parallelism_config", "dp_replicate_size") > 1

    def shards(path: str, value: Any, m: Migration) -> None:
        ranks = whole_number(_read(value))
        local = per_node(tree) if "num_processes" in tree else ranks
        if ranks is None:
            m.decide(path, value, "is not a number of ranks", "Give 1 or more")
        elif ranks == 1:
            m.drop(path, value, "weights are not sharded by default")
        elif replicates and local is None:
            m.decide(
                path, value, "has replicas, and num_processes and num_machines do not say how many "
                "ranks a node has", "Give model.fsdp=True with model.fsdp_sharding_strategy=hybrid "
                "if each node has a replica",
            )  # fmt: skip
        elif replicates and ranks != local:
            m.decide(
                path, value, f"shards over other groups than the {local} ranks of a node",
                f"Give {local}, which is model.fsdp_sharding_strategy=hybrid, or 1",
            )  # fmt: skip
        else:
            strategy = "hybrid" if replicates else "full"
            settings = {"model.fsdp": True, "model.fsdp_sharding_strategy": strategy}
            m.change(path, value, settings)

    return {
        "tp_size": _to("model.tensor_model_parallel_size"),
        "cp_size": _to("model.context_parallel_size"),
        "cp_comm_strategy": _drop("keys and values go from rank to rank; this changes no number"),
        "dp_replicate_size": _drop("the ranks that remain are replicas"),
        "dp_shard_size": shards,
    }


# --- compilation ----------------------------------------------------------------------------------


def _dynamo(section: Mapping[Any, Any], tree: Mapping[str, Any]) -> dict[str, Handler]:
    compiles = any(
        _plain_name("dynamo_config", str(key)) == "backend" and str(value).lower() != "no"
        for key, value in section.items()
    )
    whole = "layers are compiled with torch's defaults; this changes no number but by rounding"

    def regional(path: str, value: Any, m: Migration) -> None:
        if not compiles:
            m.drop(path, value, "no dynamo_backend is given, so that nothing is compiled")
        else:
            m.drop(
                path, value, "model.compile=block compiles the repeated layer, and no other part"
            )

    return {
        "backend": _compiler,
        "mode": _drop(whole if compiles else "nothing is compiled"),
        "use_fullgraph": _drop("a layer is always one graph"),
        "use_dynamic": _drop("all batches have one size"),
        "use_regional_compilation": regional,
    }


def _compiler(path: str, value: Any, m: Migration) -> None:
    name = "no" if value is False else str(value).lower()  # YAML 1.1 reads `no` as False
    if name == "no":
        m.drop(path, value, "nothing is compiled by default")
    elif name == "inductor":
        m.change(path, value, {"model.compile": "block"})
    else:
        hint = "Give INDUCTOR, which is model.compile=block, or NO"
        m.decide(path, plain(value), "is a compiler that megafp8 does not use", hint)


_HANDLERS: dict[str, Callable[[Mapping[Any, Any], Mapping[str, Any]], dict[str, Handler]]] = {
    "fsdp_config": _fsdp,
    "deepspeed_config": _deepspeed,
    "megatron_lm_config": _megatron,
    "dynamo_config": _dynamo,
    "parallelism_config": _parallelism,
}
