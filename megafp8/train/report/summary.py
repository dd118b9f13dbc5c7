"""Summarize a run at its end: its results and simpler models' results, and a sample of its text."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafp8.config.overrides import quoted
from megafp8.config.resolve import optim_of
from megafp8.config.resume import with_defaults
from megafp8.data.tokenize import continuation
from megafp8.fp8.scaling import ScalingState
from megafp8.observe.curve import sparkline
from megafp8.observe.experts import summary_of
from megafp8.observe.summary import RunSummary
from megafp8.observe.units import format_number
from megafp8.optim.schedules import learning_rate
from megafp8.report.record import logged_steps, typical
from megafp8.report.writer import REPORT_FILE
from megafp8.runs.run_data import RunData, epochs_of, warnings_of
from megafp8.specs import RunSpec
from megafp8.train.generate import sample
from megafp8.train.report.fp8 import share_of
from megafp8.train.report.header import precision_of
from megafp8.train.run import Run
from megafp8.train.validate import validate, validated_tokens

PROMPT_TOKENS = 8  # the beginning of a validation document that a sample continues
SAMPLE_TOKENS = 64
SPARKLINE = 40  # bars
LONG_COMMAND = 160  # characters
SPEED = (
    "tokens_per_second", "tflops_causal", "tflops_full",
    "mfu_causal", "mfu_full", "hfu_causal", "hfu_full",
)  # fmt: skip
"""Fields of the summary that are typical values of the logged steps, as on the run's page."""


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """Hold the user's command and settings, for reports; see `megafp8.train.pretrain.pretrain`."""

    command: Sequence[str]  # the words of the command
    notes: tuple[str, ...]  # lines for the console
    record: Mapping[str, object]  # the settings that are not the default job's, for summary.json

    @property
    def changed(self) -> Sequence[Mapping[str, object]]:
        """Return the settings that are not the default job's: key, value, origin, default."""
        found = self.record.get("non_default", ())
        assert isinstance(found, Sequence)
        return found


def summarize(
    run: Run, path: Path, command_line: CommandLine, finished: bool, began: float
) -> RunSummary:
    """Validate a finished run on its validation text, and return the summary of the run.

    All ranks call it together. `path` is the run's directory, `finished` says that the last step
    was reached, `began` is the start of the process on the monotonic clock.
    """
    spec, state = run.spec, run.state
    validates = finished and spec.train.limit_val_batches > 0
    found = _validation_at_the_end(run) if validates else {}
    name = run.stop.signal.name if run.stop.signal is not None else "a signal on another rank"
    if run.stopped_by_time:
        name = "trainer.max_time"
    mean = run.curve.recent
    return RunSummary(
        status="finished" if finished else f"saved on {name}",
        step=state.step,
        total_steps=spec.train.max_steps,
        log_dir=str(path),
        continue_command=(
            None  # a trial run leaves nothing to continue
            if spec.train.fast_dev_run
            else continue_command(spec, path, command_line.command, finished, state.step)
        ),
        continue_note=(
            note_to_continue(spec, state.step) if finished and not spec.train.fast_dev_run else None
        ),
        bytes_per_token=run.bytes_per_token,
        **found,
        train_loss=mean[0] if mean else None,
        train_loss_steps=mean[1] if mean else None,
        loss_curve=sparkline(run.curve.points, SPARKLINE) or None,
        health=run.health.verdict(),
        experts=summary_of(getattr(run.last_report, "experts", None), run.health.least_updates),
        consumed_samples=state.consumed_samples,
        consumed_tokens=state.consumed_samples * spec.data.seq_length,
        epochs=None if spec.train.overfit_batches else epochs_of(run.data, state.consumed_samples),
        data_warnings="; ".join(warnings_of(spec.data, run.data)) or None,
        num_skipped_steps=state.num_skipped,
        wall_seconds=time.monotonic() - began,
        **_speed(run, path),
        peak=run.peak.text(fp8=spec.precision.fp8 is not None),
        peak_memory_bytes=run.memory.bytes(),
        precision=precision_of(spec, state) + _time_of_rule(run),
        metrics_file=str(path / "metrics.jsonl"),
        report_file=str(path / REPORT_FILE),
        checkpoint=_newest_checkpoint(run),
        tensorboard_dir=str(path) if spec.observe.create_tensorboard_logger else None,
        extra={**command_line.record, **_counted(run)},
    )


def _time_of_rule(run: Run) -> str:
    """Return which share of the steps' time a recipe's rule took, if it is in torch operations."""
    scaling = run.state.scaling
    if not isinstance(scaling, ScalingState) or not scaling.rule_seconds:
        return ""
    share = scaling.rule_seconds / max(run.pace.total_seconds, scaling.rule_seconds)
    return f"; the rule took {share:.0%} of the steps' time on the host"


def _speed(run: Run, path: Path) -> dict[str, Any]:
    """Return typical figures of the logged steps; those of the last step where none was logged."""
    lines = logged_steps(path) if run.metrics is not None else []  # other ranks write no file
    last = {field: getattr(run.last_report, field, None) for field in SPEED}
    return {field: typical(lines, field) or last[field] for field in SPEED}


def _validation_at_the_end(run: Run) -> dict[str, Any]:
    """Validate, and return the fields of the summary that say what was found.

    A model of token frequencies predicts the same tokens; `xz` predicts the same text, if the whole
    of it is validated.
    """
    data, is_whole = run.data, run.spec.train.last_validation_is_whole
    found: dict[str, Any] = {
        "val_tokens": _num_validated(run),
        "val_tokens_in_all": data.num_validation_tokens,
    }
    if not is_whole:
        found["val_loss"] = validate(run, is_last=True)
        tokens = validated_tokens(run)
        found["unigram_bits_per_byte"] = unigram_bits_per_byte(
            data.train_token_counts(), tokens, len(tokens) * run.bytes_per_token, data.vocab_size
        )
        return found
    run.console.event(f"validating on {_coverage(data)}")
    found["val_loss"] = validate(run, whole=True, is_last=True)
    text, counts = data.validation_text(), data.train_token_counts()
    found["unigram_bits_per_byte"] = unigram_bits_per_byte(
        counts, data.validation_tokens(), len(text), data.vocab_size
    )
    return found | {"xz_bits_per_byte": xz_bits_per_byte(text)}


def _counted(run: Run) -> dict[str, object]:
    """Return what is in `summary.json` only; FLOPs are this process's, counted where they run."""
    spec, state = run.spec, run.state
    counter, share = state.counter, share_of(spec, state)
    totals = counter.by_precision()
    attention = sum(n for (_, place), n in counter.flops.items() if place == "attention")
    gemms = max(1, sum(totals.values()) - attention)
    in_fp8 = totals.get("fp8", 0)
    by_kernel = {kernel: n / gemms for kernel, n in state.backend.fp8_flops(counter).items()}
    planned = {
        "fp8_share_planned": 0.0 if share is None else share.share,
        "higher_precision": [] if share is None else list(share.higher),
    }
    return {
        "gemm_flops": {f"{p} {place}": n for (p, place), n in sorted(counter.flops.items())},
        **({} if state.phases else planned),  # each phase of a schedule has others
        "fp8_share_of_gemm_flops": in_fp8 / gemms,
        "fp8_share_by_kernel": by_kernel,
        "fp8_share_with_attention": counter.share("fp8"),
        "fp8_flops_by_backend": dict(counter.fp8_backends),
        "peak_of_a_rank": dataclasses.asdict(run.peak),
        "compiled": None if state.compiled is None else dataclasses.asdict(state.compiled),
        "traffic_bytes": {
            " ".join(key): n for key, n in sorted(state.mesh.traffic.num_bytes.items())
        },
    }


def _coverage(data: RunData) -> str:
    if data.num_final_tokens == data.num_validation_tokens:
        return "the whole validation text"
    return (
        f"{data.num_final_tokens} of {data.num_validation_tokens} validation tokens, in evenly "
        "spread documents"
    )


def _num_validated(run: Run) -> int:
    """Return the number of tokens that the last validation read."""
    train, data = run.spec.train, run.data
    if train.last_validation_is_whole:
        return data.num_final_tokens
    samples = train.limit_val_batches * train.global_batch_size
    return min(samples * run.spec.data.seq_length, data.num_validation_tokens)


def continue_command(
    spec: RunSpec, path: Path, command: Sequence[str], finished: bool, step: int
) -> str | None:
    """Return the command that continues a run.

    It is the same command for a run that was stopped. A finished run needs more steps than `step`,
    the one that it has reached, and its name if the command does not give one; a long command is
    replaced by one that reads the run's own configuration.
    """
    if not finished:
        return shlex.join(command)
    lengths = ("trainer.max_steps=", "trainer.max_epochs=")
    arguments = [word for word in command if not word.startswith(lengths)]
    names_run = ("exp_manager.name=", "exp_manager.explicit_log_dir=")
    if not any(key in argument for argument in arguments for key in names_run):
        is_plain = re.fullmatch(r"(?!null$)[\w.-]+", path.name, re.ASCII | re.IGNORECASE)
        arguments.append(f"exp_manager.name={path.name if is_plain else quoted(path.name)}")
    epochs = with_defaults(spec.resolved).get("trainer.max_epochs")
    if epochs is not None and f"trainer.max_epochs={epochs}" not in command:  # a file has them
        arguments.append("trainer.max_epochs=null")
    longer = f"trainer.max_steps={2 * max(spec.train.max_steps, step)}"
    text = shlex.join([*arguments, longer])
    if len(text) <= LONG_COMMAND or any(".py:" in word for word in command):
        return text  # a file's recipe is code, which a configuration may not choose by itself
    program = itertools.takewhile(lambda word: "=" not in word and word[0] != "-", command)
    settings = ("--config-dir", str(path), "--config-name", "config")
    more = [word for word in arguments if word == "trainer.max_epochs=null"]
    return shlex.join([*program, *settings, *more, longer])


def note_to_continue(spec: RunSpec, step: int) -> str | None:
    """Return what is to be known before a finished run at `step` continues, or None."""
    if step > spec.train.max_steps:
        return (
            f"this command trained nothing: the run is at step {step} already, past "
            f"trainer.max_steps={spec.train.max_steps}"
        )
    return rise_of_rate(spec)


def rise_of_rate(spec: RunSpec) -> str | None:
    """Return a warning if a run of twice the steps continues at a higher learning rate, else None.

    Such a run has another schedule, as most schedules end at the last step.
    """
    steps = spec.train.max_steps
    longer = optim_of({**with_defaults(spec.resolved), "trainer.max_steps": 2 * steps})
    ended, continues = learning_rate(spec.optim, steps), learning_rate(longer, steps + 1)
    if continues <= 1.5 * ended:
        return None
    return f"its learning rate rises from {ended:.1e} to {continues:.1e} where it continues"


def why_diverged(run: Run, val_loss: float | None, *, has_written: bool) -> str | None:
    """Return why the model of a run at its last step is of no use; None if it may be good.

    `has_written` says whether the model could write its sample.
    """
    state = run.state
    if val_loss is not None and not math.isfinite(val_loss):
        why = f"the validation loss is {format_number(val_loss)}"
    elif not has_written:
        why = "the model's outputs are not finite"
    elif state.num_skipped and not state.optimizer.num_updates and state.loss_scale is None:
        why = "no step has changed a weight"
    else:
        return None
    keys = "model.optim.lr or model.optim.weight_decay, or clip gradients,"
    return (
        f"{why}; {state.num_skipped} of {state.step} steps were skipped, since they were not "
        f"finite. Lower {keys if state.optimizer.num_updates else 'model.init_method_std'} in a "
        "new run"
    )


def show_sample(run: Run) -> bool:
    """Show a short text that the model writes after the beginning of a validation document.

    All ranks call it together. Return False if the model's outputs are not finite.
    """
    tokenizer, data = run.data.tokenizer, run.data
    prompt = data.validation_prompt(PROMPT_TOKENS)
    drawn = sample(
        run.state,
        prompt,
        SAMPLE_TOKENS,
        vocab_size=data.vocab_size,
        temperature=0.7,
        seed=run.spec.train.seed,
    )
    if len(drawn) < SAMPLE_TOKENS:
        run.console.event("the model writes no sample: its outputs are not finite")
        return False
    if run.spec.data.instructions is not None and tokenizer.eod_id in drawn:
        drawn = drawn[: drawn.index(tokenizer.eod_id)]  # where the answer ends
    text = continuation(tokenizer, prompt, drawn)
    run.console.sample(run.state.step, tokenizer.decode(prompt), text)
    return True


def _newest_checkpoint(run: Run) -> str | None:
    step = run.saver.last_step
    return None if step is None else str(run.saver.path_of(step))


def unigram_bits_per_byte(
    train_counts_V: NDArray[np.int64],
    validation_tokens: NDArray[np.int64],
    num_bytes: float,
    vocab: int,
) -> float:
    """Return the bits per byte of a model that knows only how often each token occurs.

    A token has probability (count + 1) / (all counts + vocab). This is add-one smoothing: a token
    that training never saw costs many bits, not infinitely many.

    Args:
        train_counts_V: How often each token occurs in the training text, [vocab].
        validation_tokens: The tokens to predict, including ends of documents, as for the model.
        num_bytes: The bytes of the validation text, or of as many tokens on average.
        vocab: The number of tokens of the vocabulary, before padding.
    """
    assert train_counts_V.shape == (vocab,), f"{train_counts_V.shape} counts of {vocab} tokens"
    bits_V = np.log2(float(train_counts_V.sum()) + vocab) - np.log2(train_counts_V + 1.0)
    used_V = np.bincount(validation_tokens, minlength=vocab)
    return float(bits_V @ used_V) / num_bytes


def xz_bits_per_byte(validation_text: bytes) -> float | None:
    """Return the bits per byte of `xz -9` on the text alone; xz has not seen the training text.

    The result is None if this Python was built without liblzma.
    """
    try:
        import lzma
    except ImportError:
        return None
    compressed = lzma.compress(validation_text, format=lzma.FORMAT_XZ, preset=9)
    return 8 * len(compressed) / len(validation_text)
