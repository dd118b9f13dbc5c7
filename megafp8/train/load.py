"""Load the whole state of a run that continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megafp8.checkpoint import store
from megafp8.checkpoint.best import METRICS
from megafp8.checkpoint.manifest import check_state
from megafp8.checkpoint.step_directories import MANIFEST_NAME, set_aside, step_name
from megafp8.checkpoint.verify import check_structure
from megafp8.config.base_model import why_no_checkpoint
from megafp8.config.errors import SettingError, raise_if_any
from megafp8.config.resolve import optim_of
from megafp8.config.resume import (
    LAST_IN_EFFECT,
    Resolved,
    last_in_effect,
    setting_differences,
    typed,
    with_defaults,
)
from megafp8.config.values import schedule_steps
from megafp8.errors import CheckpointError
from megafp8.files import expanded, os_errors_reported, paths_reported
from megafp8.observe.console import Console
from megafp8.optim.schedules import learning_rate
from megafp8.parallel.agreement import on_main, raise_on_all
from megafp8.parallel.launch import note_checkpoint
from megafp8.parallel.mesh import Mesh
from megafp8.runs.find import CHECKPOINTS_DIR, find_run
from megafp8.runs.run_data import RunData
from megafp8.specs import RunSpec
from megafp8.specs.recipes import source_of
from megafp8.train import state_dict
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState

RECIPE_FILES = "recipe_files"
"""The key of a checkpoint's `meta` with the hashes that `recipe_files` returns."""

Notify = Callable[[str], None]


def load_newest(saver: Saver, state: TrainState, data: RunData, console: Console) -> None:
    """Fill `state` from the run's own newest good checkpoint, if it has one."""
    newest = newest_after_cleanup(saver.root, state.mesh, console.warn)
    if newest is None:
        return
    _load(newest, saver, state, data, console)
    saver.last_step = state.step
    if state.mesh.is_main:
        note_checkpoint(newest)
    console.event(f"continuing from {newest}")


def newest_after_cleanup(root: Path, mesh: Mesh, notify: Notify) -> Path | None:
    """Return the newest checkpoint that verifies, or None; the main rank finds it for all.

    Newer checkpoints, which are damaged, are renamed, because pruning needs the newest one to be
    good. Checkpoints that a killed process left half written are deleted, to free disk space.
    """

    def find() -> Path | None:
        store.remove_leftovers(root)
        newest = store.newest_valid(root, notify)
        _set_aside_after(newest)
        return newest

    return on_main(mesh, find)


def _set_aside_after(newest: Path | None) -> None:
    """Rename the checkpoints that are newer than `newest`; without a good one, none is renamed."""
    if newest is None:
        return
    paths = [newest.parent / step_name(step) for step in store.steps(newest.parent)]
    for path in paths[paths.index(newest) + 1 :]:
        with os_errors_reported(path, "setting a damaged checkpoint aside"):
            set_aside(path)


def resume_from(
    path: Path,
    spec: RunSpec,
    saver: Saver,
    state: TrainState,
    data: RunData,
    console: Console,
) -> None:
    """Fill a new run's state from a checkpoint, or from the newest one of another run.

    All ranks call it together.

    Raises:
        CheckpointError: `path` has no good checkpoint, or one that was trained on other data.
        ConfigError: The checkpoint was made with another model, other data or another optimizer.
    """

    def find() -> Path:
        checkpoint = find_checkpoint(path, console.warn)
        _check_settings(checkpoint, spec)
        return checkpoint

    checkpoint = on_main(state.mesh, find)
    _load(checkpoint, saver, state, data, console)
    console.event(f"starting from {checkpoint}, at step {state.step}")


def _load(path: Path, saver: Saver, state: TrainState, data: RunData, console: Console) -> None:
    """Fill the state from a checkpoint, check its data, and report what a continued run changes."""
    meta = state_dict.load_checkpoint(path, state, console.warn)
    if meta["data_fingerprint"] != data.fingerprint:  # on all ranks, as `open_on_all` has checked
        raise_on_all(
            CheckpointError(
                path,
                f"was trained on other data (fingerprint {meta['data_fingerprint'][:12]}, now "
                f"{data.fingerprint[:12]})",
                "Name the data of the checkpoint by model.data.data_prefix (or, to fine-tune, by "
                "model.data.train_ds.file_names), or start a new run in another directory: by "
                "exp_manager.name, or by hydra.sweep.dir in a sweep",
            )
        )
    for line in _changed_recipes(meta.get(RECIPE_FILES, {}), saver.meta.get(RECIPE_FILES, {})):
        console.warn(line)
    for line in changed_updates(meta["config"], saver.meta["config"], state.step):
        console.warn(line)
    saver.metrics = dict(meta.get(METRICS, {}))
    earlier = meta.get(LAST_IN_EFFECT)
    saver.meta[LAST_IN_EFFECT] = last_in_effect(meta["config"], saver.meta["config"], earlier)


def recipe_files(spec: RunSpec) -> dict[str, str]:
    """Return the SHA-256 of the file of each recipe of a run that is not built in, by its name."""
    recipe = spec.precision.fp8
    if recipe is None:
        return {}
    recipes = [recipe, *(phase.recipe for phase in spec.precision.schedule)]
    names = {name for recipe in recipes for name in recipe.names}
    sources = ((name, source_of(name)) for name in sorted(names))
    return {name: source[1] for name, source in sources if source is not None}


def _changed_recipes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each recipe whose file changed since a checkpoint was written."""
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            yield (
                f"the recipe {name} has changed since the checkpoint was written: its file had the "
                f"SHA-256 {old[name][:12]} and has {new[name][:12]}, so the run continues with "
                "another rule"
            )


def changed_updates(old: Resolved, new: Resolved, step: int) -> Iterator[str]:
    """Yield a line for each allowed change that makes later updates others than the run's so far.

    `old` and `new` are the settings with which the run reached `step` and is to continue.
    """
    was, now = (with_defaults(settings) for settings in (old, new))
    before, after = (learning_rate(optim_of(settings), step + 1) for settings in (was, now))
    if after > 1.5 * before:
        yield (
            f"the learning rate of step {step + 1} is {after:.1e}, where the run so far would have "
            f"had {before:.1e}: its schedule had {schedule_steps(was)} steps, and has "
            f"{schedule_steps(now)}"
        )
    ranks, mode = "model.tensor_model_parallel_size", "model.optim.muon_tp_mode"
    divided = [settings for settings in (was, now) if settings[ranks] > 1]
    by_part = any(settings[mode] != "duplicated" for settings in divided)  # with Muon alone
    if by_part and was[ranks] != now[ranks]:
        yield (
            f"{mode} has each rank orthogonalize its own part, so that the run continues with "
            f"another optimizer: {ranks} was {was[ranks]}, and is {now[ranks]}"
        )


def _check_settings(path: Path, spec: RunSpec) -> None:
    """Raise for each setting in effect that differs from that of the checkpoint."""
    meta = check_structure(path).meta
    check_state(meta, path)
    config = meta["config"]
    raise_if_any(
        [
            SettingError(
                d.key,
                d.new,
                f"the checkpoint {path} was made with {d.old}",
                f"Set {typed(d.key, d.old)}, or use restore_from_path, which reads the weights "
                "only",
            )
            for d in setting_differences(config, spec.resolved, meta.get(LAST_IN_EFFECT))
            if d.key != "restore_from_path"  # whose weights the checkpoint has trained further
        ]
    )


def find_checkpoint(path: Path, notify: Notify) -> Path:
    """Return the verified checkpoint at `path`, or the newest good one if `path` is a run.

    `latest` stands for the newest run that has a checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    with paths_reported():
        path = find_run(expanded(path), with_checkpoint=True)
        is_checkpoint, is_folder = (path / MANIFEST_NAME).is_file(), path.is_dir()
    if is_checkpoint:
        store.verify(path)
        return path
    newest = store.newest_valid(path / CHECKPOINTS_DIR, notify) if is_folder else None
    if newest is None:
        raise CheckpointError(path, *why_no_checkpoint(path))
    return newest
