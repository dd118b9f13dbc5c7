"""Run pretraining, from the spec of a run to its summary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megafp8.backends import choose
from megafp8.errors import ExitCode, UserError
from megafp8.observe.console import Console, open_console
from megafp8.observe.summary import write_summary
from megafp8.parallel.agreement import from_main, on_main
from megafp8.parallel.launch import follow_launcher, note_death
from megafp8.parallel.mesh import Mesh, join, leave
from megafp8.runs import directory
from megafp8.runs.directory import FINISHED, RunChoice, mark
from megafp8.specs import RunSpec
from megafp8.train.loop import save, train
from megafp8.train.process import StopRequest, prepare_process
from megafp8.train.report.profile import memory_snapshot_on_oom
from megafp8.train.report.summary import CommandLine, sample_text, summarize
from megafp8.train.run import Run
from megafp8.train.setup import open_run
from megafp8.train.validate import check_validation


def pretrain(
    spec: RunSpec,
    *,
    is_sweep: bool,
    command: Sequence[str],
    settings: Sequence[str] = (),
    record: Mapping[str, object] | None = None,
) -> int:
    """Train, or continue, the run that `spec` describes, and return the exit code.

    Args:
        spec: The run, resolved and checked.
        is_sweep: Whether the run is one job of a sweep.
        command: The words of the user's command line; the end table shows how to continue with it.
        settings: Lines shown at the start: the settings that differ from the default job, and those
            that have no effect.
        record: The same settings for `summary.json`.

    Raises:
        UserError: The run cannot start or continue. If all ranks know of the error, the main rank
            raises it and the others return its exit code.
    """
    command_line = CommandLine(command, tuple(settings), record or {})
    began = time.monotonic()
    follow_launcher()
    mesh = join(spec.parallel)  # a signal ends ranks that still wait: no run has begun
    with StopRequest() as stop:
        try:
            spec = choose.settle(spec, mesh)
            choose.check(spec, mesh.device)
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
    choice = on_main(mesh, lambda: directory.enter(spec, is_sweep=is_sweep))
    try:
        return _run_in(choice, spec, mesh, console, stop, command_line, began)
    except UserError:
        directory.withdraw(choice)
        raise


def _run_in(
    choice: RunChoice,
    spec: RunSpec,
    mesh: Mesh,
    console: Console,
    stop: StopRequest,
    command_line: CommandLine,
    began: float,
) -> int:
    path = choice.path
    if mesh.is_main:
        console.header([f"{path}: {choice.reason}", *command_line.settings])
    run = open_run(path, spec, mesh, console, stop, began)
    try:
        finished = _train_to_the_end(run, path)
        summary = summarize(run, path, command_line, finished, began)
        if finished and not spec.train.fast_dev_run:
            console.event(f"a sample: {sample_text(run)!r}")
    finally:
        run.close()
    if mesh.is_main:
        try:
            write_summary(path / "summary.json", summary)
        except OSError as error:
            console.warn(f"{path / 'summary.json'}: cannot be written ({error})")
        if finished:
            mark(path, FINISHED)  # last of all: a run that is killed before can be continued
        console.finish(summary.rows())
    if not finished:
        from_main(mesh, None)  # ranks exit together: a launcher may end the others after one
    return int(ExitCode.FINISHED if finished else ExitCode.SAVED_ON_SIGNAL)


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
