"""Load a configuration: collect its layers, merge them, check the values, report all problems."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig

from megafp8.config import dialects
from megafp8.config.base_model import with_base, with_moved_folder
from megafp8.config.checks import check_values, within_ranges
from megafp8.config.checks.precision import format_notes
from megafp8.config.errors import COMMAND_LINE, DEFAULT, Origin, SettingError, raise_if_any
from megafp8.config.hydra_section import HYDRA, is_hydras
from megafp8.config.layers import DEFAULT_CONFIG, Layer, compose_layers, find_source
from megafp8.config.learning_rate import schedule_notes, without_own_rate
from megafp8.config.merged import Merged, closed_tree, default_values, merge
from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import last_given, parse_overrides
from megafp8.config.own_recipes import TRUST, load_own_recipes, names_given
from megafp8.config.rules import Unused, effective, unused
from megafp8.config.settings import Setting, optional_sections
from megafp8.secrets import (
    HIDDEN,
    has_login,
    named_secrets,
    one_line,
    redacted,
    secret_values,
    variable_in,
)

ACCELERATOR, BACKEND = "trainer.accelerator", "model.fp8_backend"


@dataclass(frozen=True)
class Loaded:
    """Hold checked settings, their origins, and the settings without effect.

    Attributes:
        values: The values of all keys of the schema, with interpolations resolved.
        origins: The layer that set each key, for all keys that a layer after the default job set.
        inert: The given keys of NeMo that have no effect in megafp8, and Hydra's section.
        unused: The given keys that have no effect with the other settings, where this is no
            mistake: a preset or a NeMo file set them, or a stronger layer switched them off.
        translated: The given values that NeMo spells in another way.
        notes: Lines about settings that have less effect than their values say.
        merged: The settings as they were written, with interpolations.
    """

    values: dict[str, Any]
    origins: Mapping[str, Origin]
    inert: tuple[Setting, ...]
    unused: tuple[tuple[Setting, Unused], ...]
    translated: tuple[dialects.Translated, ...]
    notes: tuple[str, ...]
    merged: Merged

    @cached_property
    def cfg(self) -> DictConfig:
        """Return the tree of the schema, as `--cfg job` shows it; it takes no new keys."""
        return closed_tree(self.merged.tree, self.values)

    def changed_to(self, changes: Mapping[str, Any], origin: Origin | None = None) -> Loaded:
        """Return the settings with some changed, and those that refer to these; nothing is checked.

        Args:
            changes: The new values by key.
            origin: The new layer of these keys; None leaves the layers as they are.
        """
        merged = self.merged.copy()
        for key, value in changes.items():
            merged.put(Setting(key, value, origin or self.origins.get(key, DEFAULT)))
        values = self.values | merged.values()[0]  # one that cannot be read stays as it was
        return replace(self, values=values, origins=merged.origins, merged=merged)

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


@dataclass(frozen=True, kw_only=True)
class Source:
    """Say which YAML the settings of a command line are added to, and whether its recipes run.

    Attributes:
        config_dir: The directory of the user's own YAML files.
        config_name: The YAML's name.
        trusts_recipes: Whether recipes that YAML files name as code may be imported.
    """

    config_dir: Path | None = None
    config_name: str = DEFAULT_CONFIG
    trusts_recipes: bool = False

    def load(
        self,
        overrides: Sequence[str],
        gpu_available: Callable[[], bool] | None = None,
        **more: Any,
    ) -> Loaded:
        """Return the settings that `load_all` returns; `more` are its other arguments."""
        trusts, places = self.trusts_recipes, (self.config_dir, self.config_name)
        return load_all(overrides, *places, gpu_available, trusts_recipes=trusts, **more)

    def words(self) -> tuple[str, ...]:
        """Return the options that give another command the same source."""
        folder = [f"--config-dir={self.config_dir.absolute()}"] if self.config_dir else []
        name = [] if self.config_name == DEFAULT_CONFIG else [f"--config-name={self.config_name}"]
        return (*folder, *name, *([TRUST] if self.trusts_recipes else []))


def load(
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    config_name: str = DEFAULT_CONFIG,
) -> dict[str, Any]:
    """Return the values of all settings, by their keys, after all checks that need no device.

    Whether a learning rate suits the model is left to `load_all`, which a command calls.

    Args:
        overrides: Overrides as on the command line, for example `model.fp8=True`.
        config_dir: A directory of the user's own YAML files.
        config_name: The YAML's name, with or without `.yaml`.

    Raises:
        ConfigError: `SettingError` for one problem, `CombinedConfigError` for several.
    """
    return load_all(overrides, config_dir, config_name, trains=False).values


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
    """Return the values that `load` returns, with origins and settings without effect.

    Arguments and errors are those of `load`. `trains` False says that the settings are for no run,
    so that the learning rate does not matter. `gpu_available` returns whether this machine has a
    GPU; it is called only if a given key has an effect on one of the two devices alone. Without it,
    what holds on one of the devices is accepted. `trusts_recipes` says that recipes which YAML
    files name as code may be imported. `recipes_given` has the names that a sweep's command line
    gives to its jobs; None stands for a single run, whose `overrides` were all typed.
    """
    source = find_source(config_dir, config_name)
    parsed, problems = parse_overrides(overrides, source.directories)
    counted, repeated = last_given(parsed)
    try:
        layers = compose_layers(source, counted)
    except SettingError as problem:
        raise_if_any([*problems, problem])
        raise
    layers, moved = with_moved_folder(layers, source.file.parent)
    ours = dialects.translate(layers)
    problems += ours.problems
    given = [setting for layer in ours.layers for setting in layer.settings]
    hydras = [setting for setting in given if is_hydras(setting.key)]
    layers = [
        Layer(layer.origin, tuple(s for s in layer.settings if s not in hydras))
        for layer in ours.layers
    ]
    try:
        layers = with_base(layers, lambda path: merge(layers).read(path))
    except SettingError as problem:
        problems.append(problem)
    beside = dialects.beside_others(layers)
    merged = merge([*layers, *beside.layers])
    origins = merged.origins
    problems += merged.problems + beside.problems
    values, unreadable = merged.values()
    known = {text for s in given for text in named_secrets(s.value, s.key)}
    refused_already = {problem.key for problem in problems}
    problems += [problem for problem in unreadable if problem.key not in refused_already]
    problems += _secret_problems(values, origins, known)
    typed = names_given(parsed) if recipes_given is None else recipes_given
    problems += load_own_recipes(values, origins, trusts_files=trusts_recipes, given=typed)
    bad = {problem.key for problem in problems}
    good = {key: value for key, value in values.items() if key not in bad}
    good = _on_this_machine(good, gpu_available)
    inert, refused = dialects.inert_settings(merged, values)
    inert += hydras
    counting = [s for override in counted for s in override.settings]
    replaced = [s for override in parsed for s in override.settings if s not in counting]
    refused += _secrets_of_the_command_line([*inert, *replaced])
    found = problems + check_values(good, origins) + refused + _environment_problems(good)
    defaults = {s.key: s.value for s in given if s.origin == DEFAULT}
    if trains and (problem_of_rate := without_own_rate(good, origins, defaults)) is not None:
        found.append(problem_of_rate)
    raise_if_any(dialects.launcher_paths_once(found))
    idle = [  # the default job's own settings, which have no origin, are not reported
        (Setting(found.key, values[found.key], origins[found.key]), found)
        for found in unused(good)
        if found.key in origins
    ]
    translated = [t for t in ours.translated if origins.get(t.setting.key) == t.setting.origin]
    translated += beside.translated
    meant = {t.setting.key for t in beside.translated}
    inert = [replace(s, value=redacted(s.value, s.key, known)) for s in inert if s.key not in meant]
    notes = [*repeated, *moved, *beside.notes, *schedule_notes(values)]
    notes += format_notes(values, origins)
    idle = [*beside.idle, *idle]
    return Loaded(
        values, origins, tuple(inert), tuple(idle), tuple(translated), tuple(notes), merged
    )


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
    usual = default_values()
    if any(text in _text_of_default_job() for text in (*known, *secrets.values())):
        usual = {}  # a secret that is also an ordinary word, such as a recipe's name
    return [
        SettingError(
            path,
            HIDDEN,
            f"holds {what}, and would be recorded",
            "Leave it out; libraries that need a secret read it from the environment",
            origin=origins.get(path, DEFAULT),
        )
        for path, value in values.items()
        if value != usual.get(path, MISSING) and (what := _secret_in(path, value, known, secrets))
    ]


@cache
def _text_of_default_job() -> str:
    """Return the values of the default job, none of which is a secret by its form or name."""
    return "\n".join(map(str, default_values().values()))


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
