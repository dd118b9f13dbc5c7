"""Run pretraining, from the spec of a run to its summary: open the run, train, summarize it."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megafp8 import __version__
from megafp8.checkpoint.best import Best
from megafp8.config.errors import SettingError
from megafp8.config.resume import LAST_IN_EFFECT
from megafp8.errors import ExitCode, RunError, UserError
from megafp8.files import expanded
from megafp8.observe.console import Console
from megafp8.observe.curve import logged_curve
from megafp8.observe.experts import EXPERTS_FILE
from megafp8.observe.journal import JournaledConsole
from megafp8.observe.live import open_console
from megafp8.observe.memory import PeakMemory
from megafp8.observe.metrics import MetricsFile
from megafp8.observe.summary import write_summary
from megafp8.observe.trackers import CompositeTracker, open_trackers
from megafp8.ops.waiting import Waiting
from megafp8.parallel.agreement import from_main, on_main
from megafp8.parallel.launch import follow_launcher, note_death
from megafp8.parallel.mesh import Mesh, join, leave
from megafp8.report.writer import Reporter
from megafp8.runs import directory, lost, restarts
from megafp8.runs.directory import RunChoice, mark
from megafp8.runs.enough_memory import require_memory
from megafp8.runs.find import CHECKPOINTS_DIR, DIVERGED, FINISHED, METRICS_NAME, RUNNING
from megafp8.runs.finished import finished_run, recorded_summary, with_recorded
from megafp8.runs.preflight import require_disk_space
from megafp8.runs.run_data import RunData, prefixes_of, refuse_tokens_beyond, warnings_of
from megafp8.runs.same_data import open_on_all
from megafp8.runs.tokenizer import (
    beside_data,
    check_tokenizer,
    keep_files_of_model,
    save_tokenizer,
)
from megafp8.specs import RunSpec
from megafp8.specs.data import MOCK_DATA
from megafp8.specs.recipes import raised
from megafp8.train import load, state_dict
from megafp8.train.background_saver import BackgroundSaver
from megafp8.train.build import build, settle_backend
from megafp8.train.load_model import start_from
from megafp8.train.loop import limit_of_hangs, save, train
from megafp8.train.process import StopRequest, TimeLimit, prepare_process
from megafp8.train.report.fp8 import HealthLog, share_of
from megafp8.train.report.header import describe_run, peak_of_ranks
from megafp8.train.report.profile import StepProfiler, memory_snapshot_on_oom
from megafp8.train.report.summary import CommandLine, show_sample, summarize, why_diverged
from megafp8.train.run import Run
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.validate import check_validation, with_validation_batches


def pretrain(
    spec: RunSpec,
    *,
    is_sweep: bool,
    command: Sequence[str],
    notes: Sequence[str] = (),
    record: Mapping[str, object] | None = None,
) -> int:
    """Train, or continue, the run that `spec` describes, and return the exit code.

    Args:
        spec: The run, resolved and checked.
        is_sweep: Whether the run is one job of a sweep.
        command: The words of the user's command line; the end table shows how to continue with it.
        notes: Lines shown at the start: the settings that have no effect.
        record: The settings that differ from the default job, and those that have no effect, for
            `summary.json`.

    Raises:
        UserError: The run cannot start or continue. If all ranks know of the error, the main rank
            raises it and the others return its exit code.
    """
    command_line = CommandLine(command, tuple(notes), record or {})
    began = time.monotonic()
    follow_launcher()
    mesh = join(spec.parallel)  # a signal ends ranks that still wait: no run has begun
    with StopRequest() as stop:
        try:
            spec = settle_backend(spec, mesh)
            prepare_process(
                mesh.device,
                fp32=spec.precision.compute == "fp32",
                deterministic=spec.train.deterministic,
            )
            progress_bar = spec.observe.progress_bar
            with open_console(main_rank=mesh.is_main, progress_bar=progress_bar) as console:
                code = _pretrain(spec, mesh, console, stop, is_sweep, command_line, began)
            leave()
            return code
        except UserError as error:
            if error.is_shared:
                leave()  # all ranks do; a sweep continues in the same processes
                if not mesh.is_main:
                    return int(error.exit_code)
            raise
        except Exception as error:
            note_death(error)
            raise


def _pretrain(
    spec: RunSpec,
    mesh: Mesh,
    console: Console,
    stop: StopRequest,
    is_sweep: bool,
    command_line: CommandLine,
    began: float,
) -> int:
    """Do a rank's part of a run from its directory to its summary; return the exit code."""
    finished = on_main(mesh, lambda: finished_run(spec, is_sweep=is_sweep))
    if finished is not None:
        console.header([f"{finished.path}: {finished.note}. Its recorded summary:"])
        console.finish(finished.summary.rows())
        return int(finished.code)
    choice = on_main(mesh, lambda: directory.enter(spec, is_sweep=is_sweep))
    reporter: Reporter | None = None
    run: Run | None = None
    fails_alone = False
    known, sizes = lost.saves(choice.path), lost.log_sizes(choice.path)
    if mesh.is_main:
        console = JournaledConsole(console, choice.path)
        reporter = Reporter(choice.path, console.warn)
    try:
        with _exits_reported():
            run = _start_run(choice, spec, mesh, console, stop, command_line, began)
            run.reporter = reporter
            if choice.continues and run.state.step and mesh.is_main:
                for line in lost.cut_logs(choice.path, known, sizes, run.state.step):
                    console.warn(line)
            return _run_to_the_end(run, choice.path, command_line, began)
    except BaseException as error:
        fails_alone = mesh.world.size > 1 and not getattr(error, "is_shared", False)
        if not isinstance(error, Exception):
            raise
        has_trained = run is not None and run.has_trained
        is_refused = isinstance(error, UserError) and not has_trained
        is_withdrawn = is_refused and directory.withdraw(choice)
        if reporter is not None and not is_withdrawn:
            lines = str(error).splitlines() or [""]
            console.record("failed", f"{type(error).__name__}: {lines[0]}")
            reporter.write("failed")
        raise
    finally:
        if mesh.is_main:
            console.close()  # the journal; the console that shows everything stays open
        if not fails_alone:  # otherwise ranks may still write; the process's end unlocks it
            choice.release()


@contextmanager
def _exits_reported() -> Iterator[None]:
    """Raise `RunError` in place of a SystemExit, whose code 0 would say that the run is finished.

    The code of others that a run calls, such as the kernels of a recipe's file, can raise it.
    """
    try:
        yield
    except SystemExit as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"{frame.filename}, line {frame.lineno}: asked Python to exit ({raised(error)}) before "
            "the run was finished. Let this code raise an error instead"
        ) from error


def _start_run(
    choice: RunChoice,
    spec: RunSpec,
    mesh: Mesh,
    console: Console,
    stop: StopRequest,
    command_line: CommandLine,
    began: float,
) -> Run:
    """Return the run, before its first step, after showing and recording its start."""
    path = choice.path
    console.header([f"{path}: {choice.reason}"])
    if command_line.changed:
        console.header(["settings that are not the default job's:"])
        console.settings(command_line.changed)
    console.header(command_line.notes)
    stop.answer = lambda number: console.answer(
        f"{number.name}: stopping after the first step; again to leave at once"
    )
    run = open_run(path, spec, mesh, console, stop, began)
    if choice.continues and run.state.step < spec.train.max_steps:
        on_main(mesh, lambda: mark(path, RUNNING))  # the run may have been finished before
    console.record(
        "start",
        choice.reason,
        command=shlex.join(command_line.command),
        settings=command_line.record,
        versions={"megafp8": __version__, "torch": torch.__version__},
        host=socket.gethostname(),
        num_ranks=mesh.world.size,
        max_steps=spec.train.max_steps,
        first_step=run.state.step,
    )
    stop.answer = lambda number: console.answer(_answer(run, number))
    return run


def _run_to_the_end(run: Run, path: Path, command_line: CommandLine, began: float) -> int:
    """Train and summarize the run; return the exit code."""
    mesh, console = run.state.mesh, run.console
    try:
        finished = _train_to_the_end(run, path)
        summary = summarize(run, path, command_line, finished, began)
        if not run.has_trained and mesh.is_main:
            summary = with_recorded(summary, recorded_summary(path))
        has_written = not finished or run.spec.train.fast_dev_run or show_sample(run)
        if finished and (why := why_diverged(run, summary.val_loss, has_written=has_written)):
            console.warn(f"step {summary.step}: {why}")
            summary = dataclasses.replace(
                summary, status=DIVERGED, continue_command=None, continue_note=why
            )
    finally:
        run.close()
    if mesh.is_main:
        failed = "; ".join(run.trackers.failures) or None
        summary = dataclasses.replace(summary, wandb=run.trackers.where, trackers_failed=failed)
        try:
            write_summary(path / "summary.json", summary)
        except OSError as error:
            console.warn(f"{path / 'summary.json'}: cannot be written ({error})")
        console.record("end", f"{summary.status}, step {summary.step}/{summary.total_steps}")
        if run.reporter is not None:
            run.reporter.write(summary.status if finished else "stopped")
        if finished:
            mark(path, summary.status)  # last of all: a run that is killed before can be continued
        console.finish(summary.rows())
    code = {FINISHED: ExitCode.FINISHED, DIVERGED: ExitCode.NONFINITE}.get(summary.status)
    if code != ExitCode.FINISHED:
        from_main(mesh, None)  # ranks exit together: a launcher may end the others after one
    return int(ExitCode.SAVED_ON_SIGNAL if code is None else code)


def _answer(run: Run, number: signal.Signals) -> str:
    """Return what the user sees at once after a first signal."""
    step, last = run.state.step, run.spec.train.max_steps
    if step >= last:
        return f"{number.name}: the run ends by itself soon; a second signal ends it at once"
    return f"{number.name}: saving after this step ({step + 1}); again to leave at once"


def _train_to_the_end(run: Run, path: Path) -> bool:
    """Train, and return whether the last step was reached.

    False says that a signal or the time limit came first.
    """
    train_spec, profile = run.spec.train, run.spec.profile
    if train_spec.nonfinite_policy == "rollback" and run.saver.last_step is None:
        save(run, must_succeed=True)  # a first checkpoint to go back to
    if train_spec.num_sanity_val_steps and run.state.step == 0:
        check_validation(run)
    rank = run.state.mesh.world.rank
    with memory_snapshot_on_oom(profile.memory_snapshot_on_oom, path, rank, run.console.warn):
        return train(run)


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
    # Our own generators are keyed and have no state. Checkpoints hold the state of torch's, which
    # is seeded so that equal runs write equal files.
    torch.manual_seed(spec.train.seed)
    memory = PeakMemory(spec.parallel.accelerator)  # a sweep trains several runs in a process
    on_cpu = mesh.device.type == "cpu"
    waiting = Waiting(torch.get_num_threads(), os.environ) if on_cpu else None
    data = open_on_all(spec.data, mesh, console.event)
    for line in warnings_of(spec.data, data):
        console.warn(line)
    spec = with_validation_batches(spec.with_vocabulary(data.vocab_size), data)
    on_main(mesh, lambda: refuse_tokens_beyond(data, spec.model.vocab_size))
    require_memory(spec, mesh, console.warn)
    state = build(spec, mesh)
    share = share_of(spec, state)
    saver = _start(path, spec, state, data, console)
    _check_restarts(path, spec, state, console)
    on_main(mesh, lambda: _keep_tokenizer(path, spec, data))
    if state.phases:  # the run may continue in another precision than it began in
        share = share_of(spec, state)
    logs: list[Logs] = []
    on_main(mesh, lambda: logs.append(_open_logs(path, spec, state, console)))
    metrics, experts_log, trackers = logs[0] if mesh.is_main else (None, None, CompositeTracker([]))
    files_of_health = path if mesh.is_main else None
    run = Run(
        spec=spec,
        state=state,
        data=data,
        saver=saver,
        console=console,
        metrics=metrics,
        experts_log=experts_log,
        trackers=trackers,
        stop=stop,
        limit=TimeLimit(spec.train.max_time_seconds, began),
        health=HealthLog(state, spec.observe.health, files_of_health, state.step, console.warn),
        profiler=StepProfiler(spec.profile, path, mesh.world.rank, mesh.device, console.event),
        bytes_per_token=len(data.validation_text()) / data.num_final_tokens,
        curve=logged_curve(path / METRICS_NAME, state.step, spec.train.log_every_n_steps),
        peak=peak_of_ranks(spec, mesh),
        memory=memory,
        waiting=waiting,
    )
    console.header(
        [*describe_run(spec, state, data, share, run.peak), *_threads_of(run), *_limit_of(spec)]
    )
    if state.step >= spec.train.max_steps:
        console.event(f"step {state.step} of {spec.train.max_steps}: nothing is left to do")
    console.follow(lambda: state.step)
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


def _check_restarts(path: Path, spec: RunSpec, state: TrainState, console: Console) -> None:
    """Say how earlier starts of the run ended; refuse one more after too many without progress."""
    most = restarts.most_without_progress(spec.train.max_restarts)
    before = on_main(state.mesh, lambda: restarts.check_progress(path, state.step, most=most))
    if before is not None:
        console.event(before, kind="restart")


def _keep_tokenizer(path: Path, spec: RunSpec, data: RunData) -> None:
    """Write the tokenizer into the run, with the files that its model has beside it."""
    save_tokenizer(data.tokenizer, path, spec.model.max_position_embeddings)
    keep_files_of_model(data.tokenizer, _models_of(spec), path)


def _limit_of(spec: RunSpec) -> list[str]:
    """Return a line about the limit for hangs, where the run has chosen it itself."""
    limit = limit_of_hangs(spec)
    if not limit.is_automatic:
        return []
    return [
        f"hang: a rank without progress for {limit.describe()}, ends the job; "
        "trainer.step_timeout=0 turns this off"
    ]


def _threads_of(run: Run) -> list[str]:
    """Return a line about the threads of a rank on a CPU, after a look at what others use."""
    if run.waiting is None:
        return []
    run.waiting.look()
    return [run.waiting.describe()]


def _models_of(spec: RunSpec) -> list[str | Path]:
    """Return the paths that may have all files of the run's tokenizer."""
    named = spec.data.tokenizer.type if spec.data.tokenizer.library == "huggingface" else None
    instructions = spec.data.instructions
    given = [named, spec.restore_from_path, spec.resume_from_checkpoint]
    given += [] if instructions is None else [instructions.model]
    return [
        *(path for path in given if path),
        *(beside_data(expanded(prefix)) for prefix in prefixes_of(spec.data)),
    ]


def _start(path: Path, spec: RunSpec, state: TrainState, data: RunData, console: Console) -> Saver:
    """Fill `state` from the run's own checkpoint, or from one that the settings name."""
    checkpointing = spec.checkpoint
    meta = {"config": spec.resolved, "data_fingerprint": data.fingerprint, LAST_IN_EFFECT: {}}
    if files := load.recipe_files(spec):
        meta[load.RECIPE_FILES] = files
    best = Best(checkpointing.save_top_k, checkpointing.monitor, checkpointing.mode)
    saver = Saver(path / CHECKPOINTS_DIR, checkpointing.keep, meta, best)
    load.load_newest(saver, state, data, console)
    if saver.last_step is None and spec.resume_from_checkpoint is not None:
        named = Path(spec.resume_from_checkpoint)
        load.resume_from(named, spec, saver, state, data, console)
    if saver.last_step is None and spec.restore_from_path is not None:
        start = spec.restore_from_path
        if spec.data.prefix != MOCK_DATA:
            note = on_main(state.mesh, lambda: check_tokenizer(data.tokenizer, start))
            console.header([note] if note else [])
        start_from(spec, state, console.event, path)
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


Logs = tuple[MetricsFile | None, MetricsFile | None, CompositeTracker]
"""The files of metrics and of experts, and the trackers; None where there is no such file."""


def _open_logs(path: Path, spec: RunSpec, state: TrainState, console: Console) -> Logs:
    """Open the logs of the rank that writes them."""

    def open_file(name: str) -> MetricsFile:
        return MetricsFile(path / name, resume_step=state.step, warn=console.warn)

    metrics = open_file(METRICS_NAME)
    experts_log = open_file(EXPERTS_FILE) if state.model.spec.has_experts else None
    trackers = open_trackers(
        spec.observe,
        path,
        resume_step=state.step,
        config=spec.resolved,
        metrics=metrics.path,
        say=console.event,
        warn=console.warn,
    )
    return metrics, experts_log, trackers
