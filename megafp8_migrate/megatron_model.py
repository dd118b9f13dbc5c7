"""Find out which model a distributed checkpoint of Megatron's or NeMo's is of.

Megatron-LM keeps its arguments in `common.pt` or beside the weights, Megatron Bridge its settings
in `run_config.yaml`, and NeMo those of the model in `context/model.yaml` or `model_config.yaml`.
They are translated by the rules of `megafp8 migrate`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megafp8.config.api import MAX_LAYERS, function_keys, load, megatron_flags, spec_of_tree
from megafp8.errors import CheckpointError
from megafp8.foreign import MAX_YAML_BYTES, ForeignFileError, parse_yaml, shown_value
from megafp8.specs import GPTSpec
from megafp8_migrate import bridge, megatron, migrate, nemo, read_text
from megafp8_migrate.megatron_rules import is_of_model, translate_model
from megafp8_migrate.megatron_settings import GivenSetting, MegatronSettings
from megafp8_migrate.plain_pickle import fields_of
from megafp8_migrate.report import Migration
from megafp8_migrate.torch_dist import DistCheckpoint, Files

_OF_NEMO_1, _OF_NEMO_2 = "model_config.yaml", "context/model.yaml"
_OF_BRIDGE = "run_config.yaml"
_GIVE = "Give `megafp8 import` --settings FILE: the launch script or the YAML of the model's run"
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_SAID = (*_NEEDED, "normalization", "layernorm_epsilon", "activation", "position_embedding_type")
"""What a checkpoint's own settings must say: a default of ours could be another model."""
_BESIDE = ("init_method_std", "hidden_dropout", "attention_dropout", "moe_aux_loss_coeff")
"""Settings that are no part of the function, and that a continued run needs."""


class Settings(NamedTuple):
    """Hold the settings below `model`, and the file that they are from."""

    tree: dict[str, Any]
    file: Path


def own_settings(home: Files, checkpoint: DistCheckpoint) -> Settings:
    """Return the model's settings of what lies beside its weights.

    Raises:
        CheckpointError: Nothing says which model it is, or it is none of ours.
    """
    for name in (_OF_BRIDGE, _OF_NEMO_2, _OF_NEMO_1):
        if home.has(name):
            return _of_yaml(home, name)
    migration = Migration()
    with checkpoint.read_common() as (file, saved):
        arguments = saved.get("args") if isinstance(saved, dict) else None
        given = dict(fields_of(arguments)) if arguments is not None else {}
        settings = _of_arguments(given)
    if "num_layers" in given:
        translate_model(settings, migration)
        return settings_of(migration, file, saves_all=True)
    raise CheckpointError(file, "does not say which model it is of", _GIVE)


def _of_arguments(given: Mapping[str, Any]) -> MegatronSettings:
    """Return Megatron-LM's arguments of the model by the names of its settings."""
    settings = MegatronSettings(source="")
    for argument, value in given.items():
        name = argument
        if not megatron_flags().is_known(name):
            name, _ = megatron_flags().of_flag(argument.replace("_", "-"))
        if is_of_model(name):
            items = value if isinstance(value, list) else [value]
            if len(items) > MAX_LAYERS or not all(map(_is_plain, items)):
                raise ForeignFileError(f"{shown_value(argument)} is no plain value")
            settings.given[name] = GivenSetting(argument, value)
    return settings


def _is_plain(value: object) -> bool:
    """Whether a value is a number or a word; a reference to other settings is none."""
    if isinstance(value, str):
        return value.isprintable() and "${" not in value
    return isinstance(value, int | float | None)


def _of_yaml(home: Files, name: str) -> Settings:
    text = home.read(name, MAX_YAML_BYTES).decode("utf-8", "replace")
    try:
        tree = parse_yaml(text)
        if not isinstance(tree, dict):
            raise ForeignFileError("it has no settings")
    except ForeignFileError as error:
        raise CheckpointError(home.shown(name), str(error), _GIVE) from error
    migration = Migration()
    if name == _OF_BRIDGE:
        bridge.translate_bridge(tree, migration)
    elif name == _OF_NEMO_2:
        config = tree.get("config")
        bridge.translate_bridge({"model": config if isinstance(config, dict) else {}}, migration)
    else:
        nemo.translate_nemo({"model": tree}, migration)
    return settings_of(migration, home.shown(name), saves_all=name != _OF_NEMO_1)


def given_settings(file: Path) -> Settings:
    """Return the model's settings of a launch script or a YAML that a user names.

    Raises:
        UserError: It cannot be read, or does not say which model it is of.
    """
    text = read_text(file, "Give the launch script or the YAML with which the model was trained")
    try:
        tree = None if megatron.is_script(file.name, text) else parse_yaml(text)
    except ForeignFileError as error:
        raise CheckpointError(file, str(error), "Correct the file") from error
    if tree is None or (isinstance(tree, dict) and bridge.is_bridges(tree)):
        return settings_of(migrate(text, file.name, folder=file.parent), file)
    values = load(config_dir=file.absolute().parent, config_name=file.name)
    return Settings({name: values[f"model.{name}"] for name in (*function_keys(), *_BESIDE)}, file)


def settings_of(migration: Migration, file: Path, *, saves_all: bool = False) -> Settings:
    """Return the settings of the model in what was translated from `file`.

    With `saves_all` the file is one that a program wrote with all its values, so that what it lacks
    was lost, and has no default.

    Raises:
        CheckpointError: A setting of the model must be decided, or the model is none of ours.
    """
    open_lines = [line for line in migration.undecided if _concerns_model(line)]
    if open_lines:
        raise CheckpointError(file, "; ".join(open_lines), _GIVE)
    try:
        out = OmegaConf.create(migration.out)
        values = {
            name: OmegaConf.select(out, f"model.{name}") for name in (*function_keys(), *_BESIDE)
        }
        tree = {
            name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for name, value in values.items()
            if value is not None
        }
    except OmegaConfBaseException as error:
        raise CheckpointError(file, str(error).splitlines()[0], _GIVE) from error
    needed = (*_SAID, "rotary_base") if tree.get("position_embedding_type") == "rope" else _SAID
    missing = [name for name in (needed if saves_all else _NEEDED) if tree.get(name) is None]
    if missing:
        raise CheckpointError(file, f"does not have {', '.join(missing)}", _GIVE)
    return Settings(tree, file)


def _concerns_model(line: str) -> bool:
    """Whether a line about what must be decided is about the model's function."""
    words = re.findall(r"[\w.-]+", line.partition(": ")[0])
    names = [word.lstrip("-").rpartition(".")[2].replace("-", "_") for word in words]
    return any(
        is_of_model(name)
        or is_of_model(megatron_flags().of_flag(name.replace("_", "-"))[0])
        or name in function_keys()
        for name in names
    )


def spec_of(settings: Settings, vocabulary: int) -> GPTSpec:
    """Return the model's shape, with as many rows of the embedding as there are.

    Raises:
        CheckpointError: No model has these settings.
    """
    try:
        spec = spec_of_tree(settings.tree, vocabulary)
        heads, groups = spec.num_attention_heads, spec.num_kv_heads
        if heads % groups or (spec.kv_channels is None and spec.hidden_size % heads):
            raise ValueError(f"{heads} heads fit neither {groups} groups nor {spec.hidden_size}")
    except (OmegaConfBaseException, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = f"does not describe a model ({shown_value(said)})"
        raise CheckpointError(settings.file, reason, _GIVE) from error
    return spec
