"""`trainer`: devices, precision, length of the run."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from megafp8.config.keys import Valid, above, at_least, key, needs_above, one_of, or_null
from megafp8.config.values import (
    PRECISIONS,
    is_interval,
    parse_interval_seconds,
    spell_precision,
)


@dataclass
class Trainer:
    """Devices, precision, length of the run and how often it reports."""

    devices: int = key(
        1, "Ranks (processes) on this node.", nemo=1, kind="layout", valid=at_least(1)
    )
    num_nodes: int = key(1, "Nodes of the run.", nemo=1, kind="layout", valid=at_least(1))
    accelerator: str = key(
        "auto",
        "`auto` takes the GPU if there is one, else the CPU.",
        nemo="gpu",
        kind="layout",
        valid=one_of("auto", "cpu", "gpu"),
    )
    precision: int | str = key(
        "bf16",
        "Dtype of GEMMs and of the weights that they read; master weights are FP32. 16 comes with "
        "a dynamic loss scale, bf16 needs none.",
        nemo=16,
        kind="model",
        valid=one_of(*PRECISIONS),
        spelling=spell_precision,
    )
    max_steps: int = key(
        MISSING, "Optimizer steps of the whole run.", nemo=100000, kind="length", valid=at_least(1)
    )
    log_every_n_steps: int = key(
        10,
        "Steps between two lines of metrics. The first and the last step of a run have a line too.",
        nemo=10,
        kind="logging",
        valid=at_least(1),
    )
    val_check_interval: int = key(
        MISSING, "Steps between two validations.", nemo=100, kind="logging", valid=at_least(1)
    )
    limit_val_batches: int = key(
        MISSING,
        "Global batches of one validation during training; the last one of a run is whole. 0: no "
        "validation, at the end neither.",
        nemo=50,
        kind="logging",
        valid=at_least(0),
    )
    gradient_clip_val: float | None = key(
        1.0,
        "Largest global norm of the gradients; null or 0 does not clip.",
        nemo=1.0,
        kind="optim",
        valid=or_null(at_least(0)),
    )
    max_time: int | float | str | None = key(
        None,
        'Time by which this process has saved and left (exit code 75), as "DD:HH:MM:SS", '
        '"HH:MM:SS" or seconds; null for none. The same command continues.',
        kind="policy",
        valid=Valid('seconds above 0, "DD:HH:MM:SS", "HH:MM:SS", or null', is_interval),
        spelling=parse_interval_seconds,
    )
    step_timeout: float | None = key(
        None,
        "Seconds without a sign of life from a rank after which its stacks are shown and all "
        "leave; longer than the longest step, validation and save. Null: no watch.",
        kind="policy",
        valid=or_null(above(0)),
    )
    gradient_clip_algorithm: str = key(
        "norm",
        "`norm` shrinks all gradients together until their norm is `gradient_clip_val`; `value` "
        "cuts each element off at it.",
        kind="optim",
        valid=one_of("norm", "value"),
        needs=needs_above("trainer.gradient_clip_val", 0),
    )
    nonfinite_policy: str = key(
        "stop",
        "What a NaN or infinity in loss or gradients does: end the run, skip the step, or go back "
        "to the last checkpoint.",
        kind="policy",
        valid=one_of("stop", "skip", "rollback"),
    )
    max_restarts: int = key(
        0,
        "How often a run whose ranks died or hung is started again, from its newest checkpoint; "
        "three starts in a row that save nothing end it. Under torchrun: `--max-restarts`.",
        kind="policy",
        valid=at_least(0),
    )
    fast_dev_run: bool | int = key(
        False,
        "A trial of this many steps (True for one), with validations of as many global batches and "
        "neither checkpoints nor loggers, in a directory of its own.",
        kind="length",
        valid=Valid("True, False or a number of steps", lambda v: v >= 0),
        spelling=int,
    )
    overfit_batches: int = key(
        0,
        "Train on the first N global batches over and over; 0 for all data.",
        kind="data",
        valid=at_least(0),
    )
    num_sanity_val_steps: int = key(
        0,
        "Global batches validated before the first step, so that a failure comes early.",
        kind="logging",
        valid=at_least(0),
    )
    enable_progress_bar: bool = key(
        True, "Draw a live block on a terminal; without it, plain lines.", kind="logging"
    )
    deterministic: bool = key(
        False,
        "Refuse operations that have no deterministic algorithm (torch, cuBLAS).",
        kind="layout",
    )
    memory_snapshot_on_oom: bool = key(
        False,
        "With CUDA: when memory runs out, write what held it into the run's directory.",
        kind="logging",
    )
