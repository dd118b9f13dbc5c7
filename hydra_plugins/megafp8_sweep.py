"""Pass every job of a sweep through `megafp8.cli.sweep`, whichever sweeper and launcher are used.

The launcher here wraps the one that the user chose, so that one place numbers, checks and reports
jobs. Hydra finds launchers in `hydra_plugins` only.
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
    """Hand jobs to another launcher through the sweep, which is also Hydra's task function."""

    def __init__(self, chosen: Any) -> None:
        """Keep the settings of the launcher that will run the jobs."""
        self._chosen = chosen

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Make the launcher that the user chose."""
        own = copy.deepcopy(config)
        with open_dict(own):
            own.hydra.launcher = self._chosen
        self._inner = Plugins.instance().instantiate_launcher(hydra_context, task_function, own)
        self._sweep: Any = task_function
        self._context, self._config = hydra_context, own

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs; each returns a number, even one that was refused or failed."""
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
