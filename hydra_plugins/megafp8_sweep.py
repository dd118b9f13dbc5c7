"""The launcher that every job of a sweep passes through, whatever sweeper chose it.

It wraps the launcher that was asked for, so that jobs are numbered, checked and reported in one
place (`megafp8.cli.sweep`). Hydra finds launchers in `hydra_plugins` only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


class ReportingLauncher(Launcher):
    """Hands jobs to another launcher by way of the sweep, which is the task function too."""

    def __init__(self, chosen: Any) -> None:
        """Take the settings of the launcher that runs the jobs."""
        self._chosen = chosen

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Make the launcher that was chosen."""
        own = copy.deepcopy(config)
        with open_dict(own):
            own.hydra.launcher = self._chosen
        self._inner = Plugins.instance().instantiate_launcher(hydra_context, task_function, own)
        self._sweep: Any = task_function
        self._context, self._config = hydra_context, own

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs; each of them returns a number, also one that was refused or has failed."""
        jobs = [
            self._sweep.job(
                number,
                overrides,
                self._context.config_loader.load_sweep_config(self._config, list(overrides)),
            )
            for number, overrides in enumerate(job_overrides, start=initial_job_idx)
        ]
        results: Sequence[JobReturn] = self._sweep.launch(self._inner, jobs)
        return results
