"""Set up a run: its data, its model, its checkpoints and everything that observes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megafp8.checkpoint.best import Best
from megafp8.config.errors import SettingError
from megafp8.data.prepare import PreparedData, prepare
from megafp8.observe.console import Console
from megafp8.observe.metrics import MetricsFile
from megafp8.observe.trackers import CompositeTracker, open_trackers
from megafp8.parallel.agreement import on_main
from megafp8.parallel.mesh import Mesh
from megafp8.runs import restarts
from megafp8.runs.directory import CHECKPOINTS_DIR
from megafp8.runs.preflight import require_disk_space
from megafp8.runs.tokenizer import save_tokenizer
from megafp8.specs import RunSpec
from megafp8.specs.model import padded_vocab_size
from megafp8.train import resume, state_dict
from megafp8.train.build import build
from megafp8.train.process import StopRequest, TimeLimit
from megafp8.train.report.fp8 import share_of
from megafp8.train.report.header import describe
from megafp8.train.report.health import HealthLog
from megafp8.train.report.profile import StepProfiler
from megafp8.train.run import Run
from megafp8.train.saver import BackgroundSaver, Saver
from megafp8.train.state import TrainState
from megafp8.train.weights import start_from


def open_run(
    path: Path, spec: RunSpec, mesh: Mesh, console: Console, stop: StopRequest, began: float
) -> Run:
    """Return the run that `spec` describes, in the directory `path`, at the step to continue from.

    Args:
        path: The run's directory, which exists.
        spec: The run; the size of its vocabulary is not known yet.
        mesh: The ranks, all of which call this function together.
        console: Shows what is set up.
        stop: Receives the signals that end training.
        began: When the process began to work, on the monotonic clock.

    Raises:
        UserError: A part of the spec cannot be fulfilled. No step has been trained then.
    """
    data = prepare(spec.data, console.event)
    spec = with_vocabulary(spec, data)
    state = build(spec, mesh)
    share = share_of(spec, state)
    saver = _start(path, spec, state, data, console)
    on_main(mesh, lambda: restarts.check_progress(path, state.step))
    metrics, trackers = _open_logs(path, spec, state, data, console)
    files_of_health = path if mesh.is_main else None
    run = Run(
        spec=spec,
        state=state,
        data=data,
        saver=saver,
        console=console,
        metrics=metrics,
        trackers=trackers,
        stop=stop,
        limit=TimeLimit(spec.train.max_time_seconds, began),
        health=HealthLog(state, spec.observe.health, files_of_health, state.step, console.warn),
        profiler=StepProfiler(spec.profile, path, mesh.world.rank, mesh.device, console.event),
        bytes_per_token=len(data.validation_text()) / data.num_final_tokens,
    )
    console.header(describe(spec, state, data, share))
    if state.step >= spec.train.max_steps:
        console.event(f"step {state.step} of {spec.train.max_steps}: nothing is left to do")
    goes_back = spec.train.nonfinite_policy == "rollback" and saver.last_step is None
    require_disk_space(
        saver.root,
        state_dict.placements(state),
        mesh,
        spec.checkpoint,
        state.step,
        spec.train.max_steps,
        saves_at_once=goes_back,
    )
    if spec.checkpoint.async_save and state.step < spec.train.max_steps:
        run.background = _background_saver(saver, state)
    console.start(spec.train.max_steps, state.step)
    return run


def with_vocabulary(spec: RunSpec, data: PreparedData) -> RunSpec:
    """Return the spec with the padded size of the vocabulary of the data's tokenizer."""
    size = padded_vocab_size(data.vocab_size, spec.vocab_divisible_by)
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=size))


def _start(
    path: Path, spec: RunSpec, state: TrainState, data: PreparedData, console: Console
) -> Saver:
    """Fill `state` from the run's own checkpoint, or from one that the settings name."""
    kept = spec.checkpoint
    meta = {"config": spec.resolved, "data_fingerprint": data.fingerprint}
    best = Best(kept.save_top_k, kept.monitor, kept.mode)
    saver = Saver(path / CHECKPOINTS_DIR, kept.keep, meta, best)
    resume.load_newest(saver, state, data, console)
    if saver.last_step is None and spec.resume_from_checkpoint is not None:
        named = Path(spec.resume_from_checkpoint)
        resume.resume_from(named, spec, saver, state, data, console)
    if saver.last_step is None and spec.restore_from_path is not None:
        start_from(spec, state, console.event)
    return saver


def _background_saver(saver: Saver, state: TrainState) -> BackgroundSaver:
    try:
        return BackgroundSaver(saver, state)
    except (MemoryError, RuntimeError) as error:
        raise SettingError(
            "exp_manager.checkpoint_callback_params.async_save",
            True,
            f"host memory cannot hold the copy of this rank's state ({error})",
            "Set it to False, or give the job more memory",
        ) from error


def _open_logs(
    path: Path, spec: RunSpec, state: TrainState, data: PreparedData, console: Console
) -> tuple[MetricsFile | None, CompositeTracker]:
    """Return the metrics file and the trackers: None and no tracker on ranks that do not write."""
    if not state.mesh.is_main:
        return None, CompositeTracker([])
    save_tokenizer(data.tokenizer, path, spec.model.max_position_embeddings)
    metrics = MetricsFile(path / "metrics.jsonl", resume_step=state.step, warn=console.warn)
    trackers = open_trackers(
        spec.observe, path, resume_step=state.step, config=spec.resolved, warn=console.warn
    )
    return metrics, trackers
