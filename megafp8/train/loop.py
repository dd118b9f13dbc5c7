"""Run the training loop: steps, and the logging, validation and saving due after each step."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping

from megafp8.checkpoint.best import METRICS
from megafp8.data.loader import Loader, Microbatch
from megafp8.data.samples import Repeated, SampleSource
from megafp8.errors import CheckpointError, NonFiniteError
from megafp8.observe.console import StepReport
from megafp8.observe.curve import logged_curve
from megafp8.observe.experts import UPDATES, loads_of, of_model, scalars, tokens_of
from megafp8.observe.flops import flops_per_token
from megafp8.observe.units import plural
from megafp8.observe.utilization import utilization
from megafp8.parallel.agreement import agree, raise_on_all
from megafp8.parallel.watchdog import Limit, Watchdog
from megafp8.runs.lost import log_sizes, note_save
from megafp8.specs import RunSpec
from megafp8.specs.recipes import names_code
from megafp8.train import state_dict
from megafp8.train.load import newest_after_cleanup
from megafp8.train.nonfinite import WEIGHT, first_nonfinite
from megafp8.train.pace import Span
from megafp8.train.phases import begin_phase, phase_of
from megafp8.train.process import Garbage
from megafp8.train.report.fp8 import share_of
from megafp8.train.report.summary import show_sample
from megafp8.train.run import Run
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult, train_step
from megafp8.train.validate import validate

MAX_NONFINITE_IN_A_ROW = 10
LEAST_STEPS_FOR_SAMPLES = 100
_LOGGED = (
    "step_seconds", "tokens_per_second", "tflops_causal", "tflops_full", "mfu_causal", "mfu_full",
    "hfu_causal", "hfu_full", "data_wait_fraction",
)  # fmt: skip
"""The numbers of a `StepReport` that are logged under their names."""


def train(run: Run) -> bool:
    """Train until `max_steps`, and return whether that step was reached.

    False says that a signal or `max_time` ended training early; the state is saved then.
    """
    with (
        Garbage(run.spec.train.gc_interval) as garbage,
        Watchdog(run.state.mesh, limit_of_hangs(run.spec)) as watchdog,
    ):
        try:
            finished = _train(run, garbage, watchdog)
            finish_background_save(run)
            return finished
        except BaseException as error:
            finish_background_save_after(run, error)
            raise


def limit_of_hangs(spec: RunSpec) -> Limit:
    """Return how long a rank may show no progress; a job of Slurm runs without its user."""
    return Limit(spec.parallel.step_timeout_seconds, is_unwatched="SLURM_JOB_ID" in os.environ)


def _train(run: Run, garbage: Garbage, watchdog: Watchdog) -> bool:
    """Train until the last step; return False if the run ends before it, by a signal or a limit."""
    loader = open_loader(run)
    run.limit.start()
    try:
        while run.state.step < run.spec.train.max_steps:
            watchdog.beat(f"step {run.state.step + 1}")
            change_precision(run)
            began = time.perf_counter()
            microbatches = next(loader)
            waited = time.perf_counter() - began
            is_logged = run.spec.train.logs_at(run.state.step + 1)
            health = run.health.begin() if is_logged else None
            run.profiler.before_step(run.state.step)
            result = train_step(run.state, microbatches, lambda: flags_of(run), health)
            watchdog.after_step()
            run.has_trained |= result.is_finite
            run.profiler.after_step(run.state.step)
            if result.scale_falls:
                run.state.num_skipped += 1
            elif not result.is_finite and handle_nonfinite(run, microbatches, result):
                run.health.abandon()
                loader.close()
                loader = open_loader(run)
                continue
            if result.is_finite:
                run.state.num_skipped_in_a_row = 0
            elif not run.state.optimizer.decides_on_device:  # otherwise the step has done it
                # FP8 scales have moved in this step. Weights kept in FP8 are stored with the new
                # ones, as a run does that continues from here, so that both have the same bits.
                run.state.masters.write_back()
            run.state.step += 1
            samples = run.spec.train.batch_size_at(run.state.consumed_samples)
            run.state.consumed_samples += samples
            garbage.after_step(run.state.step)
            span = Span(1, samples, time.perf_counter() - began, waited)
            if after_step(run, result, span):
                return False
        return True
    finally:
        run.profiler.close()
        loader.close()


def change_precision(run: Run) -> None:
    """Begin the phase of `model.precision_schedule` that the next step is the first of, if any."""
    begun = begin_phase(run.state)
    if begun is None:
        return
    share = share_of(run.spec, run.state)
    note = "" if share is None else f"; {share.share:.1%} of the GEMM FLOPs are in FP8 now"
    if begun.fresh:
        note += f"; {plural(len(begun.fresh), 'delayed scale')} begin at 1, with an empty history"
    run.console.event(
        f"precision after step {run.state.step}: {begun.phase.text}{note}", kind="precision"
    )


def open_loader(run: Run) -> Loader:
    """Return a loader of the batches that follow those the state has consumed."""
    train, dp = run.spec.train, run.state.mesh.dp
    source: SampleSource = run.data.train
    if train.overfit_batches:
        source = Repeated(source, train.overfit_batches * train.global_batch_size)
    return Loader(
        source,
        micro_batch_size=train.micro_batch_size,
        num_microbatches=lambda consumed: train.num_microbatches(dp.size, consumed),
        dp_rank=dp.rank,
        dp_size=dp.size,
        consumed_samples=run.state.consumed_samples,
        rules=run.data.rules,
        num_workers=run.spec.data.num_workers,
        pin_memory=run.state.mesh.device.type == "cuda",
    )


def after_step(run: Run, result: StepResult, span: Span) -> bool:
    """Log, validate and save if that is due; return whether training must end before its last step.

    It must if a signal or the time limit asks for it; the state is then saved.

    Args:
        run: The run after the step, whose number is `run.state.step`.
        result: What the step returned.
        span: The samples of the step's global batch, and the time that it took.
    """
    spec, step = run.spec, run.state.step
    run.pace.after_step(span)
    run.curve.add(result.loss)
    is_logged = spec.train.logs_at(step) or not result.is_finite
    if is_logged or run.pace.num_steps == 1:
        report = report_of(run, result, run.pace.since_line())
        if is_logged:
            log_step(run, result, span.samples, report)
            report = dataclasses.replace(report, health=run.health.word())
        # A process that continues a run shows its first step but does not log it, so that the files
        # are the same as those of a run that was never interrupted.
        run.console.step(report)
        run.last_report = report
    elif run.console.wants_progress:
        run.console.progress(report_of(run, result, span))
    slow = run.pace.slow(spec, step, run.state.mesh.device) if run.state.mesh.is_main else None
    late = None if run.waiting is None else run.waiting.after_step(step, span.seconds)
    for warning in (slow, late):
        if warning is not None:
            run.console.warn(warning)
    is_last = step == spec.train.max_steps
    validates = spec.train.limit_val_batches > 0 and not is_last
    validates = validates and step % spec.train.val_check_interval == 0
    if validates:
        validate(run)
        if shows_sample(spec, step):
            show_sample(run)
    interval = spec.checkpoint.every_n_train_steps
    run.limit.step_ended()
    stop, is_time, is_late, has_saved = result.raised
    if validates:  # validation may take long: look for a signal again
        (stop,) = agree(run.state.mesh, run.stop.signal is not None)
    if has_saved:
        finish_background_save(run)
    run.stopped_by_time = is_late and not stop
    stop = stop or is_late
    if stop or (is_last and spec.checkpoint.save_last):
        save(run, must_succeed=True)
    elif is_time or (interval and step % interval == 0):
        save(run, must_succeed=False)
    return stop and not is_last


def shows_sample(spec: RunSpec, step: int) -> bool:
    """Whether a text is generated after the validation of `step`.

    In a run of 100 steps or more, it is after the first validation at or beyond 25, 50 and 75 % of
    its steps; the end of the run has its own.
    """
    total, before = spec.train.max_steps, step - spec.train.val_check_interval
    return total >= LEAST_STEPS_FOR_SAMPLES and step * 4 // total > before * 4 // total


def flags_of(run: Run) -> tuple[bool, ...]:
    """Return what this rank wants all ranks to do after the step that runs now.

    The four flags are: end training because of a signal; save, because the time between saves is
    over; end training, because the time limit is near; and take note that this rank has written its
    part of the background checkpoint.
    """
    pause = run.spec.checkpoint.train_time_interval_seconds
    since_save = time.monotonic() - run.last_save
    is_saving = run.background is not None and run.background.step is not None
    return (
        run.stop.signal is not None,
        pause is not None and since_save >= pause,
        run.limit.is_due(since_save if is_saving else None),
        run.background is not None and run.background.has_ended(),
    )


def report_of(run: Run, result: StepResult, span: Span) -> StepReport:
    """Return the numbers of a step for the console; times and speeds are those of `span`."""
    state, spec = run.state, run.spec
    tokens, seconds = span.samples * spec.data.seq_length, span.seconds
    flops = {
        kind: tokens * flops_per_token(spec.model, kind, seq_length=spec.data.seq_length) / seconds
        for kind in ("causal", "full")
    }
    used = utilization(spec, tokens / seconds, run.peak)
    return StepReport(
        step=state.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        step_seconds=seconds / span.steps,
        tokens_per_second=tokens / seconds,
        tflops_causal=flops["causal"] / 1e12,
        tflops_full=flops["full"] / 1e12,
        mfu_causal=used.mfu_causal,
        mfu_full=used.mfu_full,
        hfu_causal=used.hfu_causal,
        hfu_full=used.hfu_full,
        memory_bytes=run.memory.bytes(),
        data_wait_fraction=span.waited / seconds,
        shows_utilization=state.mesh.device.type != "cpu",
        health=run.health.word(),
        curve=run.curve.points,
        added=result.added,
        experts=of_model(loads_of(result.tokens_of_experts)),
        notes=_notes(state, result),
    )


def log_step(run: Run, result: StepResult, samples: int, report: StepReport) -> None:
    """Write a step to metrics.jsonl and the trackers, and FP8 health if it was measured."""
    state, spec = run.state, run.spec
    run.health.end(state.step, run.trackers, result.more)
    values = {
        "consumed_samples": state.consumed_samples,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        **{name: getattr(report, name) for name in _LOGGED},
    }
    values |= {**result.added, **scalars(loads_of(result.tokens_of_experts))}
    if report.memory_bytes is not None:
        values["peak_memory_bytes"] = report.memory_bytes
    if spec.train.rampup is not None:
        values["global_batch_size"] = samples
    if result.loss_scale is not None:
        values["loss_scale"] = result.loss_scale
    if state.phases:
        values["precision_phase"] = phase_of(state, state.step, has_run=True)
    if run.health.least_updates is not None:
        values[UPDATES] = run.health.least_updates
    if run.metrics is not None:
        run.metrics.log({"step": state.step, **values})
    if run.experts_log is not None:
        run.experts_log.log({"step": state.step, "tokens": tokens_of(result.tokens_of_experts)})
    run.trackers.log(state.step, values)
    run.saver.metrics["reduced_train_loss"] = result.loss


def _notes(state: TrainState, result: StepResult) -> tuple[str, ...]:
    if result.is_finite:
        return ()
    if result.scale_falls and state.loss_scale is not None:
        return (f"FP16 overflow: weights unchanged, next loss scale {state.loss_scale.scale:g}",)
    return ("not finite: weights unchanged",)


def save(run: Run, *, must_succeed: bool) -> None:
    """Save a checkpoint of the current step.

    With `must_succeed`, the function waits until the checkpoint is on the disk, and raises if that
    fails. Otherwise a failure (a full disk) is reported and training continues, and with
    `async_save` the checkpoint is only begun.

    Raises:
        CheckpointError: The checkpoint must succeed and did not.
    """
    step, background = run.state.step, run.background
    if background is not None and background.step is not None and not background.has_ended():
        run.console.event(
            f"step {step}: waiting until the checkpoint of step {background.step} is written"
        )
    finish_background_save(run)
    run.last_save = time.monotonic()
    if background is not None and not must_succeed:
        run.background_logs = log_sizes(run.saver.root.parent)
        background.start(run.state)
        return
    try:
        path = run.saver.save(run.state)
    except CheckpointError as error:
        if must_succeed:
            raise
        warn_of_failed_save(run, step, error)
        return
    run.limit.saved(time.monotonic() - run.last_save)
    _saved(run, step, f"{path}", log_sizes(run.saver.root.parent))


def finish_background_save(run: Run) -> None:
    """Wait for the checkpoint that is written in the background, if any; report its result."""
    background = run.background
    if background is None or background.step is None:
        return
    step = background.step
    try:
        saved = background.wait()
    except CheckpointError as error:
        warn_of_failed_save(run, step, error)
        return
    run.limit.saved(saved.seconds)
    where = (
        f"{saved.path} (in the background, in {saved.seconds:.2f} s; the copy took "
        f"{saved.pause_seconds * 1e3:.0f} ms)"
    )
    _saved(run, step, where, run.background_logs)


def _saved(run: Run, step: int, where: str, logs: Mapping[str, int]) -> None:
    """Show and note a checkpoint, with the sizes of the logs then, and write report.html.

    The page is left out where it would cost more than a little of the time.
    """
    if run.state.mesh.is_main:
        note_save(run.saver.root.parent, step, logs)
    run.console.event(f"step {step} saved and verified: {where}", kind="save")
    if run.reporter is not None:
        run.reporter.write()


def warn_of_failed_save(run: Run, step: int, error: CheckpointError) -> None:
    """Warn that the checkpoint of `step` could not be written."""
    run.console.warn(f"checkpoint at step {step} failed, training continues: {error}")


def finish_background_save_after(run: Run, error: BaseException) -> None:
    """Finish the checkpoint that is written in the background, after training ended with `error`.

    The checkpoint is abandoned if another rank may be dead, since this rank would wait for it.
    """
    if run.state.mesh.world.size > 1 and not getattr(error, "is_shared", False):
        return
    try:
        finish_background_save(run)
    except Exception as failure:  # the caller raises `error`, which came first
        run.console.warn(f"the checkpoint that was being written failed: {failure}")


def how_to_continue(run: Run) -> str:
    """Return how a run without a name is continued with other settings; `""` if it has a name."""
    observe = run.spec.observe
    if observe.name is not None or observe.explicit_log_dir is not None:
        return ""
    name = run.saver.root.parent.name
    return f". This run has no name; continue it with exp_manager.name={name}"


def _remedy(state: TrainState, first_bad: str) -> str:
    """Return what to do about a step whose first tensor that is not finite has this name."""
    if first_bad.startswith(WEIGHT):
        return "Continue from an earlier checkpoint, or begin with other weights"
    recipe = state.backend.spec.precision.fp8
    own = [name for name in sorted(recipe.names if recipe else ()) if names_code(name)]
    test = f"Test your recipe (megafp8 recipe check {own[0]}), lower" if own else "Lower"
    return (
        f"{test} model.optim.lr in a new run, or set trainer.nonfinite_policy=skip (skip such "
        "batches) or rollback (go back to the last checkpoint); both end the run after "
        f"{MAX_NONFINITE_IN_A_ROW} in a row"
    )


def handle_nonfinite(run: Run, microbatches: list[Microbatch], result: StepResult) -> bool:
    """Follow `nonfinite_policy` after a step with a loss or gradient norm that is not finite.

    Return True if the state went back to the last checkpoint. False says that the step counts as
    one that changed no weight, and that training continues with the next batch.

    Raises:
        NonFiniteError: The policy is `stop`, or too many such steps came in a row.
    """
    step, policy = run.state.step + 1, run.spec.train.nonfinite_policy
    name = first_nonfinite(run.state, microbatches)
    finding = f"step {step}: loss {result.loss}, grad norm {result.grad_norm}; first bad: {name}"
    in_a_row = run.state.num_skipped_in_a_row + 1
    if policy == "stop" or in_a_row >= MAX_NONFINITE_IN_A_ROW:
        raise_on_all(
            NonFiniteError(
                f"{finding}. Nothing of this step was saved. {_remedy(run.state, name)}"
                f"{how_to_continue(run)}"
            )
        )
    if policy == "rollback" and step not in run.rolled_back_from:
        run.rolled_back_from.add(step)
        finish_background_save(run)
        newest = newest_after_cleanup(run.saver.root, run.state.mesh, run.console.warn)
        if newest is not None:
            meta = state_dict.load_checkpoint(newest, run.state, run.console.warn)
            run.state.num_skipped_in_a_row = in_a_row
            run.saver.metrics = dict(meta.get(METRICS, {}))
            if run.metrics is not None:
                run.metrics.rewind(run.state.step)
                window = run.spec.train.log_every_n_steps
                run.curve = logged_curve(run.metrics.path, run.state.step, window)
            if run.experts_log is not None:
                run.experts_log.rewind(run.state.step)
            run.health.rewind(run.state.step)
            run.trackers.rewind(run.state.step)
            run.console.warn(f"{finding}; going back to step {run.state.step}")
            return True
    run.state.num_skipped += 1
    run.state.num_skipped_in_a_row = in_a_row
    run.console.warn(f"{finding}; its batch is skipped")
    return False
