"""Compose a sweep's settings with Hydra, and let no YAML file name code, files or variables.

Hydra composes the settings of the sweep once, and those of each job again. Both go through the
loader here, which checks every file that takes part (`megafp8.config.hydra_section`). A sweep whose
sweeper cannot start, or whose jobs are too many to be listed, is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import PurePath
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from megafp8.config.errors import COMMAND_LINE, SettingError, raise_if_any
from megafp8.config.hydra_section import HYDRA, choice_problems, file_problems, is_hydras
from megafp8.config.layers import (
    ComposedFile,
    Files,
    conf_dir,
    hydra_problem,
    root_defaults,
    search_path,
)
from megafp8.config.merged import merge
from megafp8.config.overrides import ParsedOverride, hydras_parser, texts_quoted
from megafp8.config.schema import copied
from megafp8.errors import UserError
from megafp8.secrets import hide_values, redacted

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
MAX_JOBS = 10_000
"""The most jobs that Hydra's own sweeper may make; it lists all of them before the first starts."""
_SWEEP_ROOT = "megafp8_sweep"
_REPLACED = r"\n'hydra/launcher/submitit_slurm' is validated against"
_CODE = "settings must not name code to run"


class CheckedLoader(ConfigLoaderImpl):  # type: ignore[misc,unused-ignore]
    """Load settings as Hydra does, and refuse what a file or a job must not give to Hydra."""

    _num_checked = 0

    def load_configuration(self, *args: Any, **kwargs: Any) -> Any:
        """Return the composed settings.

        Raises:
            SettingError: A file gives Hydra a setting that a file must not give.
        """
        self._num_checked = 0
        with warnings.catch_warnings():
            # conf/hydra/launcher/submitit_slurm.yaml replaces submitit's own settings on purpose.
            warnings.filterwarnings("ignore", message=_REPLACED)
            cfg = super().load_configuration(*args, **kwargs)
        if not self._num_checked:
            raise AssertionError("this version of Hydra reads files without our check of them")
        if cfg.hydra.callbacks:
            raise SettingError("hydra.callbacks", None, _CODE, "Leave it out")
        _redact(cfg)
        return cfg

    def load_sweep_config(self, master_config: Any, sweep_overrides: list[str]) -> Any:
        """Return the settings of one job.

        Raises:
            SettingError: The job's overrides have a setting of Hydra itself.
        """
        _refuse_hydras(sweep_overrides)
        return super().load_sweep_config(master_config, sweep_overrides)

    def _load_single_config(self, default: Any, repo: Any) -> Any:
        self._num_checked += 1
        config = repo.load_config(config_path=default.config_path)
        is_users = config.path.startswith("file://") and config.path != f"file://{conf_dir()}"
        if is_users and OmegaConf.is_config(config.config):
            tree = OmegaConf.to_container(config.config, resolve=False)
            name = f"{PurePath(default.config_path).name}.yaml"
            problems = file_problems(default.package or "", tree, name)
            raise_if_any([*problems, *choice_problems(config.defaults_list, name)])
        return super()._load_single_config(default, repo)


def _redact(cfg: Any) -> None:
    """Hide the secrets of a file in Hydra's tree, which sweepers and launchers write to files.

    Jobs do not read their settings from this tree, so that nothing depends on the hidden values.
    """
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    with open_dict(cfg):
        for key, value in tree.items():
            if key != HYDRA and (safe := redacted(value, str(key))) != value:
                cfg[key] = safe


def _refuse_hydras(overrides: Sequence[str]) -> None:
    raise_if_any(
        [
            SettingError(
                text.partition("=")[0],
                None,
                "Hydra's own settings cannot differ between the jobs of a sweep",
                "Leave it out of hydra.sweeper.params",
            )
            for text in overrides
            if is_hydras(text)
        ]
    )


def checked_loader(source: ComposedFile) -> CheckedLoader:
    """Return Hydra's loader of a tree without types, since `load` checks the values of each job."""
    setup_globals()
    Plugins.instance()  # finds the sweepers and launchers, of which a sweep chooses
    quiet = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    try:
        defaults = ["_self_", *root_defaults(source), *quiet]
    except Exception as error:  # Hydra raises any kind of error at a file that is no YAML
        raise hydra_problem(source, error) from error
    root = copied(_root_without_defaults())
    root.defaults = defaults
    name = f"{_SWEEP_ROOT}.yaml"  # `store` would make and copy the whole tree again
    ConfigStore.instance().repo[name] = ConfigNode(name, root, None, None, None)
    loader = CheckedLoader(search_path(source))
    loader.repository = Files(source)  # it checks a file before Hydra parses it
    return loader


@cache
def _root_without_defaults() -> Any:
    """Return what `ConfigStore` makes of the settings that each sweep begins with."""
    tree: Any = OmegaConf.to_container(merge([]).tree, resolve=False)
    settings = {
        "run": {"dir": "."},
        "output_subdir": None,
        "job": {"name": "megafp8", "chdir": False},
        "sweep": {"dir": "multirun/${now:%Y-%m-%d_%H-%M-%S}", "subdir": "${hydra.job.num}"},
    }
    return OmegaConf.structured({"defaults": [], "hydra": settings, **tree})


def composed(source: ComposedFile, loader: CheckedLoader, overrides: list[str]) -> Any:
    """Return the settings of a whole sweep.

    Raises:
        SettingError: Hydra cannot compose them, or a file gives what a file must not give.
    """
    try:
        cfg: Any = loader.load_configuration(_SWEEP_ROOT, overrides, RunMode.MULTIRUN)
    except UserError:
        raise
    except Exception as error:  # Hydra raises any kind of error at `hydra: null` and so on
        raise hydra_problem(source, error) from error
    try:
        directory = str(cfg.hydra.sweep.dir)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise SettingError("hydra.sweep.dir", None, reason, "Give a directory") from error
    if hide_values(directory) != directory:
        hint = "Give a directory whose name holds no secret"
        raise SettingError("hydra.sweep.dir", None, "holds a secret", hint)
    cfg.hydra.sweep.dir = directory  # `${now:…}` is resolved once for all jobs
    return cfg


# ---- what is refused before the first job


def sweeper_problems(overrides: Sequence[ParsedOverride], settings: Any) -> list[SettingError]:
    """Return errors for a sweeper or a launcher that is none, and for what Hydra's sweeper refuses.

    The latter are intervals, batches and too many jobs.
    """
    for name in ("launcher", "sweeper"):
        part = settings[name]
        if not isinstance(part, DictConfig) or "_target_" not in part:
            hint = f"Leave it out, or choose one with hydra/{name}=NAME"
            return [SettingError(f"hydra.{name}", None, f"names no {name}", hint)]
    if settings.sweeper._target_ != BASIC_SWEEPER:
        return []
    return [
        *_batch_problems(settings.sweeper),
        *_interval_problems(overrides),
        *_number_problems([*overrides, *_params(settings.sweeper)]),
    ]


def keep_texts(sweeper: Any) -> None:
    """Quote the numbers among the texts that `hydra.sweeper.params` gives to jobs."""
    params: Any = sweeper.get("params")
    for key, value in params.items() if isinstance(params, DictConfig) else ():
        if isinstance(value, str):
            text = "=".join((str(key), value))
            with suppress(HydraException, ValueError, RecursionError):  # the sweeper reports it
                hydras_parser().parse_override(text)
                params[key] = texts_quoted(text, ()).partition("=")[2]


def _batch_problems(sweeper: Any) -> list[SettingError]:
    size = sweeper.get("max_batch_size")
    if size is None or (type(size) is int and size > 0):
        return []
    reason = "is not a number of jobs above 0"
    return [SettingError("hydra.sweeper.max_batch_size", size, reason, "Give one, or null")]


def _interval_problems(overrides: Sequence[ParsedOverride]) -> list[SettingError]:
    return [
        SettingError(
            override.text.partition("=")[0],
            override.text.partition("=")[2],
            "is an interval, and this sweeper runs every combination of single values",
            "Give values, as 1,2,3 or range(1,4), or choose a sweeper that draws values with "
            "hydra/sweeper=NAME",
            origin=COMMAND_LINE,
        )
        for override in overrides
        if override.sweep is not None and not override.sweep.is_discrete_sweep()
    ]


def _params(sweeper: Any) -> list[ParsedOverride]:
    """Return the values that a YAML gives to the sweeper; the sweeper reports wrong ones."""
    overrides = []
    params: Any = sweeper.get("params")
    for key, value in params.items() if isinstance(params, DictConfig) else ():
        text = "=".join((str(key), str(value)))
        with suppress(HydraException, ValueError, RecursionError):
            override = hydras_parser().parse_override(text)
            sweep = override if override.is_sweep_override() else None
            overrides.append(ParsedOverride(text, (), sweep))
    return overrides


def _number_problems(overrides: Sequence[ParsedOverride]) -> list[SettingError]:
    """Return an error if the combinations of all values are more than `MAX_JOBS`."""
    jobs = 1
    for override in overrides:
        sweep = override.sweep
        if sweep is None or not sweep.is_discrete_sweep():
            continue
        jobs *= _num_values(sweep)
        if jobs > MAX_JOBS:
            key, _, value = override.text.partition("=")
            reason = f"makes more than {MAX_JOBS} jobs in this sweep"
            return [SettingError(key, value, reason, "Give fewer values", origin=COMMAND_LINE)]
    return []


def _num_values(sweep: Override) -> int:
    """Return how many values an override has; no more than `MAX_JOBS` + 1 are counted."""
    span: Any = sweep.value()
    try:
        values = span.range() if sweep.is_range_sweep() else sweep.sweep_iterator()
        return sum(1 for _ in islice(values, MAX_JOBS + 1))
    except (HydraException, ValueError):
        return 0  # its step is 0, which the sweeper reports
    except ArithmeticError:  # an end that is not a number
        return MAX_JOBS + 1
