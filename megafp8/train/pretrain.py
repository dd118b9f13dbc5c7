"""A pretraining run from its spec to its summary."""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megafp8.checkpoint.best import Best
from megafp8.checkpoint.rundir import CHECKPOINTS_DIR, FINISHED, RunChoice, mark
from megafp8.data.baselines import unigram_bits_per_byte, xz_bits_per_byte
from megafp8.data.prepare import PreparedData, prepare
from megafp8.errors import ExitCode, UserError
from megafp8.models.init import pieces_of
from megafp8.observe.console import Console, open_console
from megafp8.observe.memory import peak_memory_bytes
from megafp8.observe.metrics import MetricsFile
from megafp8.observe.summary import RunSummary, write_summary
from megafp8.observe.trackers import CompositeTracker, open_trackers
from megafp8.parallel.launch import follow_launcher, note_death
from megafp8.parallel.mesh import Mesh, join, leave
from megafp8.specs import RunSpec, TrainSpec
from megafp8.specs.model import padded_vocab_size
from megafp8.train import backends, restarts, resume, rundirs, saving
from megafp8.train.background import BackgroundSaver
from megafp8.train.build import COMPUTE_DTYPES, build
from megafp8.train.generate import sample
from megafp8.train.health import HealthLog
from megafp8.train.loop import Run, check_validation, save, train, validate
from megafp8.train.precision_means import means_of
from megafp8.train.precision_share import (
    PrecisionShare,
    linear_flops,
    require_fp8,
    share_of_ranks,
)
from megafp8.train.profiling import StepProfiler, memory_snapshot_on_oom
from megafp8.train.room import require_room
from megafp8.train.runtime import prepare_process
from megafp8.train.signals import StopRequest
from megafp8.train.state import TrainState
from megafp8.train.state_bytes import bytes_of
from megafp8.train.timelimit import TimeLimit
from megafp8.train.tokenizer_files import save_tokenizer
from megafp8.train.weights import start_from

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Typed:
    """What the user gave, beside the spec: see `pretrain`."""

    command: Sequence[str]
    settings: tuple[str, ...]
    record: Mapping[str, object]


def pretrain(
    spec: RunSpec,
    *,
    is_sweep: bool,
    command: Sequence[str],
    settings: Sequence[str] = (),
    record: Mapping[str, object] | None = None,
) -> int:
    """Train, or continue, the run that `spec` describes; returns the exit code.

    Args:
        command: What was typed: shown as what continues the run.
        settings: Lines for the start: what is not the default job's, and what changes nothing.
        record: The same for `summary.json`.
    """
    typed = Typed(command, tuple(settings), record or {})
    began = time.monotonic()
    follow_launcher()
    mesh = join(spec.parallel)  # a signal ends what still waits for others: nothing has begun
    with StopRequest() as stop:
        try:
            backends.check(spec, mesh.device)
            prepare_process(
                mesh.device,
                fp32=spec.precision.compute == "fp32",
                deterministic=spec.train.deterministic,
            )
            progress_bar = spec.observe.progress_bar
            with open_console(main_rank=mesh.is_main, progress_bar=progress_bar) as console:
                return _pretrain(spec, mesh, console, stop, is_sweep, typed, began)
        except UserError as error:
            if error.is_shared and not mesh.is_main:
                return int(error.exit_code)
            raise
        except Exception as error:
            note_death(error)
            raise
        finally:
            leave()


def _pretrain(
    spec: RunSpec,
    mesh: Mesh,
    console: Console,
    stop: StopRequest,
    is_sweep: bool,
    typed: Typed,
    began: float,
) -> int:
    choice = _choose_on_main(spec, mesh, is_sweep)
    try:
        return _run_in(choice, spec, mesh, console, stop, typed, began)
    except UserError:
        rundirs.withdraw(choice)
        raise


def _run_in(
    choice: RunChoice,
    spec: RunSpec,
    mesh: Mesh,
    console: Console,
    stop: StopRequest,
    typed: Typed,
    began: float,
) -> int:
    path = choice.path
    if mesh.is_main:
        console.header([f"{path}: {choice.reason}", *typed.settings])
    data = prepare(spec.data, console.event)
    spec = with_vocabulary(spec, data)
    state = build(spec, mesh)
    share = share_of(spec, state)
    meta = {"config": spec.resolved, "data_fingerprint": data.fingerprint}
    kept = spec.checkpoint
    best = Best(kept.save_top_k, kept.monitor, kept.mode)
    saver = saving.Saver(path / CHECKPOINTS_DIR, kept.keep, meta, best)
    resume.load_newest(saver, state, data, console)
    if saver.last_step is None and spec.resume_from_checkpoint is not None:
        named = Path(spec.resume_from_checkpoint)
        resume.resume_from(named, spec, saver, state, data, console)
    if saver.last_step is None and spec.restore_from_path is not None:
        start_from(spec, state, console.event)
    first_step = state.step
    _check_progress_on_main(path, state)
    metrics: MetricsFile | None = None
    trackers = CompositeTracker([])
    if mesh.is_main:
        save_tokenizer(data.tokenizer, path, spec.model.max_position_embeddings)
        metrics = MetricsFile(path / "metrics.jsonl", resume_step=first_step, warn=console.warn)
        trackers = open_trackers(
            spec.observe, path, resume_step=first_step, config=spec.resolved, warn=console.warn
        )
    text_bytes = len(data.validation_text())
    health = HealthLog(
        state, spec.observe.health, path if mesh.is_main else None, first_step, console.warn
    )
    run = Run(
        health=health,
        spec=spec,
        state=state,
        data=data,
        saver=saver,
        console=console,
        metrics=metrics,
        trackers=trackers,
        stop=stop,
        limit=TimeLimit(spec.train.max_time_seconds, began),
        profiler=StepProfiler(spec.profile, path, mesh.world.rank, mesh.device, console.event),
        bytes_per_token=text_bytes / data.num_final_tokens,
        background=BackgroundSaver(saver, state) if kept.async_save else None,
    )
    console.header(describe(spec, state, data))
    if share is not None:
        kernel = fp8_kernel(spec, state)
        console.header(
            [
                f"FP8: {share.share:.1%} of the GEMM FLOPs of a step without attention ({kernel}); "
                f"higher: {'; '.join(share.higher)}"
            ]
        )
    if first_step >= spec.train.max_steps:
        console.event(f"step {first_step} of {spec.train.max_steps}: nothing is left to do")
    require_room(saver, kept, state, spec.train.max_steps)
    console.start(spec.train.max_steps, first_step)
    try:
        if spec.train.nonfinite_policy == "rollback" and saver.last_step is None:
            save(run, must_succeed=True)  # something to go back to
        if spec.train.num_sanity_val_steps and first_step == 0:
            check_validation(run)
        with memory_snapshot_on_oom(
            spec.profile.memory_snapshot_on_oom, path, mesh.world.rank, console.warn
        ):
            finished = train(run)
        summary = summarize(run, path, typed, finished, began)
        if finished and not spec.train.fast_dev_run:
            console.event(f"a sample: {sample_text(run)!r}")
    finally:
        if metrics is not None:
            metrics.close()
        health.close()
        trackers.close()
    if mesh.is_main:
        try:
            write_summary(path / "summary.json", summary)
        except OSError as error:
            console.warn(f"{path / 'summary.json'}: cannot be written ({error})")
        if finished:
            mark(path, FINISHED)  # the last act: killed before it, the run is still to be continued
        console.finish(summary.rows())
    if not finished:
        saving.from_main(
            mesh, None
        )  # a launcher may end the others as soon as one has left with 75
    return int(ExitCode.FINISHED if finished else ExitCode.SAVED_ON_SIGNAL)


def share_of(spec: RunSpec, state: TrainState) -> PrecisionShare | None:
    """How much of a step is FP8, where it was asked for; raises if it is nothing.

    All ranks together.
    """
    recipe = spec.precision.fp8
    if recipe is None:
        return None
    parts = saving.gather(state.mesh, linear_flops(state.model, recipe))
    share = share_of_ranks(parts, spec.model, state.mesh.data.size)
    require_fp8(share)
    return share


def with_vocabulary(spec: RunSpec, data: PreparedData) -> RunSpec:
    """The spec with the size of the vocabulary that the data's tokenizer has, padded."""
    size = padded_vocab_size(data.vocab_size, spec.vocab_divisible_by)
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=size))


def describe(spec: RunSpec, state: TrainState, data: PreparedData) -> list[str]:
    """What this run is, in a few lines, before its first step."""
    model, train = spec.model, spec.train
    # Fused and sharded parameters count once, by their logical shapes; so do two stages' copies.
    pieces = [piece for param in state.model.parameters() for piece in pieces_of(param)]
    own_params = sum(math.prod(piece.global_shape) for piece in pieces if piece.replica == 0)
    count = torch.tensor(own_params, dtype=torch.float64, device=state.mesh.device)
    num_params = int(state.mesh.pp.all_reduce_sum(count).item())
    layout = f"{spec.parallel.world_size} rank(s) on {state.mesh.device.type}"
    layout += f", tensor parallel {spec.parallel.tp}" if spec.parallel.tp > 1 else ""
    layout += " with sequence parallelism" if state.sequence_parallel else ""
    layout += f", context parallel {spec.parallel.cp}" if spec.parallel.cp > 1 else ""
    if spec.parallel.pp > 1:
        layout += f", pipeline parallel {spec.parallel.pp} ({spec.parallel.pipeline.schedule})"
    return [
        f"model: {model.num_layers} layers x {model.hidden_size}, "
        f"{num_params / 1e6:.2f} M parameters, vocabulary {model.vocab_size}",
        f"data: {data.num_train_tokens / 1e6:.2f} M training tokens, "
        f"{data.num_validation_tokens / 1e6:.3f} M validation tokens",
        f"precision: {precision_of(spec, state)}",
        f"batch: {train.global_batch_size} x {spec.data.seq_length} tokens in microbatches of "
        f"{train.micro_batch_size}{_rampup(train)}; {layout}",
        f"optimizer: {spec.optim.name} by {state.optimizer.kernel_name}; "
        f"learning rate: {spec.optim.schedule.name}",
        *shares_of(spec, state),
        *smoke_options(spec),
    ]


def shares_of(spec: RunSpec, state: TrainState) -> list[str]:
    """What a rank holds of a sharded state, counted from its tensors."""
    fsdp = spec.parallel.fsdp
    if fsdp is None and not spec.optim.shards_states:
        return []
    held = bytes_of(state)
    whole = 12 * sum(param.numel() for param in state.masters.params)
    name = "ZeRO-1" if fsdp is None else f"FSDP ({fsdp.strategy})"
    kept = f"{(held.masters + held.moments) / 2**20:.1f} of {whole / 2**20:.1f} MiB"
    gradients = "gradients whole" if fsdp is None else "gradients likewise"
    return [
        f"{name} over {state.masters.shards.size} rank(s): this one keeps {kept} of FP32 weights "
        f"and moments, {gradients}"
    ]


def _rampup(train: TrainSpec) -> str:
    ramp = train.rampup
    if ramp is None:
        return ""
    return f", from {ramp.start} in steps of {ramp.increment} over {ramp.samples} samples"


def smoke_options(spec: RunSpec) -> list[str]:
    """A line for each option that makes this run other than an ordinary one."""
    train, lines = spec.train, []
    if train.fast_dev_run:
        steps = f"fast_dev_run: {train.max_steps} step(s)"
        short = f"validation on {train.limit_val_batches} global batch(es)"
        lines.append(f"{steps}, {short}; no checkpoints, no loggers, a directory of its own")
    if not train.limit_val_batches:
        lines.append("limit_val_batches=0: no validation")
    if train.overfit_batches:
        lines.append(f"overfit_batches: the first {train.overfit_batches} global batches repeat")
    if train.gc_interval:
        lines.append(f"gc_interval: garbage is collected every {train.gc_interval} step(s) only")
    if train.deterministic:
        lines.append("deterministic: operations without a deterministic algorithm are errors")
    return lines


def precision_of(spec: RunSpec, state: TrainState) -> str:
    """The formats, and the means by which they run here."""
    compute = spec.precision.compute.upper()
    if not spec.precision.half_weights:
        compute += " GEMMs over FP32 weights and residual stream"
    elif spec.precision.compute != "fp32" and spec.precision.fp8 is None:
        compute += ", FP32 masters"
    if spec.precision.loss_scale is not None:
        compute += ", dynamic loss scale"
    recipe = spec.precision.fp8
    if recipe is None:
        if spec.precision.backend == "te":
            return f"{compute}; {backends.describe(spec, state.mesh.device)}"
        return compute
    formats = "E4M3" if recipe.backward_format == "e4m3" else "hybrid E4M3/E5M2"
    device = state.mesh.device
    if spec.precision.backend != "native":
        what = f"FP8 {recipe.name}, {formats}, in QKV, projection, FC1, FC2; the rest {compute}"
        return f"{what}; {backends.describe(spec, device)}"
    work = COMPUTE_DTYPES[spec.precision.compute]
    return (
        f"FP8 {recipe.name}, {formats}, in QKV, projection, FC1, FC2; the rest {compute}; native, "
        f"{means_of(recipe, state.scaling.engine, device, work)}"
    )


def fp8_kernel(spec: RunSpec, state: TrainState) -> str:
    """Backend and kernel of the FP8 products: `native emulated`, `te tensor cores`, …"""
    recipe, device = spec.precision.fp8, state.mesh.device
    if spec.precision.backend != "native" or recipe is None:
        return backends.fp8_kernel(spec, device)
    means = means_of(recipe, state.scaling.engine, device, COMPUTE_DTYPES[spec.precision.compute])
    kinds = [kind for kind in ("tensor cores", "emulated") if kind in means]
    return f"native {' and '.join(kinds)}"


def summarize(run: Run, path: Path, typed: Typed, finished: bool, began: float) -> RunSummary:
    """The last validation beside what simple predictors reach on its text, and what really ran."""
    spec, state, data = run.spec, run.state, run.data
    val_loss = unigram = xz = None
    validates = finished and spec.train.limit_val_batches > 0
    if validates and spec.train.fast_dev_run:
        val_loss = validate(run)
    elif validates:
        run.console.event(f"validating on {_coverage(data)}")
        val_loss = validate(run, whole=True)
        text = data.validation_text()
        unigram = unigram_bits_per_byte(
            data.train_token_counts(), data.validation_tokens(), len(text), data.vocab_size
        )
        xz = xz_bits_per_byte(text)
    report, counter, share = run.last_report, state.counter, share_of(spec, state)
    name = f"{run.stop.signal.name}" if run.stop.signal is not None else "a signal on another rank"
    if run.stopped_by_time:
        name = "trainer.max_time"
    totals = counter.by_precision()
    attention = sum(n for (_, place), n in counter.flops.items() if place == "attention")
    gemms = sum(totals.values()) - attention
    return RunSummary(
        status="finished" if finished else f"saved on {name}",
        step=state.step,
        total_steps=spec.train.max_steps,
        log_dir=str(path),
        continue_command=(
            None  # a trial leaves nothing to continue
            if spec.train.fast_dev_run
            else continue_command(spec, path, typed.command, finished)
        ),
        val_loss=val_loss,
        bytes_per_token=run.bytes_per_token,
        val_tokens=_num_validated(run) if validates else None,
        val_tokens_in_all=data.num_validation_tokens if validates else None,
        unigram_bits_per_byte=unigram,
        xz_bits_per_byte=xz,
        train_loss=run.last_loss,
        consumed_samples=state.consumed_samples,
        consumed_tokens=state.consumed_samples * spec.data.seq_length,
        wall_seconds=time.monotonic() - began,
        tokens_per_second=report.tokens_per_second if report else None,
        tflops_causal=report.tflops_causal if report else None,
        tflops_full=report.tflops_full if report else None,
        peak_memory_bytes=peak_memory_bytes(spec.parallel.accelerator),
        precision=precision_of(spec, state),
        metrics_file=str(path / "metrics.jsonl"),
        checkpoint=_newest_checkpoint(run),
        tensorboard_dir=str(path) if spec.observe.create_tensorboard_logger else None,
        extra={
            **typed.record,
            # Counted where the products are called, in this process and on this rank.
            "gemm_flops": {f"{p} {place}": n for (p, place), n in sorted(counter.flops.items())},
            "fp8_share_planned": 0.0 if share is None else share.share,
            "higher_precision": [] if share is None else list(share.higher),
            "fp8_share_of_gemm_flops": totals.get("fp8", 0) / max(1, gemms),
            "fp8_share_by_kernel": (
                {f"native {kind}": n / max(1, gemms) for kind, n in counter.fp8_backends.items()}
                if spec.precision.backend == "native"
                else {fp8_kernel(spec, state): totals.get("fp8", 0) / max(1, gemms)}
            ),
            "fp8_share_with_attention": counter.share("fp8"),
            "fp8_flops_by_backend": dict(counter.fp8_backends),
            "num_skipped_steps": state.num_skipped,
            "compiled": None if state.compiled is None else dataclasses.asdict(state.compiled),
            "traffic_bytes": {
                " ".join(key): n for key, n in sorted(state.mesh.traffic.num_bytes.items())
            },
        },
    )


def _coverage(data: PreparedData) -> str:
    if data.num_final_tokens == data.num_validation_tokens:
        return "the whole validation text"
    return (
        f"{data.num_final_tokens} of {data.num_validation_tokens} validation tokens, in evenly "
        "spread documents"
    )


def _num_validated(run: Run) -> int:
    """Tokens that the last validation read."""
    train, data = run.spec.train, run.data
    if not train.fast_dev_run:
        return data.num_final_tokens
    samples = train.limit_val_batches * train.global_batch_size
    return min(samples * run.spec.data.seq_length, data.num_final_tokens)


def continue_command(
    spec: RunSpec, path: Path, command: Sequence[str], finished: bool
) -> str | None:
    """The same command continues a run that was stopped; a finished one needs more steps."""
    words = [word for word in command if not word.startswith("trainer.max_steps=")]
    named = any("exp_manager.name=" in w or "exp_manager.explicit_log_dir=" in w for w in words)
    if finished:
        if not named:
            words.append(f"exp_manager.name={path.name}")
        words.append(f"trainer.max_steps={2 * spec.train.max_steps}")
        return shlex.join(words)
    return shlex.join(command)


def sample_text(run: Run) -> str:
    """A short continuation by the model as it stands."""
    tokenizer = run.data.tokenizer
    prompt = tokenizer.encode(SAMPLE_PROMPT)
    drawn = sample(
        run.state,
        prompt,
        SAMPLE_TOKENS,
        vocab_size=run.data.vocab_size,
        temperature=0.7,
        seed=run.spec.train.seed,
    )
    return SAMPLE_PROMPT + tokenizer.decode(drawn)


def _newest_checkpoint(run: Run) -> str | None:
    step = run.saver.last_step
    return None if step is None else str(run.saver.path_of(step))


def _choose_on_main(spec: RunSpec, mesh: Mesh, is_sweep: bool) -> RunChoice:
    """The main rank chooses and holds the lock; the others learn of it, or of the error."""
    choice: RunChoice | None = None
    error: UserError | None = None
    if mesh.is_main:
        try:
            choice = rundirs.enter(spec, is_sweep=is_sweep)
        except UserError as failure:
            error = failure
    shared = None if choice is None else (choice.path, choice.continues, choice.reason)
    shared, error = saving.from_main(mesh, (shared, error))
    if error is not None:
        saving.raise_on_all(error)
    if choice is not None:
        return choice
    assert shared is not None
    path, continues, reason = shared
    return RunChoice(path, continues, reason, lock=None)


def _check_progress_on_main(path: Path, state: TrainState) -> None:
    error: UserError | None = None
    if state.mesh.is_main:
        try:
            restarts.check_progress(path, state.step)
        except UserError as failure:
            error = failure
    error = saving.from_main(state.mesh, error)
    if error is not None:
        saving.raise_on_all(error)
