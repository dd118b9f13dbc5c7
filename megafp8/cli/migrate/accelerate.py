"""Hugging Face Accelerate's configuration file, its `fp8_config:` above all, in NeMo's names."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from megafp8.cli.migrate.report import Migration
from megafp8.config.values import plain

MARKS = ("fp8_config", "mixed_precision", "compute_environment", "num_processes")
"""Keys at the top of a file that only Accelerate has."""

LAUNCH_ONLY = frozenset(
    {
        "compute_environment", "debug", "distributed_type", "downcast_bf16", "dynamo_config",
        "enable_cpu_affinity", "machine_rank", "main_process_ip", "main_process_port",
        "main_training_function", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster",
        "tpu_use_sudo",
    }
)  # fmt: skip
"""How Accelerate starts and compiles: no part of what is computed."""

_NAMES = {"te": "TE", "ao": "AO", "msamp": "MSAMP"}

_SPELLINGS = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
"""What `accelerate config` (1.15) writes, and the names that the recipe classes, the launcher's
flags and the documentation have for the same things."""


def translate(tree: dict[str, Any], m: Migration) -> None:
    """Write into `m` what Accelerate's file asks for."""
    m.out["defaults"] = ["pretrain_gpt", "_self_"]
    block = tree.get("fp8_config")
    precision = str(tree.get("mixed_precision", "no")).lower()
    for key, value in tree.items():
        if key == "mixed_precision":
            _mixed_precision(value, m)
        elif key == "num_processes":
            m.change(key, value, {"trainer.devices": _per_node(tree)})
        elif key == "num_machines":
            m.change(key, value, {"trainer.num_nodes": value})
        elif key == "use_cpu":
            if value:
                m.change(key, value, {"trainer.accelerator": "cpu"})
            else:
                m.drop(key, value, "trainer.accelerator=auto takes the GPU if there is one")
        elif key == "fsdp_config" and value:
            m.decide(
                key, plain(value), "has no translation key by key",
                "Leave it out, and use model.fsdp=True with model.fsdp_sharding_strategy",
            )  # fmt: skip
        elif key == "gpu_ids" and str(value).lower() == "all":
            m.drop(key, value, "trainer.devices says how many")
        elif isinstance(value, dict) and not value and key != "fp8_config":
            m.drop(str(key), value, "it is empty")
        elif key in LAUNCH_ONLY:
            m.drop(key, value, "it is about Accelerate's own launcher")
        elif key != "fp8_config":
            m.decide(str(key), value, "has no translation", "See --help for what there is")
    if block is None and precision != "fp8":
        return
    if block is not None and not isinstance(block, dict):
        m.decide("fp8_config", block, "is not a block of keys", "Write the keys below it")
        return
    if precision != "fp8":
        for key, value in (block or {}).items():
            m.drop(f"fp8_config.{key}", value, f"mixed_precision={precision} runs without FP8")
        return
    kind = tree.get("distributed_type")
    _fp8_block(dict(block or {}), m, shards=kind is None or str(kind).upper() == "FSDP")


def _mixed_precision(value: Any, m: Migration) -> None:
    name = "no" if value is False else str(value).lower()  # YAML 1.1 reads `no` as False
    if name == "fp8":
        m.change("mixed_precision", value, {"trainer.precision": "bf16", "model.fp8": True})
    elif name == "bf16":
        m.change("mixed_precision", value, {"trainer.precision": "bf16"})
    elif name == "fp16":
        m.change("mixed_precision", value, {"trainer.precision": 16})
    elif name == "no":
        m.change("mixed_precision", value, {"trainer.precision": 32})
    else:
        m.decide(
            "mixed_precision", value, "is not supported yet",
            "Give trainer.precision=bf16, which needs no loss scale, or 32",
        )  # fmt: skip


def _per_node(tree: dict[str, Any]) -> Any:
    processes, machines = tree.get("num_processes"), tree.get("num_machines", 1)
    if isinstance(processes, int) and isinstance(machines, int) and machines > 0:
        return max(1, processes // machines)
    return processes


def _fp8_block(block: dict[str, Any], m: Migration, *, shards: bool) -> None:
    """`shards`: whether Accelerate may shard parameters in this job."""
    given = _with_one_spelling(block, m)
    values = {name: value for name, (_, value) in given.items()}
    backend = str(values.get("backend", "TE")).lower()
    if backend == "ao":
        _torchao_block(given, m, shards=shards)
        return
    if backend != "te":
        name = _NAMES.get(backend, plain(values.get("backend")))
        for path, value in given.values():
            ways = {
                "msamp": "MS-AMP's FP8 gradients and optimizer states are not supported. Decide "
                "for FP8 products with FP32 masters, as written",
            }
            hint = ways.get(backend, "Known backends are TE, AO and MSAMP")
            m.decide(path, value, f"belongs to the backend {name}", hint)
        return
    # Accelerate's own defaults, which are not NeMo's: said in full, so that none slips in.
    defaults = {
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "use_autocast_during_eval": False,
    }
    for name, value in defaults.items():
        given.setdefault(name, (f"fp8_config.{name} (Accelerate's default)", value))
    for name, (path, value) in given.items():
        handler = _TE_KEYS.get(name)
        if handler is None:
            m.decide(path, value, "has no translation", "See --help for what there is")
        else:
            handler(path, value, m)


def _with_one_spelling(block: dict[str, Any], m: Migration) -> dict[str, tuple[str, Any]]:
    """Each key's usual name, with the path as the file has it and the value.

    Accelerate's launcher takes each key with `fp8_` before it too. A key that is there in two
    spellings with two values must be decided.
    """
    given: dict[str, tuple[str, Any]] = {}
    for key, value in block.items():
        path, name = f"fp8_config.{key}", str(key)
        if name not in _TE_KEYS:
            name = name.removeprefix("fp8_")
            name = "fp8_format" if name == "format" else _SPELLINGS.get(name, name)
        if name not in _TE_KEYS:
            name = str(key)  # unknown: it keeps the name that the file has
        if name not in given:
            given[name] = (path, value)
        elif given[name][1] != value:
            other, _ = given[name]
            m.decide(path, value, f"says otherwise than {other}", "Keep one of the two")
    return given


def _torchao_block(given: dict[str, tuple[str, Any]], m: Migration, *, shards: bool) -> None:
    """torchao's default recipe is `tensorwise`; its first and last linear stay out of FP8."""
    for name, (path, value) in given.items():
        if name == "backend":
            chosen = {"model.fp8_backend": "torchao", "model.fp8_recipe": "tensorwise"}
            m.change(path, value, chosen)
        elif name == "pad_inner_dim":
            m.change(path, value, {"model.pad_inner_dim": bool(value)})
        elif name == "enable_fsdp_float8_all_gather" and value and shards:
            m.change(path, value, {"model.fsdp": True, "model.enable_fsdp_float8_all_gather": True})
        elif name == "enable_fsdp_float8_all_gather":
            reason = "it is about FSDP, which distributed_type does not ask for"
            m.drop(path, value, reason if value else "weights are not gathered in FP8 unless asked")
        elif name in _TE_KEYS:
            m.drop(path, value, "the backend AO does not read it")
        else:
            m.decide(path, value, "has no translation", "See --help for what there is")


def _backend(path: str, value: Any, m: Migration) -> None:
    m.change(
        path, value, {"model.fp8_backend": "auto"},
        note="Transformer Engine's arithmetic, by our own backend",
    )  # fmt: skip


def _format(path: str, value: Any, m: Migration) -> None:
    name = str(value).upper()
    if name == "HYBRID":
        m.change(path, value, {"model.fp8_hybrid": True, "model.fp8_e4m3": False})
    elif name == "E4M3":
        m.change(path, value, {"model.fp8_e4m3": True, "model.fp8_hybrid": False})
    else:
        m.decide(path, value, "is no format for training", "Give HYBRID or E4M3")


def _to(key: str) -> Callable[[str, Any, Migration], None]:
    def change(path: str, value: Any, m: Migration) -> None:
        spelling = path.removeprefix("fp8_config.").removeprefix("fp8_")
        m.change(path, value, {key: value}, note=_UNREAD if spelling in _SPELLINGS else "")

    return change


def _override_linear_precision(path: str, value: Any, m: Migration) -> None:
    """`(false, false, false)`: whether fprop, dgrad and wgrad are kept in high precision."""
    flags = value
    if isinstance(value, str):
        try:
            flags = ast.literal_eval(value.replace("false", "False").replace("true", "True"))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            flags = None
    wanted = [flag in (True, "True", "true") for flag in flags] if _is_row(flags) else None
    if wanted is None or len(wanted) != 3:
        m.decide(path, value, "is not three of true and false", "Give (false, false, false)")
    elif not any(wanted):
        m.drop(path, value, "all three products run in FP8")
    else:
        m.change(path, value, {"model.override_linear_precision": wanted})


def _is_row(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _foreign(backend: str) -> Callable[[str, Any, Migration], None]:
    return lambda path, value, m: m.drop(path, value, f"only the backend {backend} reads it")


_UNREAD = (
    "`accelerate config` writes this name, and Accelerate 1.15's launcher does not read it: there, "
    "such a run had a history of 1024 and most_recent"
)

_TE_KEYS: dict[str, Callable[[str, Any, Migration], None]] = {
    "backend": _backend,
    "fp8_format": _format,
    "amax_history_len": _to("model.fp8_amax_history_len"),
    "amax_compute_algo": _to("model.fp8_amax_compute_algo"),
    "margin": _to("model.fp8_margin"),
    "interval": _to("model.fp8_interval"),
    "override_linear_precision": _override_linear_precision,
    "use_autocast_during_eval": _to("model.use_autocast_during_eval"),
    "use_mxfp8_block_scaling": lambda path, value, m: (
        m.decide(path, value, "the recipe is not supported yet", "Give false")
        if value
        else m.drop(path, value, "the recipe is delayed scaling")
    ),
    "opt_level": _foreign("MSAMP"),
    "pad_inner_dim": _foreign("AO"),
    "enable_fsdp_float8_all_gather": _foreign("AO"),
}
