"""Hugging Face Accelerate's configuration file, its `fp8_config:` above all, in NeMo's names."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from megafp8.config.migration import Migration
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
        elif key == "fsdp_config":
            m.decide(
                key, plain(value), "has no translation key by key",
                "Leave it out, and use model.fsdp=True with model.fsdp_sharding_strategy",
            )  # fmt: skip
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
    _fp8_block(dict(block or {}), m)


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


def _fp8_block(block: dict[str, Any], m: Migration) -> None:
    backend = str(block.get("backend", "TE")).lower()
    if backend == "ao":
        _torchao_block(block, m)
        return
    if backend != "te":
        name = _NAMES.get(backend, plain(block.get("backend")))
        for key, value in block.items():
            ways = {
                "msamp": "MS-AMP's FP8 gradients and optimizer states are not supported. Decide "
                "for FP8 products with FP32 masters, as written",
            }
            way_out = ways.get(backend, "Known backends are TE, AO and MSAMP")
            m.decide(f"fp8_config.{key}", value, f"belongs to the backend {name}", way_out)
        return
    given = dict(block)
    # Accelerate's own defaults, which are not NeMo's: said in full, so that none slips in.
    given.setdefault("fp8_format", "HYBRID")
    given.setdefault("amax_history_len", 1024)
    given.setdefault("amax_compute_algo", "most_recent")
    given.setdefault("use_autocast_during_eval", False)
    for key, value in given.items():
        path = f"fp8_config.{key}" if key in block else f"fp8_config.{key} (Accelerate's default)"
        handler = _TE_KEYS.get(key)
        if handler is None:
            m.decide(path, value, "has no translation", "See --help for what there is")
        else:
            handler(path, value, m)


def _torchao_block(block: dict[str, Any], m: Migration) -> None:
    """torchao's default recipe is `tensorwise`; its first and last linear stay out of FP8."""
    for key, value in block.items():
        path = f"fp8_config.{key}"
        if key == "backend":
            chosen = {"model.fp8_backend": "torchao", "model.fp8_recipe": "tensorwise"}
            m.change(path, value, chosen)
        elif key == "pad_inner_dim":
            m.change(path, value, {"model.pad_inner_dim": bool(value)})
        elif key == "enable_fsdp_float8_all_gather" and value:
            m.change(path, value, {"model.fsdp": True, "model.enable_fsdp_float8_all_gather": True})
        elif key in _TE_KEYS:
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
    return lambda path, value, m: m.change(path, value, {key: value})


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
