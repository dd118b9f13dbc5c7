"""Set, check and read single settings: one key and one value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import AnyNode, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from megafp8.config import megatron_names
from megafp8.config.errors import DEFAULT, Origin, SettingError
from megafp8.config.keys import Key
from megafp8.config.megatron_flags import megatron_flags
from megafp8.config.nemo import nemo_keys, nemo_sections
from megafp8.config.schema import all_keys, all_sections, schema_tree

UNDECIDED = "undecided"
"""The key of a file that `megafp8 migrate` wrote, with what the user must decide."""

OTHER_NAMES = {
    name: key
    for key, names in {
        "trainer.devices": ("gpus", "num_gpus", "gpus_per_node", "ngpus", "nproc_per_node"),
        "model.activation": ("activation_func", "gated_linear_unit", "hidden_act"),
        "model.num_moe_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
        "model.moe_router_topk": ("num_experts_per_tok", "top_k"),
        "model.moe_ffn_hidden_size": ("moe_intermediate_size",),
        "model.moe_router_score_function": ("scoring_func",),
        "model.moe_router_topk_scaling_factor": ("routed_scaling_factor",),
        "model.moe_aux_loss_coeff": ("router_aux_loss_coef",),
        "model.moe_layer_freq": ("first_k_dense_replace", "decoder_sparse_step"),
        "model.moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    }.items()
    for name in names
}
"""Names that no key resembles, with the key of that meaning: PyTorch Lightning's `gpus`, the
activation of Megatron-core, and names of transformers' models with experts."""

SEE_HELP = "--help lists all keys"

UNREADABLE = (OmegaConfBaseException, ValueError, OverflowError, RecursionError)
"""What OmegaConf raises for a value that does not fit, or that refers to a key without a value."""

_ONE_KEY = re.compile(r"\$\{(\.?)([a-z][a-z0-9_.]*)\}")  # a dot in front: of the same section

DATA_PREFIX = "model.data.data_prefix"
_TEXTS = (
    "name",
    DATA_PREFIX,
    "model.data.train_ds.file_names",
    "model.data.validation_ds.file_names",
)
"""Keys of texts that have no type of their own: NeMo's label, and paths that may be in a list."""

_LIVE_BUT_OPTIONAL = (
    "exp_manager.checkpoint_callback_params",
    "exp_manager.wandb_logger_kwargs",
    "model.data.train_ds",
    "model.data.validation_ds",
    "model.nsys_profile",
)
"""Sections whose keys have an effect, and that are null in NeMo's files if they are not used."""


@dataclass(frozen=True)
class Setting:
    """Hold one key and its value as they were written, and the layer that they came from."""

    key: str
    value: Any
    origin: Origin


@cache
def is_text(key: str) -> bool:
    """Whether a key's value, or each item of its list, is a text, and not also a number.

    Such a value keeps its characters: a name such as `3.10` or `12e5` is read as no number.
    """
    kinds = ("a text", "a text, or null", "a list of texts")
    return key in _TEXTS or (key in all_keys() and all_keys()[key].type_text in kinds)


def as_text(key: str, value: Any, text: Any) -> Any:
    """Return the value of a key, or its source text where it is one.

    Args:
        key: The dotted path.
        value: The value as YAML reads it.
        text: The same with the characters of numbers and of True and False as they are written.
    """
    is_blend = key == DATA_PREFIX and not isinstance(text, str)  # which has weights
    return text if is_text(key) and not is_blend else value


def _megatron_problem(setting: Setting) -> SettingError | None:
    """Return what is wrong with one of Megatron's names, or None."""
    refusal = megatron_names.why_refused(setting.key, setting.value)
    if refusal is None:
        return None
    return SettingError(setting.key, setting.value, *refusal, origin=setting.origin)


def setting_problem(setting: Setting) -> SettingError | None:
    """Return what is wrong with one setting by itself: an unknown key or a value of a wrong type.

    Returns None if nothing is.
    """
    return put_in(_scratch(), setting, merge=False)


def put_in(tree: DictConfig, setting: Setting, *, merge: bool = True) -> SettingError | None:
    """Put one setting into a tree of the schema, or return what is wrong with it by itself.

    Values of NeMo's keys without effect are checked later, in the merged tree, since they may be
    interpolations. With `merge`, the entries of a dict are added to the dict in the tree, as Hydra
    does; otherwise they replace it. A list and a dict for one key of NeMo's cannot be merged: the
    later one replaces the earlier one.
    """
    if setting.key == UNDECIDED:
        return _undecided(setting)
    if setting.key in megatron_names.NAMES:
        return _megatron_problem(setting)
    if megatron_names.is_format(setting.key, setting.value):
        return None  # `dialects` has translated it in every layer that is merged
    key, nemo_key = all_keys().get(setting.key), nemo_keys().get(setting.key)
    if key is None and nemo_key is None:
        if is_unused_section(setting):
            _reset(tree, setting.key)
            return None
        in_tree = setting.key in known_sections()
        return section_problem(setting) if in_tree else unknown_key(setting)
    if nemo_key is not None and isinstance(setting.value, dict) and not nemo_key.passes_map:
        return nemo_key.problem(setting.value, setting.origin)
    try:
        if key is not None and _is_no_flag(key, setting.value):
            raise ValueError
        OmegaConf.update(tree, setting.key, setting.value, merge=merge, force_add=key is None)
    except UNREADABLE:
        if key is None and merge:
            return put_in(tree, setting, merge=False)
        if key is None:
            reason, hint = f"{_show(setting.value)} cannot be read", "Correct what stands in ${…}"
            return SettingError(setting.key, setting.value, reason, hint, origin=setting.origin)
        reason = f"{_show(setting.value)} is not {key.type_text}"
        hint = f"Give {key.valid_text}"
        is_whole = isinstance(setting.value, float) and setting.value.is_integer()
        if is_whole and "a whole number" in key.type_text:
            hint = f"Write {int(setting.value)}"  # the value of 1e5 is a float
        return SettingError(setting.key, setting.value, reason, hint, origin=setting.origin)
    return None


def is_unused_section(setting: Setting) -> bool:
    """Whether a setting is null for a section that NeMo's files need not use."""
    return setting.value is None and setting.key in optional_sections()


@cache
def optional_sections() -> frozenset[str]:
    """Return the sections that may be null: their keys then have their defaults."""
    return (nemo_sections() - all_sections()) | frozenset(_LIVE_BUT_OPTIONAL)


def _reset(tree: DictConfig, section: str) -> None:
    """Give the keys of a section the values that they have if no layer sets them."""
    for path, key in all_keys().items():
        if path.startswith(section + "."):
            OmegaConf.update(tree, path, key.default)
    for path, nemo_key in nemo_keys().items():
        if path.startswith(section + "."):
            OmegaConf.update(tree, path, nemo_key.ours, force_add=True)


def _is_no_flag(key: Key, value: Any) -> bool:
    """Whether a number is given for True or False, and is neither 1 nor 0.

    OmegaConf would read every other number as True.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_flag = key.type_text.removesuffix(", or null") == "True or False"
    return is_flag and is_number and value not in (0, 1)


def _undecided(setting: Setting) -> SettingError | None:
    """Return the error for what a migrated file leaves to the user; None if nothing is left."""
    if setting.value in (None, []):
        return None
    left = setting.value if isinstance(setting.value, list) else [setting.value]
    return SettingError(
        UNDECIDED,
        None,
        f"{len(left)} of the migrated file's settings must be decided: "
        + "; ".join(str(line) for line in left),
        "Write each decision into the file, and remove its line below `undecided`",
        origin=setting.origin,
    )


def flatten(key: str, value: Any, origin: Origin = DEFAULT) -> Iterator[Setting]:
    """Yield the settings in a value that may be a dict of dicts.

    A dict is split only where the schema has a section; below, it is a value.
    """
    if isinstance(value, dict) and (key in known_sections() or not key):
        for name, item in value.items():
            path = f"{key}.{name}" if key else str(name)
            if "." in str(name):
                path = f"{key}.[{name}]"  # a name that has a dot is never in the schema
            yield from flatten(path, item, origin)
    else:
        yield Setting(key, value, origin)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted paths as a tree of dicts."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        *sections, leaf = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree


@cache
def known_sections() -> frozenset[str]:
    """Return the dotted path of every section: those of the schema and of NeMo's other keys."""
    return all_sections() | nemo_sections()


@cache
def _scratch() -> Any:
    """Return a shared tree for checking types; its values do not matter."""
    return schema_tree()


# --- a tree's values ------------------------------------------------------------------------------


def read_values(
    cfg: DictConfig,
    origins: Mapping[str, Origin] | None = None,
    known: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[SettingError]]:
    """Return all values by their keys, interpolations resolved, and the keys that cannot be read.

    Args:
        cfg: A tree of the schema.
        origins: The layers that set the keys, for messages.
        known: Values that are known already, and not read.
    """
    values: dict[str, Any] = {}
    problems: list[SettingError] = []
    known = known or {}
    for path, value in known.items():
        values[path] = value.copy() if isinstance(value, (list, dict)) else value
    for key, section, leaf in _leaves(cfg, all_keys().keys() - known.keys()):
        path, is_interpolated = key.path, OmegaConf.is_interpolation(section, leaf)
        if is_interpolated and (other := _stands_for(cfg, key, section, leaf)):
            section, leaf, is_interpolated = *other, False
        try:
            value = read_value(cfg, path) if is_interpolated else _plain(section[leaf])
        except MissingMandatoryValue:
            problems.append(_missing(key, origins))
            continue
        except UNREADABLE as error:
            problems.append(_unreadable(key, error, origins))
            continue
        # The value of an interpolation has the other key's type, which may be the wrong one here.
        problem = None
        if is_interpolated:
            meant = _before_conversion(section, leaf) if value is True else value
            problem = setting_problem(Setting(path, meant, _origin(path, origins)))
        if problem is None:
            values[path] = value
        else:
            problems.append(problem)
    return {path: values[path] for path in all_keys() if path in values}, problems


def _stands_for(cfg: DictConfig, key: Key, section: Any, leaf: str) -> tuple[Any, str] | None:
    """Return section and name of the key whose value is meant by a value such as `${model.seed}`.

    Returns None if the other key's values may have a type that this key does not take, and for all
    other interpolations, which OmegaConf reads: its grammar takes a sixth of a load's time.
    """
    whole = _ONE_KEY.fullmatch(section._get_node(leaf)._value())
    if whole is None:
        return None
    other = all_keys().get(f"{key.path.removesuffix(leaf)}{whole[2]}" if whole[1] else whole[2])
    if other is None or key.type_text not in (other.type_text, f"{other.type_text}, or null"):
        return None
    name, _, last = other.path.rpartition(".")
    there = OmegaConf.select(cfg, name) if name else cfg
    known = not OmegaConf.is_interpolation(there, last) and not OmegaConf.is_missing(there, last)
    return (there, last) if known else None


def _before_conversion(section: Any, leaf: str) -> Any:
    """Return what an interpolation leads to, where OmegaConf reads each number but 0 as True."""
    node = AnyNode(section._get_node(leaf)._value(), key=leaf, parent=section)
    return node._dereference_node()._value()


def interpolated_keys(cfg: DictConfig) -> frozenset[str]:
    """Return the keys whose values refer to other keys, as `${model.encoder_seq_length}` does."""
    return frozenset(
        key.path
        for key, section, leaf in _leaves(cfg, all_keys().keys())
        if OmegaConf.is_interpolation(section, leaf)
    )


def _leaves(cfg: DictConfig, paths: Collection[str]) -> Iterator[tuple[Key, Any, str]]:
    """Yield keys in the schema's order, with their sections in a tree and their names there.

    A section is looked up once: for all keys, looking up whole paths takes four times as long.
    """
    sections: dict[str, Any] = {"": cfg}
    for path, key in all_keys().items():
        if path not in paths:
            continue
        name, _, leaf = path.rpartition(".")
        if name not in sections:  # none is an interpolation itself: `put_in` refuses that
            sections[name] = OmegaConf.select(cfg, name)
        yield key, sections[name], leaf


def read_value(cfg: DictConfig, path: str) -> Any:
    """Return one value as plain Python objects, with interpolations resolved.

    Raises:
        OmegaConfBaseException: The key is missing, or an interpolation cannot be resolved.
    """
    return _plain(OmegaConf.select(cfg, path, throw_on_missing=True))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _missing(key: Key, origins: Mapping[str, Origin] | None) -> SettingError:
    hint = f"Give {key.valid_text}"
    if not _has_nemos_sections(origins or {}):
        hint += ", or begin the YAML with `defaults: [pretrain_gpt, _self_]`"
    return SettingError(key.path, "???", "must be given", hint, origin=_origin(key.path, origins))


def _has_nemos_sections(origins: Mapping[str, Origin]) -> bool:
    """Whether a file that does not build on the default job has all of NeMo's sections."""
    given = {path.partition(".")[0] for path, origin in origins.items() if origin.is_nemos}
    return {"trainer", "exp_manager", "model"} <= given


def _unreadable(key: Key, error: Exception, origins: Mapping[str, Origin] | None) -> SettingError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    hint = f"Give {key.valid_text}"
    return SettingError(key.path, None, reason, hint, origin=_origin(key.path, origins))


def _origin(key: str, origins: Mapping[str, Origin] | None) -> Origin:
    return Origin("") if origins is None else origins.get(key, DEFAULT)


# --- unknown keys and sections --------------------------------------------------------------------


def unknown_key(setting: Setting) -> SettingError:
    """Return the error for a key that the schema does not have, with keys of similar names.

    A name of Megatron's is said to be one, if it is no last name of a key, nor similar to one and
    only of a family of names, such as those that begin with `log_`.
    """
    matches, last = similar_keys(setting.key), setting.key.rpartition(".")[2]
    flags, reason = megatron_flags(), "there is no such key"
    hint = f"Did you mean {' or '.join(matches)}?" if matches else SEE_HELP
    is_ours = any(match.rpartition(".")[2] == last for match in matches)
    if not is_ours and (not matches or flags.is_listed(last)):
        reason, hint = flags.in_our_words(last) or (reason, hint)
    return SettingError(setting.key, setting.value, reason, hint, origin=setting.origin)


def similar_keys(wrong: str) -> list[str]:
    """Return up to three keys that are similar to `wrong`, the most similar first."""
    renamed = OTHER_NAMES.get(wrong.rpartition(".")[2])
    if renamed is not None:
        return [renamed]
    return _similar(wrong, list(all_keys())) or _similar(wrong, list(nemo_keys()))


def _similar(wrong: str, keys: list[str]) -> list[str]:
    last = wrong.rpartition(".")[2]
    same_name = [key for key in keys if key.rpartition(".")[2] == last]
    close = difflib.get_close_matches(wrong[:200], keys, n=2, cutoff=0.75)
    names = {key.rpartition(".")[2]: key for key in reversed(keys)}
    close_names = difflib.get_close_matches(last[:200], list(names), n=2, cutoff=0.75)
    close = [key for key in close if _is_close(last, key.rpartition(".")[2])]
    candidates = same_name + close + [names[name] for name in close_names]
    return list(dict.fromkeys(candidates))[:3]


def _is_close(name: str, other: str) -> bool:
    """Whether two keys' last names are similar.

    Whole paths are not compared, since they are similar if only the sections are the same.
    """
    return difflib.SequenceMatcher(None, name[:200], other).ratio() >= 0.6


def section_problem(setting: Setting) -> SettingError:
    """Return the error for a value that is given to a whole section."""
    keys = [*all_keys(), *nemo_keys()]
    inside = [key for key in keys if key.startswith(setting.key + ".")]
    leave_out = "Leave it out, or set" if setting.value is None else "Set"
    return SettingError(
        setting.key,
        setting.value,
        "is a section, not a value",
        f"{leave_out} the keys in the section, for example {inside[0]}=VALUE",
        origin=setting.origin,
    )


def _show(value: Any) -> str:
    text = "null" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
