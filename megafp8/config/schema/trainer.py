"""Define the keys below `trainer`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from omegaconf import MISSING

from megafp8.config.keys import (
    MAX_RANKS,
    Valid,
    at_least,
    key,
    needs,
    needs_above,
    one_of,
    or_null,
)
from megafp8.config.schema.data import OF_EXAMPLES
from megafp8.config.values import (
    PRECISIONS,
    is_interval,
    parse_interval_seconds,
    spell_precision,
)

# Makers of the keys of a group, with what most of these keys have in common.
length_key = partial(key, group="length")
failures_key = partial(key, group="failures", spec="train.*")
ranks_key = partial(key, group="ranks")


MOST_BATCHES = 2**53


@dataclass
class Trainer:
    """Define the keys below `trainer`: devices, precision, length, logging and restarts."""

    devices: int = ranks_key(
        1,
        "Number of ranks (processes) on each node.",
        nemo=1,
        spec="parallel.devices_per_node",
        valid=at_least(1, MAX_RANKS),
    )
    num_nodes: int = ranks_key(
        1,
        "Number of nodes.",
        nemo=1,
        spec="parallel.num_nodes",
        valid=at_least(1, MAX_RANKS),
    )
    accelerator: str = ranks_key(
        "auto",
        "Device of the run. `auto`: the GPU if there is one, otherwise the CPU.",
        nemo="gpu",
        spec="parallel.accelerator",
        valid=one_of("auto", "cpu", "gpu"),
    )
    precision: int | str = key(
        "bf16",
        "Dtype of GEMMs outside FP8 and of the weights that they read; master weights are in FP32. "
        "16 has a dynamic loss scale; bf16 and 32 need none.",
        nemo=16,
        group="precision",
        valid=one_of(
            *PRECISIONS,
            later=("fp8", "fp8-mixed"),
            suggestion="For FP8, set model.fp8=True; trainer.precision is the dtype of all else",
        ),
        spelling=spell_precision,
    )
    max_steps: int = length_key(
        MISSING,
        "Number of optimizer steps of the whole run.",
        nemo=100000,
        kind="length",
        valid=at_least(1),
    )
    max_epochs: int | None = length_key(
        None,
        "Number of times that fine-tuning reads all its examples. The start of the run says how "
        "many steps these are; they take the place of the job's own `trainer.max_steps`, and if "
        "that is given too, the run ends at what comes first. `null` and -1: `trainer.max_steps`.",
        nemo=-1,
        kind="length",
        valid=Valid("null, -1 or at least 1", lambda v: v is None or v == -1 or 1 <= v <= 2**31),
        needs=OF_EXAMPLES,
        spelling=lambda v: None if v == -1 else v,
    )
    log_every_n_steps: int = key(
        10,
        "Steps between two lines of metrics. The first and the last step of a run always have a "
        "line.",
        nemo=10,
        group="logs",
        spec="train.log_every_n_steps",
        valid=at_least(1),
    )
    val_check_interval: int = length_key(
        MISSING,
        "Steps between two validations.",
        nemo=100,
        spec="train.val_check_interval",
        valid=at_least(1),
    )
    limit_val_batches: int | float | None = length_key(
        None,
        "Number of global batches in each validation, or with a decimal point the share of the "
        "validation split's, as in Lightning: 1.0 is all of them. `null`: 8 during training, and "
        "the whole split at the end of the run. 0: no validation at all.",
        nemo=50,
        valid=Valid(
            "a whole number from 0, a share from 0.0 to 1.0, or null",
            lambda v: v is None or 0 <= v <= (1.0 if isinstance(v, float) else MOST_BATCHES),
        ),
        spelling=lambda v: 0 if v == 0 else v,
    )
    gradient_clip_val: float | None = key(
        1.0,
        "Bound for clipping: the largest global norm of the gradients, or their largest element "
        "with `gradient_clip_algorithm=value`. null or 0: no clipping.",
        nemo=1.0,
        group="optimizer",
        valid=or_null(at_least(0)),
    )
    max_time: int | float | str | None = length_key(
        None,
        "Time in which this start of the run saves a checkpoint and ends, with exit code 75, as "
        '"DD:HH:MM:SS", "HH:MM:SS" or seconds. The same command continues the run. `null`: no '
        "limit.",
        kind="policy",
        spec="train.max_time_seconds",
        valid=Valid('seconds above 0, "DD:HH:MM:SS", "HH:MM:SS", or null', is_interval),
        spelling=parse_interval_seconds,
    )
    step_timeout: float | None = failures_key(
        None,
        "Seconds without progress of a rank after which the run prints stack traces and ends. Set "
        "more than the longest step, validation or save takes. `null`: no limit, but in a Slurm "
        "job 20 times the longest step, and 10 minutes at least. 0: no limit.",
        spec="parallel.step_timeout_seconds",
        valid=or_null(at_least(0, 10**9)),
    )
    gradient_clip_algorithm: str = key(
        "norm",
        "`norm`: scale all gradients so that their norm is at most `gradient_clip_val`. `value`: "
        "limit each element to it.",
        group="optimizer",
        spec="optim.clip_algorithm",
        valid=one_of("norm", "value"),
        needs=needs_above("trainer.gradient_clip_val", 0),
    )
    nonfinite_policy: str = failures_key(
        "stop",
        "What happens at a NaN or infinity in loss or gradients: end the run (`stop`), skip the "
        "step (`skip`), or continue from the last checkpoint (`rollback`).",
        valid=one_of("stop", "skip", "rollback"),
    )
    max_restarts: int = failures_key(
        0,
        "How often a run is restarted from its newest checkpoint after a rank died or hung. Three "
        "starts in a row without a new checkpoint end the run. In a Slurm job: how many restarts "
        "in a row without one. With torchrun alone, use its `--max-restarts`.",
        valid=at_least(0),
    )
    fast_dev_run: bool | int = length_key(
        False,
        "Run a trial of this many steps; True is one. It validates on as many global batches, and "
        "writes neither checkpoints nor logs of trackers, in a directory of its own.",
        kind="length",
        valid=Valid("True, False or a number of steps", lambda v: v >= 0),
        spelling=int,
    )
    overfit_batches: int = length_key(
        0,
        "Train repeatedly on this many first global batches. 0: all data.",
        kind="data",
        spec="train.overfit_batches",
        valid=at_least(0),
    )
    num_sanity_val_steps: int = length_key(
        0,
        "Number of global batches that are validated before the first step, to find errors early.",
        spec="train.num_sanity_val_steps",
        valid=at_least(0),
    )
    enable_progress_bar: bool = key(
        True,
        "Show progress on a terminal in a block that is redrawn. False: print lines.",
        group="logs",
        spec="observe.progress_bar",
    )
    deterministic: bool = failures_key(
        False,
        "Let torch and cuBLAS refuse operations that have no deterministic algorithm.",
        kind="layout",
    )
    memory_snapshot_on_oom: bool = failures_key(
        False,
        "On a GPU: if memory runs out, write a snapshot of its use into the run's directory.",
        kind="logging",
        spec="profile.memory_snapshot_on_oom",
        needs=needs("trainer.accelerator", "gpu", "auto"),
    )
