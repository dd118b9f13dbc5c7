"""Load a run's state from its own newest checkpoint, or from one that the settings name."""

from __future__ import annotations

from pathlib import Path

from megafp8.checkpoint.best import METRICS
from megafp8.checkpoint.verification import check_structure
from megafp8.config.errors import SettingError, raise_if_any
from megafp8.config.resume import differences
from megafp8.data.prepare import PreparedData
from megafp8.errors import CheckpointError
from megafp8.observe.console import Console
from megafp8.parallel.agreement import on_main, raise_on_all
from megafp8.specs import RunSpec
from megafp8.train import state_dict
from megafp8.train.saver import Saver, newest_after_cleanup
from megafp8.train.state import TrainState
from megafp8.train.weights import find_checkpoint


def load_newest(saver: Saver, state: TrainState, data: PreparedData, console: Console) -> None:
    """Fill `state` from the run's own newest good checkpoint, if it has one."""
    newest = newest_after_cleanup(saver.root, state.mesh, console.warn)
    if newest is None:
        return
    _load(newest, saver, state, data, console)
    saver.last_step = state.step
    console.event(f"continuing from {newest}")


def resume_from(
    path: Path,
    spec: RunSpec,
    saver: Saver,
    state: TrainState,
    data: PreparedData,
    console: Console,
) -> None:
    """Fill a new run's state from a checkpoint, or from the newest one of another run.

    All ranks call it together.

    Raises:
        CheckpointError: `path` has no good checkpoint, or one that was trained on other data.
        ConfigError: The checkpoint was made with another model, other data or another optimizer.
    """

    def find() -> Path:
        found = find_checkpoint(path, console.warn)
        _check_settings(found, spec)
        return found

    found = on_main(state.mesh, find)
    _load(found, saver, state, data, console)
    console.event(f"starting from {found}, at step {state.step}")


def _load(
    path: Path, saver: Saver, state: TrainState, data: PreparedData, console: Console
) -> None:
    meta = state_dict.load(path, state, console.warn)
    if meta["data_fingerprint"] != data.fingerprint:
        raise_on_all(
            CheckpointError(
                path,
                f"was trained on other data (fingerprint {meta['data_fingerprint'][:12]}, now "
                f"{data.fingerprint[:12]})",
                "Set model.data.data_prefix to the data of the checkpoint, or start a new run with "
                "another exp_manager.name",
            )
        )
    saver.metrics = dict(meta.get(METRICS, {}))


def _check_settings(path: Path, spec: RunSpec) -> None:
    config = check_structure(path).meta.get("config")
    if not isinstance(config, dict) or "data_fingerprint" not in check_structure(path).meta:
        raise CheckpointError(
            path,
            "has weights, but no state of training",
            "Use restore_from_path, which reads the weights only",
        )
    raise_if_any(
        [
            SettingError(
                d.key,
                d.new,
                f"the checkpoint {path} was made with {d.old}",
                f"Set {d.key}={d.old}, or use restore_from_path, which reads the weights only",
            )
            for d in differences(config, spec.resolved)
        ]
    )
