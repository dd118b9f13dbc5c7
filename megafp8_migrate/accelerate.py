"""Translate the configuration file of Hugging Face Accelerate, with its `fp8_config:` block."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from megafp8.config.api import plain
from megafp8_migrate import sections
from megafp8_migrate.ignored import note_of
from megafp8_migrate.report import Migration

MARKS = ("fp8_config", "mixed_precision", "compute_environment", "num_processes")
"""Top-level keys by which a file of Accelerate is recognized."""

LAUNCH_ONLY = frozenset(
    {
        "compute_environment", "debug", "distributed_type", "downcast_bf16",
        "enable_cpu_affinity", "machine_rank", "main_process_ip", "main_process_port",
        "main_training_function", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster",
        "tpu_use_sudo",
    }
)  # fmt: skip
"""Keys about how Accelerate starts a job; they do not change what is computed."""

_COUNTS = {"num_processes": "ranks", "num_machines": "nodes"}

_NAMES = {"te": "TE", "ao": "AO", "msamp": "MSAMP"}

_SPELLINGS = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
"""Names that `accelerate config` (1.15) writes, and those that the rest of Accelerate uses for the
same things: its recipe classes, its launcher's options and its documentation."""

_WITH_TE = (
    "with model.fp8_backend=te Transformer Engine's layers compute the products, and the level "
    "stays; the preset precision=fp8_lm_te has both"
)
_UNREAD = (
    "`accelerate config` writes this name, but Accelerate 1.15's launcher does not read it and "
    "uses a history of 1024 and Transformer Engine's default, max"
)
_NOT_PASSED_ON = (
    "the numbers change: Accelerate 1.15 passes on only what differs from its own default, which "
    "most_recent is, so that Transformer Engine used its default, max"
)
_UNREAD_LEVEL = (
    "`accelerate config` writes this name, but Accelerate 1.15's launcher does not read it and "
    "uses O2"
)
_PADS = (
    "it pads sizes that are no multiples of 16, and is refused where there are none; give "
    "model.pad_inner_dim=True to a model that has such sizes"
)
_SEE_HELP = "Look for a similar key in pretrain_gpt.py --help"


_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp8": {"trainer.precision": "bf16", "model.fp8": True},
    "bf16": {"trainer.precision": "bf16"},
    "fp16": {"trainer.precision": 16},
    "no": {"trainer.precision": 32},
}
"""The settings of each `mixed_precision`."""


def translate_accelerate(tree: dict[str, Any], m: Migration) -> None:
    """Translate the tree of an Accelerate file into the migration `m`."""
    m.out["defaults"] = ["pretrain_gpt", "_self_"]
    block = tree.get("fp8_config")
    precision = str(tree.get("mixed_precision", "no")).lower()
    for key, value in tree.items():
        if key == "mixed_precision":
            _mixed_precision(value, m)
        elif key in _COUNTS and sections.whole_number(value) is None:
            m.decide(key, value, f"is not a number of {_COUNTS[key]}", "Give 1 or more")
        elif key == "num_processes" and (ranks := sections.per_node(tree)) is None:
            reason = "is the number of ranks of all nodes, and num_machines is not a number"
            m.decide(key, value, reason, "Give trainer.devices, the ranks of a node")
        elif key == "num_processes":
            m.change(key, value, {"trainer.devices": ranks})
        elif key == "num_machines":
            m.change(key, value, {"trainer.num_nodes": value})
        elif key == "distributed_type" and sections.lacks_section(tree):
            sections.without_section(value, tree, m)
        elif key == "use_cpu":
            if value:
                m.change(key, value, {"trainer.accelerator": "cpu"})
            else:
                m.drop(key, value, "trainer.accelerator=auto uses the GPU if there is one")
        elif key in sections.SECTIONS and isinstance(value, dict) and value:
            sections.translate_section(key, value, tree, m)
        elif key == "gradient_accumulation_steps":
            sections.accumulation(tree)(key, value, m)
        elif key == "gpu_ids" and str(value).lower() == "all":
            m.drop(key, value, "trainer.devices sets the number of GPUs")
        elif key != "fp8_config" and value in ({}, None):
            m.drop(str(key), value, "it is empty")
        elif key in LAUNCH_ONLY:
            m.drop(key, value, "it is about Accelerate's own launcher")
        elif key != "fp8_config":
            m.decide(str(key), value, "cannot be translated", _SEE_HELP)
    if block is None and precision != "fp8":
        return
    if block is not None and not isinstance(block, dict):
        m.decide("fp8_config", block, "is not a block of keys", "Write keys below fp8_config")
        return
    if precision != "fp8":
        for key, value in (block or {}).items():
            m.drop(f"fp8_config.{key}", value, f"mixed_precision={precision} runs without FP8")
        return
    kind = tree.get("distributed_type")
    _fp8_block(dict(block or {}), m, shards=kind is None or str(kind).upper() == "FSDP")


def _mixed_precision(value: Any, m: Migration) -> None:
    name = "no" if value is False else str(value).lower()  # YAML 1.1 reads `no` as False
    if name in _PRECISIONS:
        m.change("mixed_precision", value, _PRECISIONS[name])
    else:
        m.decide(
            "mixed_precision", value, "is not supported",
            "Set trainer.precision to bf16, 16 or 32",
        )  # fmt: skip


def _fp8_block(block: dict[str, Any], m: Migration, *, shards: bool) -> None:
    """Translate `fp8_config`; `shards` says whether Accelerate may shard parameters in this job."""
    given = _with_one_spelling(block, m)
    values = {name: value for name, (_, value) in given.items()}
    backend = str(values.get("backend", "TE")).lower()
    if backend == "ao":
        _torchao_block(given, m, shards=shards)
        return
    if backend == "msamp":
        _msamp_block(given, m)
        return
    if backend != "te":
        name = _NAMES.get(backend, plain(values.get("backend")))
        for path, value in given.values():
            hint = "Known backends are TE, AO and MSAMP"
            m.decide(path, value, f"belongs to the backend {name}", hint)
        return
    # What runs without a value differs from NeMo's defaults, so all of it is written into the new
    # file. Accelerate's own algorithm, most_recent, does not reach Transformer Engine.
    defaults = {
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "use_autocast_during_eval": False,
    }
    for name, value in defaults.items():
        given.setdefault(name, (f"fp8_config.{name} (what Accelerate runs without it)", value))
    for name, (path, value) in given.items():
        handler = _TE_KEYS.get(name)
        if handler is None:
            m.decide(path, value, "cannot be translated", _SEE_HELP)
        else:
            handler(path, value, m)


def _with_one_spelling(block: dict[str, Any], m: Migration) -> dict[str, tuple[str, Any]]:
    """Return, by each key's usual name, its path in the file and its value.

    Accelerate's launcher also accepts each key with the prefix `fp8_`. A key that the file has in
    two spellings with different values must be decided.
    """
    given: dict[str, tuple[str, Any]] = {}
    for key, value in block.items():
        path, name = f"fp8_config.{key}", str(key)
        if name not in _TE_KEYS:
            name = name.removeprefix("fp8_")
            name = "fp8_format" if name == "format" else _SPELLINGS.get(name, name)
        if name not in _TE_KEYS:
            name = str(key)  # an unknown key keeps its name in the file
        if name not in given:
            given[name] = (path, value)
        elif given[name][1] != value:
            other, _ = given[name]
            m.decide(path, value, f"contradicts {other}", "Keep one of the two")
    return given


def _torchao_block(given: dict[str, tuple[str, Any]], m: Migration, *, shards: bool) -> None:
    """Translate the keys of the backend AO; torchao's default recipe is `tensorwise`."""
    for name, (path, value) in given.items():
        if name == "backend":
            chosen = {"model.fp8_backend": "torchao", "model.fp8_recipe": "tensorwise"}
            m.change(path, value, chosen)
        elif name == "pad_inner_dim":
            m.drop(path, value, _PADS if value else "sizes are not padded by default")
        elif name == "enable_fsdp_float8_all_gather" and value and shards:
            m.change(path, value, {"model.fsdp": True, "model.enable_fsdp_float8_all_gather": True})
        elif name == "enable_fsdp_float8_all_gather":
            on = "it is about FSDP, which distributed_type does not ask for"
            m.drop(path, value, on if value else "weights are not gathered in FP8 by default")
        elif name in _TE_KEYS:
            m.drop(path, value, "the backend AO does not read it")
        else:
            m.decide(path, value, "cannot be translated", _SEE_HELP)


def _msamp_block(given: dict[str, tuple[str, Any]], m: Migration) -> None:
    """Translate the keys of the backend MSAMP; Accelerate's default level is O2."""
    given.setdefault("opt_level", ("fp8_config.opt_level (Accelerate's default)", "O2"))
    for name, (path, value) in given.items():
        if name == "backend":
            chosen = {"model.fp8_backend": "native", "model.fp8_recipe": "delayed"}
            m.change(path, value, chosen, note=_WITH_TE)
        elif name == "opt_level" and value in ("O1", "O2"):
            written = path.removeprefix("fp8_config.").removeprefix("fp8_") in _SPELLINGS
            note = _UNREAD_LEVEL if written else ""
            m.change(path, value, {"model.optim.fp8_opt_level": value}, note=note)
        elif name == "opt_level":
            m.decide(path, value, "is not a level that Accelerate has", "Give O1 or O2")
        elif name in _TE_KEYS:
            m.drop(path, value, "the backend MSAMP does not read it")
        else:
            m.decide(path, value, "cannot be translated", _SEE_HELP)


def _backend(path: str, value: Any, m: Migration) -> None:
    m.change(
        path, value, {"model.fp8_backend": "auto"},
        note="on a GPU Transformer Engine where it can run the job, else megafp8's own engine, "
        "which follows the same rules",
    )  # fmt: skip


def _format(path: str, value: Any, m: Migration) -> None:
    name = str(value).upper()
    if name == "HYBRID":
        m.change(path, value, {"model.fp8_hybrid": True, "model.fp8_e4m3": False})
    elif name == "E4M3":
        m.change(path, value, {"model.fp8_e4m3": True, "model.fp8_hybrid": False})
    else:
        m.decide(path, value, "is not a format for training", "Give HYBRID or E4M3")


def _to(key: str) -> Callable[[str, Any, Migration], None]:
    """Return what translates a key of theirs into `key` of ours, with the same value."""

    def change(path: str, value: Any, m: Migration) -> None:
        spelling = path.removeprefix("fp8_config.").removeprefix("fp8_")
        note = _UNREAD if spelling in _SPELLINGS else note_of(key, value)
        if not note and value == "most_recent":
            note = _NOT_PASSED_ON
        m.change(path, value, {key: value}, note=note)

    return change


def _override_linear_precision(path: str, value: Any, m: Migration) -> None:
    """Translate `(false, false, false)`: whether fprop, dgrad and wgrad stay in high precision."""
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
        key = "model.override_linear_precision"
        m.change(path, value, {key: wanted}, note=note_of(key, wanted))


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
        m.decide(path, value, "asks for a recipe that is not supported", "Give false")
        if value
        else m.drop(path, value, "the recipe is delayed scaling")
    ),
    "opt_level": _foreign("MSAMP"),
    "pad_inner_dim": _foreign("AO"),
    "enable_fsdp_float8_all_gather": _foreign("AO"),
}
