"""Merge the layers of a configuration into one typed tree, check it, and report all problems."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from megafp8.config.base_model import with_base, with_moved_folder
from megafp8.config.checks import check_values, within_ranges
from megafp8.config.checks.precision import format_notes
from megafp8.config.errors import COMMAND_LINE, DEFAULT, Origin, SettingError, raise_if_any
from megafp8.config.gelu import GELU, TANH_GELU, asks_for_tanh
from megafp8.config.hydra_section import HYDRA, is_hydras
from megafp8.config.keys import needs
from megafp8.config.launcher_paths import launcher_paths_once
from megafp8.config.layers import (
    DEFAULT_CONFIG,
    Layer,
    compose_layers,
    default_job,
    find_source,
)
from megafp8.config.learning_rate import schedule_notes, without_own_rate
from megafp8.config.nemo import nemo_keys, nemos_file
from megafp8.config.overrides import parse_overrides
from megafp8.config.own_recipes import load_own_recipes, names_given
from megafp8.config.rules import Unused, effective, unused
from megafp8.config.schema import all_keys, all_sections, schema_tree
from megafp8.config.settings import (
    UNDECIDED,
    Setting,
    interpolated_keys,
    is_unused_section,
    optional_sections,
    put_in,
    read_value,
    read_values,
)
from megafp8.config.spellings import (
    Translated,
    contradictions,
    take_length_of_samples,
    take_mock_data,
    translate_spellings,
)
from megafp8.config.values import plain
from megafp8.secrets import (
    HIDDEN,
    has_login,
    named_secrets,
    one_line,
    redacted,
    secret_values,
    variable_in,
)

ACCELERATOR = "trainer.accelerator"
BACKEND, MASK_FUSION = "model.fp8_backend", "model.get_attention_mask_from_fusion"
_IDLE_IN_NEMO = (
    # In NeMo these graphs are Transformer Engine's and change times only. Here they would make
    # `auto` leave Transformer Engine for native layers, unless someone chose these.
    ("model.enable_cuda_graph", BACKEND, "native"),
    # NeMo then gives its layers no mask, and they attend over whole samples.
    ("model.data.reset_attention_mask", MASK_FUSION, False),
    # NeMo rotates by the place in the sample, and its biases are of distances in the sample.
    ("model.data.reset_position_ids", "model.position_embedding_type", "learned_absolute"),
)
"""Keys that a NeMo file may set without effect, unless another key has a value."""


@dataclass(frozen=True)
class Loaded:
    """Hold a checked tree of settings, their origins, and the settings without effect.

    Attributes:
        cfg: The tree of the schema; it takes no new keys.
        origins: The layer that set each key, for all keys that a layer after the default job set.
        inert: The given keys of NeMo that have no effect in megafp8, and Hydra's section.
        unused: The given keys that have no effect with the other settings, where this is no
            mistake: a preset or a NeMo file set them, or a stronger layer switched them off.
        translated: The given values that NeMo spells in another way.
        notes: Lines about settings that have less effect than their values say.
    """

    cfg: DictConfig
    origins: Mapping[str, Origin]
    inert: tuple[Setting, ...]
    unused: tuple[tuple[Setting, Unused], ...] = ()
    translated: tuple[Translated, ...] = ()
    notes: tuple[str, ...] = ()

    def inert_lines(self) -> list[str]:
        """Return lines about settings that were translated, are cut, or have no effect.

        Those without effect for the same reason share a line.
        """
        lines = [
            f"translated: {t.setting.key}={one_line(t.setting.value)} ({t.setting.origin}): "
            f"{one_line(t.value)}"
            for t in self.translated
        ]
        lines += self.notes
        groups: dict[tuple[str, str], list[str]] = {}
        for s in self.inert:
            text = s.key if s.key == HYDRA else f"{s.key}={one_line(s.value)}"
            if is_hydras(s.key):
                note = "Hydra's own settings have an effect in a sweep (-m) only"
            elif s.key in optional_sections():
                note = "a section that is not used: its keys have their defaults"
            else:
                note = nemo_keys()[s.key].note
            groups.setdefault((s.origin, note), []).append(text)
        for s, found in self.unused:
            text, note = f"{s.key}={one_line(s.value)}", f"has no effect with {found.setting}"
            groups.setdefault((s.origin, note), []).append(text)
        return lines + [
            f"inert: {', '.join(g)} ({origin}): {note}" for (origin, note), g in groups.items()
        ]


def load(
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    config_name: str = DEFAULT_CONFIG,
) -> DictConfig:
    """Return the tree of settings after all checks that need no device.

    Whether a learning rate suits the model is left to `load_all`, which a command calls.

    Args:
        overrides: Overrides as on the command line, for example `model.fp8=True`.
        config_dir: A directory of the user's own YAML files.
        config_name: The YAML's name, with or without `.yaml`.

    Raises:
        ConfigError: `SettingError` for one problem, `CombinedConfigError` for several.
    """
    return load_all(overrides, config_dir, config_name, trains=False).cfg


def load_all(
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    config_name: str = DEFAULT_CONFIG,
    gpu_available: Callable[[], bool] | None = None,
    *,
    trains: bool = True,
    trusts_recipes: bool = False,
    recipes_given: frozenset[str] | None = None,
) -> Loaded:
    """Return the tree that `load` returns, with origins and settings without effect.

    Arguments and errors are those of `load`. `trains` False says that the settings are for no run,
    so that the learning rate does not matter. `gpu_available` returns whether this machine has a
    GPU; it is called only if a given key has an effect on one of the two devices alone. Without it,
    what holds on one of the devices is accepted. `trusts_recipes` says that recipes which YAML
    files name as code may be imported. `recipes_given` has the names that a sweep's command line
    gives to its jobs; None stands for a single run, whose `overrides` were all typed.
    """
    source = find_source(config_dir, config_name)
    parsed, problems = parse_overrides(overrides, source.directories)
    try:
        layers = compose_layers(source, parsed)
    except SettingError as problem:
        raise_if_any([*problems, problem])
        raise
    layers, moved = with_moved_folder(layers, source.file.parent)
    for layer in layers:
        problems += contradictions(layer.settings)
    translations = [translate_spellings(layer.settings) for layer in layers]
    layers = [
        Layer(layer.origin, tuple(settings))
        for layer, (settings, _) in zip(layers, translations, strict=True)
    ]
    try:
        layers = with_base(layers, partial(_interpolated, layers))
    except SettingError as problem:
        problems.append(problem)
    tree, origins, in_layers = merge(layers)
    problems += in_layers
    idle = _without_idle_ones_of_nemo(tree, origins)
    fused = _with_gelu_of_nemo(tree, origins)
    about = take_length_of_samples(tree, origins)
    try:
        about += take_mock_data(tree, origins)
    except SettingError as problem:
        problems.append(problem)
    values, unreadable = read_values(tree, origins)
    known = {
        text for layer in layers for s in layer.settings for text in named_secrets(s.value, s.key)
    }
    refused_already = {problem.key for problem in problems}
    problems += [problem for problem in unreadable if problem.key not in refused_already]
    problems += _secret_problems(values, origins, known)
    given = names_given(parsed) if recipes_given is None else recipes_given
    problems += load_own_recipes(values, origins, trusts_files=trusts_recipes, given=given)
    bad = {problem.key for problem in problems}
    good = {key: value for key, value in values.items() if key not in bad}
    good = _on_this_machine(good, gpu_available)
    inert, refused = _nemo_settings(tree, values, origins)
    inert += [s for layer in layers for s in layer.settings if is_hydras(s.key)]
    refused += _secrets_of_the_command_line(inert)
    found = problems + check_values(good, origins) + refused + _environment_problems(good)
    defaults = {
        s.key: s.value for layer in layers if layer.origin == DEFAULT for s in layer.settings
    }
    if trains and (problem_of_rate := without_own_rate(good, origins, defaults)) is not None:
        found.append(problem_of_rate)
    raise_if_any(launcher_paths_once(found))
    inert = [s for s in inert if s.key not in {t.setting.key for t in fused}]
    idle += [  # the default job's own settings, which have no origin, are not reported
        (Setting(found.key, values[found.key], origins[found.key]), found)
        for found in unused(good)
        if found.key in origins
    ]
    translated = [t for _, of_layer in translations for t in of_layer if _counts(t, origins)]
    said = (*translated, *fused)
    lines = (*moved, *about, *schedule_notes(values), *format_notes(values, origins))
    inert = [replace(s, value=redacted(s.value, s.key, known)) for s in inert]
    return Loaded(_typed(tree, values), origins, tuple(inert), tuple(idle), said, lines)


def _counts(translated: Translated, origins: Mapping[str, Origin]) -> bool:
    """Whether no stronger layer replaced the setting that was translated."""
    return origins.get(translated.setting.key) == translated.setting.origin


def merge(layers: Sequence[Layer]) -> tuple[DictConfig, dict[str, Origin], list[SettingError]]:
    """Return one tree of all layers, the origins of its values, and what could not be merged."""
    tree = tree_with_nemo_keys()
    origins: dict[str, Origin] = {}
    problems: list[SettingError] = []
    for layer in layers:
        for setting in layer.settings:
            if is_hydras(setting.key):
                continue
            problem = put_in(tree, setting)
            if problem is not None:
                problems.append(problem)
            elif setting.key == UNDECIDED:
                continue
            elif is_unused_section(setting):
                inside = [key for key in origins if key.startswith(setting.key + ".")]
                for key in inside:
                    del origins[key]
                origins[setting.key] = layer.origin
            elif layer.origin != DEFAULT:
                origins[setting.key] = layer.origin
    return tree, origins, problems


def _interpolated(layers: Sequence[Layer], path: str) -> Any:
    """Return the value of a key whose setting is an interpolation; None if it has none.

    `read_values` later reports one that cannot be resolved.
    """
    try:
        return read_value(merge(layers)[0], path)
    except (OmegaConfBaseException, ValueError, OverflowError, RecursionError):
        return None


def _without_idle_ones_of_nemo(
    tree: DictConfig, origins: dict[str, Origin]
) -> list[tuple[Setting, Unused]]:
    """Switch off what a NeMo file asks for without effect in NeMo; return these, to be listed.

    The settings that a run has recorded are not a file of NeMo, and are left as they are.
    """
    if nemos_file(origins) is None:
        return []
    switched_off = (_switched_off(tree, origins, *row) for row in _IDLE_IN_NEMO)
    return [one for one in switched_off if one is not None]


def _switched_off(
    tree: DictConfig, origins: dict[str, Origin], key: str, other: str, value: object
) -> tuple[Setting, Unused] | None:
    """Set a key to False that a NeMo file sets to True, unless `other` has `value`."""
    origin = origins.get(key, DEFAULT)
    if not origin.is_nemos:
        return None
    try:
        asked, has = read_value(tree, key), read_value(tree, other)
    except (OmegaConfBaseException, ValueError, OverflowError, RecursionError):
        return None  # `read_values` reports it
    if asked is not True or has == value:
        return None
    OmegaConf.update(tree, key, False)
    del origins[key]
    return Setting(key, asked, origin), Unused(key, needs(other, value), f"{other}={plain(has)}")


def _with_gelu_of_nemo(tree: DictConfig, origins: dict[str, Origin]) -> list[Translated]:
    """Ask for the tanh form of GELU where a setting of NeMo means it; return that setting."""

    def read(path: str) -> Any:
        try:
            return read_value(tree, path)
        except (OmegaConfBaseException, ValueError, OverflowError, RecursionError):
            return None  # `read_values` reports it

    asks = asks_for_tanh(read, origins, nemos_file(origins))
    if asks is None:
        return []
    OmegaConf.update(tree, GELU, True)
    origins[GELU] = asks.origin
    return [Translated(Setting(*asks), TANH_GELU)]


@cache
def default_values() -> Mapping[str, Any]:
    """Return the values of the default job by their keys."""
    return read_values(default_tree())[0]


@cache
def default_tree() -> DictConfig:
    """Return the default job's tree: the schema with the values of `conf/pretrain_gpt.yaml`.

    All callers share the tree, so they must not change it.
    """
    tree = schema_tree()
    for path, value in default_job().items():
        OmegaConf.update(tree, path, value)
    return tree


def tree_with_nemo_keys() -> DictConfig:
    """Return a new tree of the schema and of NeMo's keys without effect, which `load` removes."""
    return copy.deepcopy(_tree_with_nemo_keys())


@cache
def _tree_with_nemo_keys() -> DictConfig:
    tree = schema_tree()
    for path, key in nemo_keys().items():
        OmegaConf.update(tree, path, key.ours, force_add=True)
    return tree


def _on_this_machine(
    values: Mapping[str, Any], gpu_available: Callable[[], bool] | None
) -> dict[str, Any]:
    """Return the values with the device that `trainer.accelerator=auto` means on this machine.

    The device is looked for only if a key that was given has no effect on a CPU.
    """
    if gpu_available is None or values.get(ACCELERATOR) != "auto":
        return dict(values)
    sound = within_ranges(values)  # the needs of keys are functions of values that are right
    if list(unused({**sound, ACCELERATOR: "cpu"})) == list(unused(sound)) or gpu_available():
        return dict(values)
    return {**values, ACCELERATOR: "cpu"}


def _environment_problems(values: Mapping[str, Any]) -> list[SettingError]:
    """Return which environment variables ask Transformer Engine for another rule than settings."""
    if values.get(BACKEND) != "te":
        return []
    from megafp8.config import te_environment  # other runs need nothing of it

    sound = effective(within_ranges(values))
    findings = te_environment.findings(sound, os.environ)
    return [SettingError(f.key, "te", f.reason, f.hint) for f in findings]


def _secret_problems(
    values: Mapping[str, Any], origins: Mapping[str, Origin], known: Collection[str]
) -> list[SettingError]:
    """Return the settings that hold a secret, `known` or of the environment, or a password.

    Settings are written into the run's directory and sent to trackers, so a token must not be one.
    """
    secrets = secret_values()
    return [
        SettingError(
            path,
            HIDDEN,
            f"holds {what}, and would be recorded",
            "Leave it out; libraries that need a secret read it from the environment",
            origin=origins.get(path, DEFAULT),
        )
        for path, value in values.items()
        if (what := _secret_in(path, value, known, secrets))
    ]


def _secret_in(
    path: str, value: Any, known: Collection[str], secrets: Mapping[str, str]
) -> str | None:
    if name := variable_in(value, secrets):
        return f"the value of the environment variable {name}"
    if has_login(value):
        return "an address with a password or token"
    shown = redacted(value, path, known, secrets)
    return None if shown is value or shown == value else "a secret"  # NaN differs from itself


def _secrets_of_the_command_line(inert: Sequence[Setting]) -> list[SettingError]:
    """Return errors for secrets that were typed, since a run records its command line."""
    return [
        SettingError(
            s.key,
            HIDDEN,
            "holds a secret, and the command line is recorded and seen by other users",
            "Leave it out, and set the variable in the environment",
            origin=s.origin,
        )
        for s in inert
        if s.origin == COMMAND_LINE and redacted(s.value, s.key) != s.value
    ]


def _nemo_settings(
    tree: DictConfig, values: Mapping[str, Any], origins: Mapping[str, Origin]
) -> tuple[list[Setting], list[SettingError]]:
    """Return NeMo's keys without effect that were given, and errors for those of wrong values."""
    inert: list[Setting] = []
    refused: list[SettingError] = []
    for path, origin in origins.items():
        if path in optional_sections():
            inert.append(Setting(path, None, origin))
        key = nemo_keys().get(path)
        if key is None:
            continue
        try:
            value = read_value(tree, path)
        except (OmegaConfBaseException, ValueError, OverflowError, RecursionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            refused.append(SettingError(path, None, reason, key.hint, origin=origin))
            continue
        if key.passes(value, values):
            inert.append(Setting(path, value, origin))
        else:
            refused.append(key.problem(value, origin))
    order = {key: number for number, key in enumerate(nemo_keys())}
    return sorted(inert, key=lambda setting: order.get(setting.key, len(order))), refused


def _typed(tree: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Return the tree without NeMo's keys, closed to new keys; `values` are its keys' values."""
    for section, names in _names_of_nemo_alone().items():
        node: Any = OmegaConf.select(tree, section) if section else tree
        with open_dict(node):
            for name in names:
                if name in node.keys():  # `in node` is False for an interpolation without a value
                    del node[name]  # unlike pop(), del does not resolve an interpolation
    interpolated = interpolated_keys(tree)
    for path in all_keys():  # an interpolation of a key that was removed becomes that key's value
        if not (path in interpolated or isinstance(values[path], (list, dict))):
            continue
        try:
            stands = read_value(tree, path) == values[path]
        except OmegaConfBaseException:
            stands = False
        if not stands:
            OmegaConf.update(tree, path, values[path])
    OmegaConf.set_struct(tree, True)
    return tree


@cache
def _names_of_nemo_alone() -> Mapping[str, Sequence[str]]:
    """Return, by the sections of the schema, what only NeMo has in them: keys and sections."""
    found: dict[str, dict[str, None]] = {}
    for path in nemo_keys():
        names = path.split(".")
        depth = next(d for d in range(len(names)) if ".".join(names[: d + 1]) not in all_sections())
        found.setdefault(".".join(names[:depth]), {})[names[depth]] = None
    return {section: tuple(names) for section, names in found.items()}
