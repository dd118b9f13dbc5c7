"""Translate YAML files of Megatron Bridge: overrides of a recipe, and `run_config.yaml` of a run.

Bridge's fields have the names of Megatron's settings, in sections. A saved run has every field; a
file of overrides has those that differ from a recipe, which is Python code that is not read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megafp8.config.api import REFUSED_PRESETS, conf_dir, megatron_flags, preset_names
from megafp8_migrate import megatron_rules
from megafp8_migrate.megatron_settings import GivenSetting, MegatronSettings
from megafp8_migrate.report import Migration

SECTIONS = (
    "model", "train", "optimizer", "scheduler", "ddp", "dataset", "tokenizer", "checkpoint",
    "logger", "rng", "validation", "dist", "mixed_precision", "profiling", "rerun_state_machine",
    "ft", "straggler", "nvrx_straggler", "inprocess_restart", "comm_overlap", "tensor_inspect",
    "env_vars", "peft", "optimizer_config_override_provider",
)  # fmt: skip
_MARKS = frozenset({"train", "scheduler", "ddp", "dataset", "logger", "checkpoint", "rng", "dist"})
_OF_BRIDGE_ALONE = {
    "checkpoint": "checkpoints are sharded safetensors of their own format",
    "logger": "metrics.jsonl and the trackers have what a run records",
    "dist": "it is about how processes find each other",
    "rng": "masks of dropout are drawn from seed, step and place",
    "rerun_state_machine": "trainer.nonfinite_policy says what happens after a NaN",
    "ft": "trainer.max_restarts and trainer.step_timeout restart a run",
    "straggler": "metrics.jsonl has the share of time in which a step waited for data",
    "nvrx_straggler": "metrics.jsonl has the share of time in which a step waited for data",
    "inprocess_restart": "trainer.max_restarts restarts a run",
    "comm_overlap": "it changes times only",
    "tensor_inspect": "model.fp8_health measures tensors",
    "env_vars": "variables are set where a run is started",
    "profiling": "it is about Bridge's own profiles",
    "ddp": "it is about Bridge's own buffers of gradients",
}
"""Sections whose unknown fields change no number, with what megafp8 does."""
_OFF: tuple[Any, ...] = (None, False, [], {}, "")
_NAMES = {
    ("model", "virtual_pipeline_model_parallel_size"): "num_virtual_stages_per_pipeline_rank",
    ("model", "cross_entropy_fusion"): "cross_entropy_loss_fusion",
    ("dataset", "sequence_length"): "seq_length",
    ("profiling", "use_nsys_profiler"): "profile",
    ("dataset", "mock"): "mock_data",
    ("dataset", "inter_document_masking"): "dataloader_inter_document_masking",
    ("model", "rope_scaling"): "use_rope_scaling",
    ("model", "yarn_rotary_scaling_factor"): "rotary_scaling_factor",
    ("model", "yarn_mscale"): "mscale",
    ("model", "yarn_mscale_all_dim"): "mscale_all_dim",
}
_DEFAULT_PROVIDER = "megatron.bridge.training.config.OptimizerConfigOverrideProvider"
_ACTIVATIONS = {"silu": "swiglu", "squared_relu": "squared_relu"}


def is_bridges(tree: Mapping[Any, Any]) -> bool:
    """Whether a tree has the sections of Megatron Bridge's configuration."""
    if "megatron.bridge" in str(tree.get("_target_", "")):
        return True
    known = [key for key in tree if key in SECTIONS]
    sections = [key for key in known if isinstance(tree[key], dict)]
    others = {str(key) for key in tree} - set(SECTIONS)
    return len(_MARKS & set(sections)) >= 1 and not others & {"trainer", "exp_manager"}


def translate_bridge(tree: Mapping[Any, Any], m: Migration) -> None:
    """Translate the tree of a Bridge file into the migration `m`."""
    m.out["defaults"] = ["pretrain_gpt", "_self_"]
    settings = MegatronSettings(source="")
    leaves = dict(fields_of(tree))
    _recipe(tree, leaves, m)
    _precision(leaves, m)
    _model(leaves, settings, m)
    _data(leaves, settings, m)
    _weight_decay(leaves, settings, m)
    _initial(leaves, m)
    _vocabulary(leaves, m)
    for (section, name), value in leaves.items():
        _field(section, name, value, settings, m)
    m.decide("trainer.devices", "???", "Bridge's files do not have the number of ranks",
             "Give the ranks of a node, and trainer.num_nodes")  # fmt: skip
    megatron_rules.translate(settings, m)


def fields_of(tree: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield each field of a Bridge file, as its section and name, with its value."""
    for section, fields in tree.items():
        if str(section).startswith("_"):
            continue
        if section == "model" and isinstance(fields, dict) and _is_config(fields):
            fields = {**fields, **fields["transformer"]}
            del fields["transformer"]
        if not isinstance(fields, dict) or "_target_" in fields and len(fields) <= 2:
            yield (str(section), ""), _plain(fields)
            continue
        for name, value in fields.items():
            if not str(name).startswith("_"):
                yield (str(section), str(name)), _plain(value)
            elif name == "_target_":
                yield (str(section), "_target_"), str(value)


def _is_config(fields: Mapping[Any, Any]) -> bool:
    """Whether a model has Megatron-core's configuration in a section of its own."""
    return isinstance(fields.get("transformer"), dict)


def _plain(value: Any) -> Any:
    """Return the name of what a field's `_target_` names, such as torch.bfloat16.

    That of an enumeration's member is its only argument. Other objects are returned as they are.
    """
    if not isinstance(value, dict) or "_target_" not in value:
        return value
    if any(not str(key).startswith("_") for key in value):
        return value
    arguments = value.get("_args_", [value["_target_"]])
    is_one = isinstance(arguments, list) and len(arguments) == 1
    return value if not is_one or isinstance(arguments[0], dict | list) else str(arguments[0])


def _recipe(tree: Mapping[Any, Any], leaves: dict[tuple[str, str], Any], m: Migration) -> None:
    """Let the user decide about the recipe below a file that has no model of its own."""
    for section in SECTIONS:
        leaves.pop((section, "_target_"), None) if section != "dataset" else None
    if "_target_" in tree or ("model", "num_layers") in leaves:
        return
    m.decide(
        "recipe", "???", "the file changes a recipe of Bridge's, which is code that is not read",
        "Migrate the run_config.yaml that a run of it saves, or write the recipe's settings here",
    )  # fmt: skip


def _precision(leaves: dict[tuple[str, str], Any], m: Migration) -> None:
    """Translate a named precision into a preset; fields of a section are settings of Megatron's."""
    name = leaves.pop(("mixed_precision", ""), None)
    if name is None:
        return
    preset = str(name).replace("-", "_")
    if preset in REFUSED_PRESETS:
        m.decide("mixed_precision", name, *REFUSED_PRESETS[preset])
    elif preset in preset_names("precision", [conf_dir()]):
        m.out["defaults"] = ["pretrain_gpt", {"precision": preset}, "_self_"]
        m.changes.append(f"mixed_precision: {name} -> the preset precision={preset}")
    else:
        m.decide("mixed_precision", name, "is not a name of Bridge's that is known here",
                 "Give one of the presets of conf/precision")  # fmt: skip


def _model(leaves: dict[tuple[str, str], Any], settings: MegatronSettings, m: Migration) -> None:
    tied = leaves.pop(("model", "share_embeddings_and_output_weights"), None)
    if tied is not None:
        key = "model.share_embeddings_and_output_weights"
        m.change(key, tied, {key: bool(tied)})
    gated = leaves.pop(("model", "gated_linear_unit"), None)
    function = leaves.pop(("model", "activation_func"), None)
    short = str(function).rpartition(".")[2]
    both = "model.activation_func" + (" model.gated_linear_unit" if gated is not None else "")
    if gated and short == "gelu":
        m.change(both, function, {"model.activation": "fast-geglu"})
    elif function is not None and short in _ACTIVATIONS and bool(gated) is (short == "silu"):
        settings.given[_ACTIVATIONS[short]] = GivenSetting(both, True)
    elif short == "gelu":
        fused = leaves.pop(("model", "bias_activation_fusion"), None)
        settings.given["bias_gelu_fusion"] = GivenSetting(
            f"{both} model.bias_activation_fusion", fused is True
        )
    elif function is not None or gated is not None:
        why = f"with gated_linear_unit={gated} is no activation that megafp8 has"
        why = "is not in the file" if function is None else why
        m.decide("model.activation_func", function, why, "Give model.activation")
    fused = leaves.pop(("model", "bias_activation_fusion"), None)
    if fused is not None:
        m.drop("model.bias_activation_fusion", fused, "it changes times only")
    if isinstance(leaves.get(("model", "num_query_groups")), int):
        settings.given["group_query_attention"] = GivenSetting("model.num_query_groups", True)


def _data(leaves: dict[tuple[str, str], Any], settings: MegatronSettings, m: Migration) -> None:
    target = str(leaves.pop(("dataset", "_target_"), ""))
    blend = leaves.pop(("dataset", "blend"), None)
    if "Mock" in target:
        settings.given["mock_data"] = GivenSetting("dataset._target_", True)
    elif isinstance(blend, list) and blend and isinstance(blend[0], list):
        paths, weights = blend[0], blend[1] if len(blend) > 1 and blend[1] else None
        listed = (
            [x for pair in zip(weights, paths, strict=False) for x in pair] if weights else paths
        )
        settings.add("data_path", GivenSetting("dataset.blend", listed), m)


def _weight_decay(
    leaves: dict[tuple[str, str], Any], settings: MegatronSettings, m: Migration
) -> None:
    """Translate the weight decay: the scheduler's replaces the optimizer's at each step."""
    start, end = (leaves.get(("scheduler", f"{name}_weight_decay")) for name in ("start", "end"))
    style = leaves.get(("scheduler", "weight_decay_incr_style"))
    if start != end or style not in (None, "constant"):
        return
    for name in ("start", "end"):
        leaves.pop(("scheduler", f"{name}_weight_decay"), None)
    if end is None:
        return
    own = leaves.pop(("optimizer", "weight_decay"), None)
    if own is not None:
        reason = "the scheduler's replaces it at each step, as in Bridge"
        m.drop("optimizer.weight_decay", own, reason)
    shown = "scheduler.start_weight_decay scheduler.end_weight_decay"
    settings.add("weight_decay", GivenSetting(shown, end), m)


def _vocabulary(leaves: dict[tuple[str, str], Any], m: Migration) -> None:
    """Translate the size of the vocabulary, which Bridge pads if the model's field says so."""
    vocabulary = leaves.pop(("model", "vocab_size"), None)
    if vocabulary is not None:
        m.drop("model.vocab_size", vocabulary, "the tokenizer determines the vocabulary")
    for name in ("pad_vocab_size", "make_vocab_size_divisible_by"):
        if ("tokenizer", name) in leaves:
            value = leaves.pop(("tokenizer", name))
            m.drop(f"tokenizer.{name}", value, "the model's field says it, as in Bridge")
    pads = leaves.pop(("model", "should_pad_vocab"), None)
    if pads is False:
        old = leaves.pop(("model", "make_vocab_size_divisible_by"), None)
        shown = "model.should_pad_vocab" + (" model.make_vocab_size_divisible_by" if old else "")
        m.change(shown, pads, {"model.make_vocab_size_divisible_by": 1})
    elif pads is not None:
        m.drop("model.should_pad_vocab", pads, "model.make_vocab_size_divisible_by pads it")


def _initial(leaves: dict[tuple[str, str], Any], m: Migration) -> None:
    """Drop functions of initial weights that say what the width and the layers say."""
    width: Any = leaves.get(("model", "init_method_std"))
    layers: Any = leaves.get(("model", "num_layers"))
    if not all(isinstance(number, int | float) and number > 0 for number in (width, layers)):
        return
    for name in ("init_method", "embedding_init_method", "output_layer_init_method"):
        drawn = leaves.get(("model", name))
        expected = width / math.sqrt(2 * layers) if name.startswith("output") else width
        if isinstance(drawn, dict) and drawn.get("_target_") == "torch.nn.init.normal_":
            std = drawn.get("std")
            if drawn.get("mean") == 0 and isinstance(std, float) and math.isclose(std, expected):
                del leaves["model", name]
                m.drop(f"model.{name}", std, "model.init_method_std and the layers say it")


def _field(section: str, name: str, value: Any, settings: MegatronSettings, m: Migration) -> None:
    shown = f"{section}.{name}" if name else section
    theirs = _NAMES.get((section, name), name)
    if section not in SECTIONS:
        m.decide(shown, value, "is no section of Bridge's", "Remove it")
    elif value is None or value in ("", _DEFAULT_PROVIDER):
        m.drop(shown, value, "nothing is given")
    elif section == "peft":
        m.decide(shown, value, "whole models are trained, without adapters", "Leave it out")
    elif megatron_flags().is_known(theirs):
        old = settings.given.get(theirs)
        if old is not None:
            shards = theirs == "use_distributed_optimizer" and value and not old.value
            if section != "mixed_precision" and not shards:  # either field asks for shards
                m.drop(shown, value, f"{old.shown} says it")
                return
            m.drop(old.shown, old.value, f"{shown} replaces it, as in Bridge")
        settings.add(theirs, GivenSetting(shown, value), m)
    elif section in _OF_BRIDGE_ALONE:
        m.drop(shown, value, _OF_BRIDGE_ALONE[section])
    elif any(type(value) is type(off) and value == off for off in _OFF):
        m.drop(shown, value, "it is off")
    else:
        m.decide(shown, value, "is a field of Bridge's that is not known here",
                 "Look for a similar key in pretrain_gpt.py --help")  # fmt: skip
