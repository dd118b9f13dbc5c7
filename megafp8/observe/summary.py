"""Summarize a run: the table shown at its end, and summary.json for programs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megafp8.files import to_json, write_atomically
from megafp8.observe.units import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_percent,
)

_DERIVED = ("perplexity", "val_bits_per_byte")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Return a loss in nats per token as bits per byte of text.

    Bits per byte can be compared between tokenizers.
    """
    return nats_per_token / math.log(2) / bytes_per_token


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Hold the results of a run. `None` marks a value that was not measured; the table omits it.

    Bits per byte compare the model with two simple predictors on the same text: `unigram` knows how
    often each token occurs and nothing else, and `xz -9` is the compression program.
    """

    status: str  # how the run ended, in words: "finished", "saved on SIGTERM", …
    step: int
    total_steps: int
    log_dir: str
    continue_command: str | None = None  # continues, or prolongs, this run
    continue_note: str | None = None  # what to know before that
    val_loss: float | None = None  # nats per token
    val_tokens: int | None = None  # number of tokens that the last validation read
    val_tokens_in_all: int | None = None  # number of tokens that the validation text has
    bytes_per_token: float | None = None  # of the validation text
    unigram_bits_per_byte: float | None = None
    xz_bits_per_byte: float | None = None
    train_loss: float | None = None  # nats per token, the mean of the last steps
    train_loss_steps: int | None = None  # how many steps the mean is over
    loss_curve: str | None = None  # the training loss of this process, as a line of bars
    health: str | None = None  # the FP8 health of the last logged step, in words
    experts: str | None = None  # how evenly they are loaded, in words
    consumed_samples: int | None = None
    consumed_tokens: int | None = None
    epochs: str | None = None  # how often each dataset was read
    data_warnings: str | None = None  # what is seldom meant, such as validating on training data
    num_skipped_steps: int = 0  # of all processes of the run; their gradients were not finite
    wall_seconds: float | None = None  # of this process; earlier processes of the run not included
    tokens_per_second: float | None = None
    tflops_causal: float | None = None  # model TFLOP/s; see flops.py
    tflops_full: float | None = None
    mfu_causal: float | None = None  # fractions of the peak of all ranks; see utilization.py
    mfu_full: float | None = None
    hfu_causal: float | None = None
    hfu_full: float | None = None
    peak: str | None = None  # the peak of one rank in words
    peak_memory_bytes: int | None = None
    precision: str | None = None  # what really ran, e.g. "FP8 delayed (native, emulated GEMM)"
    metrics_file: str | None = None
    report_file: str | None = None
    checkpoint: str | None = None
    tensorboard_dir: str | None = None
    wandb: str | None = None  # the run's address in Weights & Biases, or how to upload it
    trackers_failed: str | None = None  # which failed in this process, and why
    extra: Mapping[str, object] = field(default_factory=dict)  # more keys of summary.json

    @classmethod
    def from_dict(cls, tree: Mapping[str, object]) -> RunSummary:
        """Return the summary that `to_dict` wrote; keys that it does not know are in `extra`.

        Raises:
            ValueError: A field is missing or has a value of another type.
        """
        own, hints = {}, get_type_hints(cls)
        for name, field_ in cls.__dataclass_fields__.items():
            if name in tree and name != "extra":
                own[name] = _read(name, tree[name], hints[name])
            elif name != "extra" and field_.default is MISSING:
                raise ValueError(f"{name} is missing")
        rest = {k: v for k, v in tree.items() if k not in own and k not in _DERIVED}
        values: dict[str, Any] = own
        return cls(**values, extra=rest)

    @property
    def perplexity(self) -> float | None:
        """The perplexity per token is e to the validation loss, infinity where that overflows."""
        if self.val_loss is None:
            return None
        try:
            return math.exp(self.val_loss)
        except OverflowError:
            return math.inf

    @property
    def val_bits_per_byte(self) -> float | None:
        """The validation loss in bits per byte of text, or None if it was not measured."""
        if self.val_loss is None or self.bytes_per_token is None:
            return None
        return bits_per_byte(self.val_loss, self.bytes_per_token)

    def to_dict(self) -> dict[str, object]:
        """Return all values as plain Python objects, in the order of summary.json."""
        values: dict[str, object] = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "extra"
        }
        values["perplexity"] = self.perplexity
        values["val_bits_per_byte"] = self.val_bits_per_byte
        clash = sorted(set(values) & set(self.extra))
        assert not clash, f"extra must not hold the summary's own keys: {clash}"
        return {**values, **self.extra}

    def rows(self) -> list[tuple[str, str]]:
        """Return the table's rows, (name, value with its unit), of all that was measured."""
        rows = [("status", f"{self.status}, step {self.step}/{self.total_steps}")]
        if self.val_loss is not None and self.perplexity is not None:
            value = f"{format_number(self.val_loss)} nats per token{self._coverage()}"
            rows.append(("validation loss", value))
            rows.append(("perplexity", format_number(self.perplexity, 2)))
        if self.val_bits_per_byte is not None:
            beside = [
                f"{name} {format_number(bits, 3)}"
                for name, bits in (
                    ("unigram", self.unigram_bits_per_byte),
                    ("xz -9", self.xz_bits_per_byte),
                )
                if bits is not None
            ]
            value = format_number(self.val_bits_per_byte, 3)
            rows.append(("bits per byte", value + (f"  ({', '.join(beside)})" if beside else "")))
        if self.train_loss is not None:
            rows.append(("training loss", format_number(self.train_loss) + self._mean_of()))
        if self.loss_curve:
            rows.append(("its curve", self.loss_curve))
        if self.num_skipped_steps:
            value = f"{self.num_skipped_steps} of {self.step}, whose gradients were not finite"
            in_all = self.num_skipped_steps >= self.step
            rows.append(("skipped steps", value + "; no weight has changed" * in_all))
        if self.epochs is not None:
            rows.append(("epochs", self.epochs))
        if self.data_warnings is not None:
            rows.append(("beware", self.data_warnings))
        if self.precision is not None:
            rows.append(("precision", self.precision))
        if self.health is not None:
            rows.append(("FP8 health", self.health.removeprefix("FP8 health").lstrip(": ")))
        if self.experts is not None:
            rows.append(("experts", self.experts))
        if (speed := self._speed()) is not None:
            rows.append(("speed", speed))
        if (used := self._utilization()) is not None:
            rows.append(("utilization", used))
        if self.wall_seconds is not None:
            rows.append(("time", format_duration(self.wall_seconds)))
        if self.peak_memory_bytes is not None:
            rows.append(("peak memory", format_bytes(self.peak_memory_bytes)))
        for what, where in (
            ("run", self.log_dir),
            ("report", self.report_file),
            ("checkpoint", self.checkpoint),
            ("curves", self.tensorboard_dir and f"tensorboard --logdir {self.tensorboard_dir}"),
            ("Weights & Biases", self.wandb),
            ("beware", self.trackers_failed),
            *self._next_commands(),
            ("continue with", self.continue_command),
            ("beware", self.continue_note),
        ):
            if where:
                rows.append((what, where))
        return rows

    def _next_commands(self) -> list[tuple[str, str]]:
        """Return what may be done with a finished run: let it write, and ask whether FP8 cost."""
        if self.status != "finished" or self.checkpoint is None or self.continue_command is None:
            return []
        run = shlex.quote(self.log_dir)
        commands = [("let it write", f"megafp8 generate {run}")]
        changed = self.extra.get("non_default")
        has_code = isinstance(changed, list) and any(".py:" in str(row) for row in changed)
        if self.extra.get("fp8_share_of_gemm_flops") and "finetune" not in self.continue_command:
            text = f"megafp8 compare --config-dir {run} --config-name config --seeds 1 2 3"
            commands.append(("without FP8", text + " --trust-recipe" * has_code))
        return commands

    def _mean_of(self) -> str:
        steps = self.train_loss_steps or 1
        return f", mean of the last {steps} steps" if steps > 1 else ""

    def _coverage(self) -> str:
        """Return how many tokens the validation read, or "" if it read all of them."""
        some, there = self.val_tokens, self.val_tokens_in_all
        if some is None or there is None or some >= there:
            return ""
        return f", over {format_count(some)} of {format_count(there)} tokens"

    def _speed(self) -> str | None:
        if self.tokens_per_second is None:
            return None
        speed = f"{format_count(self.tokens_per_second)} tokens/s"
        if self.tflops_causal is not None and self.tflops_full is not None:
            causal, full = format_number(self.tflops_causal, 2), format_number(self.tflops_full, 2)
            speed += f", {causal} model TFLOP/s causal ({full} full)"
        return speed

    def _utilization(self) -> str | None:
        fractions = (self.mfu_causal, self.mfu_full, self.hfu_causal, self.hfu_full)
        if self.peak is None or None in fractions:
            return None
        mfu, mfu_full, hfu, hfu_full = (format_percent(f) for f in fractions if f is not None)
        text = f"MFU {mfu} causal ({mfu_full} full)"
        if self.hfu_causal != self.mfu_causal:
            text += f", HFU {hfu} ({hfu_full}) with recomputation,"
        return f"{text} of {self.peak}"


def _read(name: str, value: object, kind: Any) -> object:
    """Return a field's value from JSON, where floats that are not finite are strings."""
    kinds = get_args(kind) or (kind,)
    if float in kinds and (value in _NOT_FINITE or type(value) is int):
        return float(value)
    if type(value) not in kinds:
        raise ValueError(f"{name} is {value!r}")
    return value


def write_summary(path: str | Path, summary: RunSummary) -> None:
    """Write summary.json atomically: a crash leaves the old file or the complete new one.

    Raises:
        OSError: The file cannot be written. The caller should report that; the run itself is good.
    """
    write_atomically(path, to_json(summary.to_dict(), indent=2) + "\n")
