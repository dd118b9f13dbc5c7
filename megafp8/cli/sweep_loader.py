"""Compose a sweep's settings with Hydra, and let no YAML file name code, files or variables.

Hydra composes the settings of the sweep once, and those of each job again. Both go through the
loader here, which checks every file that takes part (`megafp8.config.hydra_section`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from megafp8.config.errors import SettingError, raise_if_any
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
from megafp8.errors import UserError
from megafp8.secrets import hide_values, redacted

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
    tree: Any = OmegaConf.to_container(merge([]).tree, resolve=False)
    settings = {
        "run": {"dir": "."},
        "output_subdir": None,
        "job": {"name": "megafp8", "chdir": False},
        "sweep": {"dir": "multirun/${now:%Y-%m-%d_%H-%M-%S}", "subdir": "${hydra.job.num}"},
    }
    quiet = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    try:
        defaults = ["_self_", *root_defaults(source), *quiet]
    except Exception as error:  # Hydra raises any kind of error at a file that is no YAML
        raise hydra_problem(source, error) from error
    root = {"defaults": defaults, "hydra": settings, **tree}
    ConfigStore.instance().store(_SWEEP_ROOT, root)
    loader = CheckedLoader(search_path(source))
    loader.repository = Files(source)  # it checks a file before Hydra parses it
    return loader


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
