"""Read a script of Megatron, a file of Bridge or of Accelerate: which flags of it are audited."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megafp8.config.api import SettingError, megatron_flags, plain
from megafp8.foreign import ForeignFileError, parse_yaml
from megafp8_migrate import accelerate, bridge, megatron, refuse_for_yaml, texts_in
from megafp8_migrate.shell import read_script
from megafp8_migrate.shell_values import Holes, Script, ShellCommand

_PRECISION = re.compile(
    r"fp8|fp4|first_last_layers_bf16|_in_bf16$|tp_only_amax_red|quant_recipe|te_precision_config"
)
_NAMES_CODE = re.compile(
    r"factory|file|path|folder|(^|_)dir(_|$)|class|callable|function|hook|module|import|target|spec$"
    r"|config$|quant_recipe"
)
"""The names of settings whose values a framework imports, calls or opens."""
_PLAIN = re.compile(
    r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|(?!-)[\w+-]*|torch\.(bfloat16|float16|float32)",
    re.ASCII,
)
_MOST_LAYERS = 16
"""The most layers in BF16 at one end of the small model."""
_NOT_IN_TE = frozenset({"grad_reduce_in_bf16"})
KEPT = frozenset({
    "bf16", "fp16", "transformer_impl", "swiglu", "squared_relu", "normalization",
    "layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear", "add_qkv_bias",
    "untie_embeddings_and_output_weights", "qk_layernorm", "use_distributed_optimizer",
    "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "grad_reduce_in_bf16",
    "accumulate_allreduce_grads_in_fp32", "overlap_grad_reduce", "overlap_param_gather",
    "use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype",
    "exp_avg_sq_dtype", "recompute_activations", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "fp32_residual_connection", "deterministic_mode",
})  # fmt: skip
"""Megatron's settings that the small model has too; the others are the audit's own, or left out."""
_FORMAT = {"fp8_format": "fp8_format", "format": "fp8_format"}
"""The key of Accelerate's whose name has the prefix that other keys may have."""
_RANKS = "tensor_model_parallel_size"
_FEATURES = {
    "use_megatron_fsdp": "fsdp", "use_torch_fsdp2": "fsdp", "num_experts": "moe",
    "num_moe_experts": "moe", "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context", "multi_latent_attention": "latent",
    "enable_cuda_graph": "cuda_graph", "cuda_graph_impl": "cuda_graph", "optimizer_cpu_offload":
    "offload", "mtp_num_layers": "multi_token", "spec": "", "quick_geglu": "fusions",
    "hybrid_layer_pattern": "ssm", "use_transformer_engine_op_fuser": "extensions",
}  # fmt: skip
"""Features that the small model does not have, with a part of the names of their files."""


@dataclass(frozen=True)
class Flag:
    """Hold one flag that is audited.

    Attributes:
        name: Its name in the framework's configuration, such as `fp8_margin`.
        shown: The flag as the file has it, such as `--fp8-margin 2`.
        words: Its words in a command, or its section and key in a file.
        why_not: Why its value is not known; empty if it is.
    """

    name: str
    shown: str
    words: tuple[str, ...]
    why_not: str = ""


@dataclass(frozen=True)
class Request:
    """Hold what is to be audited, and in which surroundings.

    Attributes:
        framework: `megatron`, `bridge` or `accelerate`.
        flags: The audited flags.
        kept: Other words of a command that the small model has too.
        tree: The sections of a file.
        layouts: Layouts of two ranks.
        layers: The number of layers.
        environment: Variables that the script sets for its command.
        features: Flags of features that the small model leaves out, with a part of file names.
    """

    framework: str
    flags: tuple[Flag, ...]
    kept: tuple[str, ...] = ()
    tree: Mapping[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = ("dp2",)
    layers: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=dict)


def read(
    text: str,
    source: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    folder: Path | None = None,
) -> Request:
    """Return what a script or a YAML asks for.

    Args:
        text: The content of the file.
        source: The file's name, for messages and to tell a script from a YAML.
        arguments: A script's own arguments.
        env: Variables of the environment of the script.
        folder: Where the files are that a script names; None if none is read.

    Raises:
        SettingError: The text has no flag of precision, or is of a kind that is not audited.
    """
    if megatron.is_script(source, text):
        request = _of_script(read_script(text, arguments, env, texts_in(folder)), env)
    else:
        refuse_for_yaml(source, arguments)
        try:
            tree = parse_yaml(text)
        except ForeignFileError as error:
            raise SettingError(source, None, str(error), "Correct the file") from error
        if isinstance(tree, dict) and bridge.is_bridges(tree):
            request = _of_bridge(tree, env)
        elif isinstance(tree, dict) and any(mark in tree for mark in accelerate.MARKS):
            request = _of_accelerate(tree, env)
        else:
            hint = "Give a script of Megatron, or a YAML of Megatron Bridge or Accelerate"
            raise SettingError(source, None, "is no file whose flags are audited", hint)
    if not request.flags:
        reason = "has no flag about FP8 or FP4, so there is nothing to audit"
        raise SettingError(source, None, reason, "Give a file that has one")
    return request


def is_precision(name: str) -> bool:
    """Whether a setting of Megatron's is about FP8 or FP4."""
    return bool(_PRECISION.search(name)) and name not in _NOT_IN_TE


def is_plain(value: Any) -> bool:
    """Whether a value is a number, true, false or a word, or a list of these.

    It then names no file and no function of a module, as `os.system` or `/dev/stdin` would.
    """
    if isinstance(value, str):
        inner = value.strip("()[] ") if "," in value else value
        return all(_PLAIN.fullmatch(word.strip()) for word in inner.split(","))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float)


def _why_not(name: str, value: Any, sources: Sequence[str] = ()) -> str:
    """Return why a flag is in no run; empty if it is in some.

    Args:
        name: The flag's name in the framework's configuration.
        value: Its value, or a list of them.
        sources: What the value depends on that a script does not say.
    """
    if _NAMES_CODE.search(name):
        return "names code or a file, and the audit runs and opens nothing that a script names"
    if sources:
        return f"its value depends on {', '.join(sources)}, see --env"
    if not is_plain(value):
        return "names code or a file, or is no plain word, and is given to no code here"
    numbers = [str(item) for item in (value if isinstance(value, list) else [value])]
    if name.endswith("_in_bf16") and any(n.isdecimal() and int(n) > _MOST_LAYERS for n in numbers):
        return f"the small model has at most {_MOST_LAYERS} layers in BF16 at an end"
    return ""


def _of_script(script: Script, env: Mapping[str, str]) -> Request:
    command = megatron.training_commands(script)[0]
    flags, kept, features = list[Flag](), list[str](), dict[str, str]()
    ranks = ["dp2"]
    for flag, values in _groups(command):
        name, _ = megatron_flags().of_flag(flag[2:])
        shown = " ".join(script.holes.shown(word) for word in (flag, *values))
        sources = [source for value in values for source in script.holes.inside(value)]
        if is_precision(name):
            flags = [old for old in flags if old.name != name]  # the last one holds
            flags.append(Flag(name, shown, (flag, *values), _why_not(name, values, sources)))
        elif name == _RANKS and (sources or values != ["1"]):
            ranks = ["tp2", "dp2"]
        elif name in _FEATURES and values[:1] not in (["1"], ["0"], ["none"]):
            features[shown] = _FEATURES[name]
        elif name in KEPT and not sources and is_plain(values):
            kept += [flag, *values]
        elif name in KEPT:
            features[shown] = ""
    edges = {flag.name: flag.words[-1] for flag in flags if not flag.why_not}
    return Request(
        "megatron", tuple(flags), tuple(kept), layouts=tuple(ranks), layers=2 + _edges(edges),
        environment={**_told(command, script.holes), **env}, features=features,
    )  # fmt: skip


def _edges(values: Mapping[str, Any]) -> int:
    """Return the number of layers that stay in BF16, so that two others remain."""
    if not values.get("first_last_layers_bf16"):
        return 0
    said = [values.get(f"num_layers_at_{end}_in_bf16", 1) for end in ("start", "end")]
    return sum(int(number) if str(number).isdecimal() else 1 for number in said)


def _told(command: ShellCommand, holes: Holes) -> dict[str, str]:
    return {name: value for name, value in command.environment.items() if not holes.inside(value)}


def _groups(command: ShellCommand) -> list[tuple[str, list[str]]]:
    """Return the flags of a command, each with its values; `--a=b` is the flag with one value."""
    groups: list[tuple[str, list[str]]] = []
    for word in command.words[megatron.place_of_program(command.words) or 0 :]:
        if megatron.FLAG.fullmatch(word):
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
    return groups


def _of_bridge(tree: Mapping[str, Any], env: Mapping[str, str]) -> Request:
    leaves = dict(bridge.fields_of(tree))
    flags, sections = [], {name: {} for name in ("model", "ddp", "optimizer")}  # type: ignore[var-annotated]
    features, mixed = {}, None
    for (section, name), value in leaves.items():
        shown, known = (f"{section}.{name}", name) if name else (section, section)
        replaced = section != "mixed_precision" and ("mixed_precision", name) in leaves
        is_flag = is_precision(name) or (section == "mixed_precision" and not name)
        if is_flag and not replaced and value not in (None, False):
            why = _why_not(known, value)
            flags.append(Flag(known, f"{shown}={plain(value)}", (section, name), why))
        if name in _FEATURES and value not in (None, False, 0, 1, "none"):
            features[shown] = _FEATURES[name]
        if not is_plain(value) or _NAMES_CODE.search(name):
            continue
        if section == "mixed_precision":
            mixed = value if not name else {**(mixed or {}), name: value}
        if section in sections and name and not name.startswith("_"):
            sections[section][name] = value
    ranks = sections["model"].get(_RANKS)
    kept = {name: value for name, value in sections["model"].items()
            if name in KEPT or is_precision(name)}  # fmt: skip
    both = {**kept, **(mixed if isinstance(mixed, dict) else {})}
    return Request(
        "bridge", tuple(flags),
        tree={"model": kept, "ddp": sections["ddp"], "optimizer": _states(sections),
              "mixed_precision": mixed},
        layouts=("dp2",) if ranks in (None, 1) else ("tp2", "dp2"),
        layers=4 if isinstance(mixed, str) else 2 + _edges(both),
        environment=dict(env), features=features,
    )  # fmt: skip


def _states(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    wanted = ("use_distributed_optimizer", "bf16", "fp16")
    return {k: v for k, v in sections["optimizer"].items() if k in wanted or is_precision(k)}


def _of_accelerate(tree: Mapping[str, Any], env: Mapping[str, str]) -> Request:
    block = tree.get("fp8_config")
    if not isinstance(block, dict) or str(tree.get("mixed_precision", "no")).lower() != "fp8":
        reason = "has no fp8_config with mixed_precision: fp8, so there is nothing to audit"
        raise SettingError("mixed_precision", tree.get("mixed_precision"), reason,
                           "Give a file that trains with FP8")  # fmt: skip
    chosen = str(block.get("backend", block.get("fp8_backend", "TE"))).lower()
    if chosen != "te":
        raise SettingError("fp8_config.backend", chosen, "does not use Transformer Engine, whose "
                           "code the audit runs", "Give a file with the backend TE")  # fmt: skip
    flags = [
        Flag(_FORMAT.get(str(key), str(key).removeprefix("fp8_")),
             f"fp8_config.{key}={plain(value)}", ("fp8_config", str(key)),
             _why_not(str(key), [key, value]))
        for key, value in block.items() if str(key).removeprefix("fp8_") != "backend"
    ]  # fmt: skip
    kind = str(tree.get("distributed_type", "NO")).upper()
    features = {f"distributed_type={kind}": ""} if kind in ("FSDP", "DEEPSPEED") else {}
    return Request("accelerate", tuple(flags), tree={"fp8_config": block}, environment=dict(env),
                   features=features)  # fmt: skip
