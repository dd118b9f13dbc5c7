"""Merge the layers of a configuration into one typed tree, check it, and report all problems."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from megafp8.config.base_model import with_base
from megafp8.config.checks import check_values, within_ranges
from megafp8.config.errors import DEFAULT, Origin, SettingError, raise_if_any
from megafp8.config.keys import needs
from megafp8.config.layers import (
    DEFAULT_CONFIG,
    HYDRA,
    Layer,
    default_job,
    find_source,
    layers_of,
)
from megafp8.config.nemo import launcher_paths_once, nemo_keys
from megafp8.config.overrides import parse_overrides
from megafp8.config.rules import Unused, unused
from megafp8.config.schema import all_keys, schema_tree
from megafp8.config.secrets import HIDDEN, variable_in
from megafp8.config.settings import (
    UNDECIDED,
    Setting,
    is_interpolation,
    put_in,
    read_value,
    read_values,
)
from megafp8.config.spellings import Translated, translate
from megafp8.config.values import one_line, plain

ACCELERATOR = "trainer.accelerator"
GRAPH, BACKEND = "model.enable_cuda_graph", "model.fp8_backend"


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
    """

    cfg: DictConfig
    origins: Mapping[str, Origin]
    inert: tuple[Setting, ...]
    unused: tuple[tuple[Setting, Unused], ...] = ()
    translated: tuple[Translated, ...] = ()

    def inert_lines(self) -> list[str]:
        """Return lines about settings that were translated or have no effect.

        Those without effect for the same reason share a line.
        """
        lines = [
            f"translated: {t.setting.key}={one_line(t.setting.value)} ({t.setting.origin}): "
            f"{one_line(t.value)}"
            for t in self.translated
        ]
        groups: dict[tuple[str, str], list[str]] = {}
        for s in self.inert:
            if s.key == HYDRA:
                text, note = HYDRA, "Hydra's own settings have an effect in a sweep (-m) only"
            else:
                text, note = f"{s.key}={one_line(s.value)}", nemo_keys()[s.key].note
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

    Args:
        overrides: Overrides as on the command line, for example `model.fp8=True`.
        config_dir: A directory of the user's own YAML files.
        config_name: The YAML's name, with or without `.yaml`.

    Raises:
        ConfigError: `SettingError` for one problem, `CombinedConfigError` for several.
    """
    return load_all(overrides, config_dir, config_name).cfg


def load_all(
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    config_name: str = DEFAULT_CONFIG,
    gpu_available: Callable[[], bool] | None = None,
) -> Loaded:
    """Return the tree that `load` returns, with origins and settings without effect.

    Arguments and errors are those of `load`. `gpu_available` returns whether this machine has a
    GPU; it is called only if a given key has an effect on one of the two devices alone. Without it,
    what holds on one of the devices is accepted.
    """
    source = find_source(config_dir, config_name)
    parsed, problems = parse_overrides(overrides, source.directories)
    try:
        layers = layers_of(source, parsed)
    except SettingError as problem:
        raise_if_any([*problems, problem])
        raise
    translations = [translate(layer.settings) for layer in layers]
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
    idle = _without_graphs_of_nemo(tree, origins)
    values, unreadable = read_values(tree, origins)
    problems += unreadable + _secret_problems(values, origins)
    bad = {problem.key for problem in problems}
    good = {key: value for key, value in values.items() if key not in bad}
    good = _on_this_machine(good, gpu_available)
    inert, refused = _nemo_settings(tree, values, origins)
    found = problems + check_values(good, origins) + refused
    raise_if_any(launcher_paths_once(found))
    inert += [s for layer in layers for s in layer.settings if s.key == HYDRA]
    idle += [  # the default job's own settings, which have no origin, are not reported
        (Setting(found.key, values[found.key], origins[found.key]), found)
        for found in unused(good)
        if found.key in origins
    ]
    translated = tuple(
        t
        for _, of_layer in translations
        for t in of_layer
        if origins.get(t.setting.key) == t.setting.origin  # no stronger layer replaced it
    )
    return Loaded(_typed(tree, values), origins, tuple(inert), tuple(idle), translated)


def merge(layers: Sequence[Layer]) -> tuple[DictConfig, dict[str, Origin], list[SettingError]]:
    """Return one tree of all layers, the origins of its values, and what could not be merged."""
    tree = tree_with_nemo_keys()
    origins: dict[str, Origin] = {}
    problems: list[SettingError] = []
    for layer in layers:
        for setting in layer.settings:
            if setting.key.partition(".")[0] == HYDRA:
                continue
            problem = put_in(tree, setting)
            if problem is not None:
                problems.append(problem)
            elif setting.key == UNDECIDED:
                continue
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


def _without_graphs_of_nemo(
    tree: DictConfig, origins: dict[str, Origin]
) -> list[tuple[Setting, Unused]]:
    """Switch CUDA graphs off that a NeMo file asks for; return the setting, to be listed.

    In NeMo they are Transformer Engine's and change times only. Here they would make `auto` leave
    Transformer Engine for native layers. They stay if someone chose these; NeMo has no such key.
    """
    origin = origins.get(GRAPH, DEFAULT)
    if not origin.is_nemos:
        return []
    try:
        value, backend = read_value(tree, GRAPH), read_value(tree, BACKEND)
    except (OmegaConfBaseException, ValueError, OverflowError, RecursionError):
        return []  # `read_values` reports it
    if value is not True or backend == "native":
        return []
    OmegaConf.update(tree, GRAPH, False)
    del origins[GRAPH]
    found = Unused(GRAPH, needs(BACKEND, "native"), f"{BACKEND}={plain(backend)}")
    return [(Setting(GRAPH, value, origin), found)]


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


def _secret_problems(
    values: Mapping[str, Any], origins: Mapping[str, Origin]
) -> list[SettingError]:
    """Return the settings that hold a secret of the environment.

    Settings are written into the run's directory and sent to trackers, so a token must not be one.
    """
    return [
        SettingError(
            path,
            HIDDEN,
            f"holds the value of the environment variable {name}, and would be recorded",
            f"Leave it out; libraries that need {name} read it from the environment",
            origin=origins.get(path, DEFAULT),
        )
        for path, value in values.items()
        if isinstance(value, str) and (name := variable_in(value))
    ]


def _nemo_settings(
    tree: DictConfig, values: Mapping[str, Any], origins: Mapping[str, Origin]
) -> tuple[list[Setting], list[SettingError]]:
    """Return NeMo's keys without effect that were given, and errors for those of wrong values."""
    inert: list[Setting] = []
    refused: list[SettingError] = []
    for path, origin in origins.items():
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
    order = list(nemo_keys())
    return sorted(inert, key=lambda setting: order.index(setting.key)), refused


def _typed(tree: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Return the tree without NeMo's keys, closed to new keys; `values` are its keys' values."""
    for path in nemo_keys():
        _delete(tree, path)
    for path in all_keys():  # an interpolation of a key that was removed becomes that key's value
        if not (is_interpolation(tree, path) or isinstance(values[path], (list, dict))):
            continue
        try:
            stands = read_value(tree, path) == values[path]
        except OmegaConfBaseException:
            stands = False
        if not stands:
            OmegaConf.update(tree, path, values[path])
    OmegaConf.set_struct(tree, True)
    return tree


def _delete(cfg: DictConfig, path: str) -> None:
    """Delete a key, and the sections that are empty without it."""
    names = path.split(".")
    for end in range(len(names) - 1, -1, -1):
        node = OmegaConf.select(cfg, ".".join(names[:end])) if end else cfg
        if not isinstance(node, DictConfig):
            return
        if names[end] in node.keys() and (end == len(names) - 1 or not node._get_node(names[end])):
            with open_dict(node):
                del node[names[end]]  # unlike pop(), del does not resolve an interpolation
