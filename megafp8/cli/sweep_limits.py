"""Refuse a sweep whose sweeper cannot start, or whose jobs are too many to be listed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from megafp8.config.errors import COMMAND_LINE, SettingError
from megafp8.config.overrides import ParsedOverride, hydras_parser, texts_quoted

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
MAX_JOBS = 10_000
"""The most jobs that Hydra's own sweeper may make; it lists all of them before the first starts."""


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
    if not sweep.is_range_sweep():
        return sum(1 for _ in islice(sweep.sweep_iterator(), MAX_JOBS + 1))
    span: Any = sweep.value()
    start, stop, step = (float(end or 0) for end in (span.start, span.stop, span.step))
    if step == 0:
        return 0  # the sweeper reports it
    if not math.isfinite((stop - start) / step):
        return MAX_JOBS + 1
    return min(MAX_JOBS + 1, max(0, math.ceil((stop - start) / step)))
