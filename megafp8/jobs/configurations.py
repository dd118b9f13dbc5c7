"""Say which configurations a comparison has: those that are compared, and their baseline."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from megafp8.config.errors import SettingError, raise_if_any
from megafp8.config.layers import find_source
from megafp8.config.load import Source
from megafp8.config.overrides import ParsedOverride, last_given, parse_overrides
from megafp8.config.own_recipes import MODULES, RECIPE
from megafp8.config.precision_changes import SCHEDULE, parse_schedule
from megafp8.config.rules import unused
from megafp8.config.schema import all_keys
from megafp8.config.values import parse_modules, plain
from megafp8.errors import RunError, UserError
from megafp8.files import to_json
from megafp8.jobs.job import directory_problems
from megafp8.jobs.starts import FROM, Start
from megafp8.observe.units import plural
from megafp8.secrets import say
from megafp8.specs.recipes import (
    HIGH_PRECISION,
    find_recipe,
    label_of,
    names_code,
    names_where,
    source_of,
)

BASELINE, GIVEN = "baseline", "given"
PRECISIONS = {"bf16": "BF16", "16": "FP16", "32": "FP32"}
STORED = tuple(
    f"model.optim.{name}"
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
)
"""Settings of FP8-LM that the baseline has at their defaults, though they work without FP8."""


@dataclass(frozen=True)
class Configuration:
    """Hold one configuration of a comparison.

    Attributes:
        label: What its runs' directories are called.
        name: What reports call it.
        overrides: Its settings, as on a command line.
        values: Every setting, by its dotted path.
    """

    label: str
    name: str
    overrides: tuple[str, ...]
    values: Mapping[str, object]

    def recipe_files(self) -> dict[str, str]:
        """Return the SHA-256 of the file of each recipe that is not built in, as it is now."""
        sources = ((name, source_of(name)) for name in sorted(_recipes(self.values)))
        return {name: source[1] for name, source in sources if source is not None}

    def changed_from(self, base: Configuration) -> list[str]:
        """Return lines that say in which settings this configuration is not the baseline."""
        return [
            f"{key}: {base.values[key]} and {value}"
            for key, value in self.values.items()
            if base.values[key] != value
        ]


@dataclass(frozen=True)
class Comparison:
    """Hold the baseline and the configurations that are compared with it.

    `parts` are the configuration again, each with one part of the model in high precision; `alone`,
    if it is asked for, has the same parts in the same order, each as the only one in FP8. All runs
    continue the checkpoint `start`; None if they begin at step 0.
    """

    base: Configuration
    others: tuple[Configuration, ...]
    parts: tuple[Configuration, ...] = ()
    alone: tuple[Configuration, ...] = ()
    start: Start | None = None

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """Return the baseline and the others."""
        return (self.base, *self.others, *self.parts, *self.alone)

    def recipe_files(self) -> dict[str, str]:
        """Return the SHA-256 of the file of each recipe that is not built in, as it is now."""
        return {name: sha for c in self.configurations for name, sha in c.recipe_files().items()}

    @cached_property
    def files_at_start(self) -> dict[str, str]:
        """Return what `recipe_files` returned when the comparison began."""
        return self.recipe_files()

    def refuse_changed_files(self) -> None:
        """Raise if a recipe's file is not the one that the comparison began with.

        Raises:
            RunError: It changed, so that the next run would have another rule.
        """
        before = self.files_at_start
        try:
            now = self.recipe_files()
        except OSError as error:
            reason = f"{error.filename}: cannot be read any more ({error.strerror})"
            raise RunError(f"{reason}. The comparison needs this recipe until its end") from error
        for name, sha in before.items():
            if now[name] != sha:
                raise RunError(
                    f"{name}: its file changed after the comparison began, and the runs that are "
                    "left would have another rule. Give the same command again for a new comparison"
                )

    @cached_property
    def identity(self) -> str:
        """Return a hash of all settings and of the recipes' files, as hexadecimal digits."""
        trees = [dict(c.values) for c in (*self.others, self.base, *self.parts, *self.alone)]
        files = self.files_at_start
        return hashlib.sha256(to_json([*trees, files] if files else trees).encode()).hexdigest()


def comparison(given: Sequence[str], replaced: Sequence[str], source: Source) -> Comparison:
    """Return what a command line compares.

    Args:
        given: Settings. One with several values (`KEY=A,B`) stands for several configurations.
        replaced: What the baseline has instead.
        source: Where the other settings come from.

    Raises:
        UserError: Settings are refused, one configuration is the baseline or another one, or the
            configurations have different baselines.
    """
    parsed = _parsed(given, source)
    given = [override.text for override in parsed]
    replaced = [override.text for override in _parsed(replaced, source)]
    for words in (given, replaced):
        reason = "cannot be set in a comparison, where each run has its own directory"
        raise_if_any(directory_problems(words, reason, "Set the comparison's with --out DIR"))
    choices = _choices(parsed)
    all_chosen = [_chosen(given, choice) for choice in choices]
    values = [source.load(chosen, _gpu_available).values for chosen in all_chosen]
    bases = [_baseline(chosen, replaced, source) for chosen in all_chosen]
    of_base, *of_others = (source.load(base, _gpu_available).values for base in bases)
    for other in of_others:
        _refuse_other_baseline(of_base, other)
    _refuse_equals(of_base, values, choices)
    base = (*bases[0], *(_with_health(bases[0], source) if of_base["model.fp8"] else ()))
    name, *names = _names(of_base, values, choices)
    return Comparison(
        Configuration(BASELINE, name, base, of_base),
        tuple(
            Configuration(label, name, (*chosen, *_with_health(chosen, source)), of_one)
            for label, name, chosen, of_one in zip(
                _labels(choices), names, all_chosen, values, strict=True
            )
        ),
    )


def continued(start: Start, given: Sequence[str], source: Source) -> Comparison:
    """Return what a comparison from a checkpoint compares: its run, and it in high precision.

    Args:
        start: The checkpoint.
        given: Settings besides those of the run.
        source: The settings of the run.

    Raises:
        UserError: Settings are refused, or have several values, or the run has no FP8.
    """
    parsed = _parsed(given, source)
    words = [override.text for override in parsed]
    reason = "cannot be set in a comparison, where each run has its own directory"
    raise_if_any(directory_problems(words, reason, "Set the comparison's with --out DIR"))
    if len(_choices(parsed)) > 1:
        raise SettingError(FROM, start.name, "is one configuration", "Give each setting one value")
    overrides = (*words, *start.overrides())
    values = source.load(overrides, _gpu_available).values
    if not values["model.fp8"]:
        reason = "has model.fp8=False, so that nothing can leave FP8 there"
        raise SettingError(FROM, start.name, reason, "Name a run that trains in FP8")
    own, name = values[SCHEDULE], str(values["trainer.precision"])
    health = _with_health(overrides, source)

    def configuration(label: str, name: str, entries: Sequence[Mapping[str, str]]) -> Configuration:
        chosen = (*overrides, *health, start.schedule(own, entries))
        return Configuration(label, name, chosen, source.load(chosen, _gpu_available).values)

    base = configuration(BASELINE, PRECISIONS.get(name, name), [{"recipe": HIGH_PRECISION}])
    other = configuration(GIVEN, _name(values, GIVEN) + _with_rules(values), [])
    return Comparison(base, (other,), start=start)


# ---- several configurations


def _parsed(words: Sequence[str], source: Source) -> list[ParsedOverride]:
    """Return overrides without those that later ones replace, which a line names."""
    directories = find_source(source.config_dir, source.config_name).directories
    parsed, problems = parse_overrides(words, directories, multirun=True)
    raise_if_any(problems)
    kept, lines = last_given(parsed)
    if lines:
        say(*lines)
    return kept


def _choices(given: Sequence[ParsedOverride]) -> list[dict[str, str]]:
    """Return the values of each configuration for the settings that have several, as typed."""
    swept = {p.text: p.sweep for p in given if p.sweep is not None}
    for text, sweep in swept.items():
        if not sweep.is_discrete_sweep():
            key, _, value = text.partition("=")
            raise SettingError(key, value, "is no list of values", "Write KEY=A,B,C")
    values = [[str(v) for v in sweep.sweep_string_iterator()] for sweep in swept.values()]
    keys = [sweep.get_key_element().lstrip("+") for sweep in swept.values()]
    return [dict(zip(keys, combination, strict=True)) for combination in itertools.product(*values)]


def _chosen(given: Sequence[str], choice: Mapping[str, str]) -> tuple[str, ...]:
    """Return the overrides of one configuration."""
    keys = (text.partition("=")[0].lstrip("+") for text in given)
    return tuple(
        f"{key}={choice[key]}" if key in choice else text
        for key, text in zip(keys, given, strict=True)
    )


def _labels(choices: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a short name for the directories of each configuration's runs."""
    if len(choices) == 1:
        return [GIVEN]
    labels: list[str] = []
    for choice in choices:
        words = "-".join(_short(key, value) for key, value in choice.items())
        plain_words = re.sub(r"[^A-Za-z0-9_.]+", "-", words).strip("-.")[:60] or GIVEN
        label, number = plain_words, 2
        while label in (*labels, BASELINE):
            label, number = f"{plain_words}-{number}", number + 1
        labels.append(label)
    return labels


def _unescaped(value: str) -> str:
    """Return a value as it is typed, without the backslashes and quotes that Hydra writes."""
    value = re.sub(r"\\([\\()\[\]{}:=, \t$])", r"\1", value)
    return value[1:-1] if re.fullmatch(r"'[^']*'|\"[^\"]*\"", value) else value


def _short(key: str, value: str) -> str:
    """Return a value, or the class and not the path of a recipe that names code."""
    value = _unescaped(value)
    if key != RECIPE or not names_code(value):
        return value
    return value.rpartition(":")[2] if ":" in value else Path(value).stem


def _refuse_other_baseline(base: Mapping[str, object], other: Mapping[str, object]) -> None:
    for key, value in other.items():
        if base[key] != value:
            raise RunError(
                f"{key}: the baseline would have {base[key]} and {value}, and all configurations "
                "of a comparison have one baseline. Compare them in a command for each value"
            )


def _refuse_equals(
    base: Mapping[str, object],
    others: Sequence[Mapping[str, object]],
    choices: Sequence[Mapping[str, str]],
) -> None:
    for index, other in enumerate(others):
        which = " ".join(f"{key}={_unescaped(v)}" for key, v in choices[index].items())
        if other == base:
            recipe = str(base[RECIPE]) if base["model.fp8"] else None
            of = f"the configuration {which}" if which else "the configuration"
            raise RunError(f"{of} is its own baseline. {_other_base(recipe)}")
        if other in others[:index]:
            raise RunError(f"the configuration {which} is given twice. Leave one out")


def _other_base(recipe: str | None) -> str:
    """Return the hint where a configuration is its own baseline; None is one without FP8."""
    if recipe is None:
        return "Give model.fp8=True, or another --base"
    traits = find_recipe(recipe).traits
    others = names_where(lambda other: other != traits)
    return f"Give another --base, such as --base {RECIPE}={others[0]}"


# ---- names


def _name(values: Mapping[str, object], otherwise: str) -> str:
    """Return what a configuration is called: its precision, if that says enough."""
    if values["model.fp8"]:
        recipe = str(values[RECIPE])
        return f"{find_recipe(recipe).traits.kind} {label_of(recipe)}"
    return PRECISIONS.get(str(values["trainer.precision"]), otherwise)


def _with_rules(values: Mapping[str, object]) -> str:
    """Return what a precision is called after its own name: the linears with another one."""
    rules = (parse_modules(values[MODULES]) or ()) if values["model.fp8"] else ()
    others = [f"{rule.pattern} in {label_of(rule.precision)}" for rule in rules]
    others[2:] = [f"{plural(len(others) - 2, 'rule')} more"] if len(others) > 2 else []
    return f" with {', '.join(others)}" if others else ""


def _names(
    base: Mapping[str, object],
    others: Sequence[Mapping[str, object]],
    choices: Sequence[Mapping[str, str]],
) -> list[str]:
    """Return different names of the baseline and of the others: of precisions if these differ."""
    names = [_name(base, BASELINE), *(_name(other, GIVEN) for other in others)]
    if len(set(names)) == len(names):
        each = zip(names, (base, *others), strict=True)
        return [name + _with_rules(values) for name, values in each]
    if len(others) == 1:
        return [BASELINE, GIVEN]
    names = [
        ", ".join(_in_words(key, value, other) for key, value in choice.items())
        for choice, other in zip(choices, others, strict=True)
    ]
    if len(set(names)) < len(names):  # recipes of one class in several folders
        names = [" ".join(f"{k}={_unescaped(v)}" for k, v in c.items()) for c in choices]
    return [BASELINE, *names]


def _in_words(key: str, value: str, values: Mapping[str, object]) -> str:
    """Return a setting as reports call it; a schedule is what changes, and from where on."""
    if key != SCHEDULE:
        return f"{key.removeprefix('model.')}={_short(key, value)}"
    changes = parse_schedule(values[SCHEDULE])
    return "; ".join(f"{c.text} from {c.start}" for c in changes) or "no change of precision"


# ---- settings of each


def _recipes(values: Mapping[str, object]) -> set[str]:
    """Return the recipes that settings name."""
    if not values["model.fp8"]:
        return set()
    rules = parse_modules(values[MODULES]) or ()
    return {str(values[RECIPE]), *(rule.precision for rule in rules)} - {HIGH_PRECISION}


def _baseline(given: Sequence[str], replaced: Sequence[str], source: Source) -> tuple[str, ...]:
    """Return the overrides of the baseline: without presets and settings that only FP8 has."""
    changes = {text.partition("=")[0]: text for text in replaced}
    loaded = source.load(given)
    values = loaded.values | {
        key: yaml.safe_load(text.partition("=")[2])
        for key, text in changes.items()
        if key in loaded.values
    }
    # These work without FP8 too, and with them the keys that need states in low precision.
    stored = [] if values["model.fp8"] else [key for key in STORED if key not in changes]
    values |= dict.fromkeys(stored)
    idle = {idle_key.key for idle_key in unused(values)}
    kept = [
        "precision=bf16" if text.startswith("precision=fp8") else text
        for text in given
        if (key := text.partition("=")[0].lstrip("+")) not in changes
        and key not in idle
        and key not in stored
    ]
    # A file may set the same, also what the command line has set again: there it would stay on, or
    # be a mistake without what is left out.
    origins = loaded.origins
    reset = [f"{key}=null" for key in stored if key in origins]
    reset += [
        f"{key}={plain(all_keys()[key].default)}"
        for key in sorted(idle)
        if key in origins and origins[key].is_users
    ]
    return (*kept, *replaced, *reset)


def _gpu_available() -> bool:
    """Whether PyTorch finds a GPU; torch is imported only where a setting depends on it."""
    import torch

    return torch.cuda.is_available()


def _with_health(given: Sequence[str], source: Source) -> tuple[str, ...]:
    """Return the setting that measures what each tensor loses, if the run can have it.

    With CUDA graphs logged steps would then not be replayed, and take another time.
    """
    if any(text.startswith("model.fp8_health=") for text in given):
        return ()
    try:
        values = source.load((*given, "model.fp8_health=full")).values
    except UserError:
        return ()
    return () if values["model.enable_cuda_graph"] else ("model.fp8_health=full",)
