"""Define the keys below `exp_manager` and `model.nsys_profile`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial

from megafp8.config.keys import PATH, Need, Valid, at_least, key, needs, one_of, or_null
from megafp8.config.values import is_interval, parse_interval_seconds, spell_exp_dir, why_no_name

_BEST = "exp_manager.checkpoint_callback_params.save_top_k"
CHECKPOINTS = needs("exp_manager.create_checkpoint_callback", True)
KEEPS_BEST = Need(_BEST, f"{_BEST} above 0", lambda v: v[_BEST] > 0)
KEEPS_NOT_ALL = Need(
    _BEST, f"{_BEST} other than -1", lambda v: v[_BEST] != -1, "Leave one of the two out"
)
WANDB = needs("exp_manager.create_wandb_logger", True)
PROFILES = needs("model.nsys_profile.enabled", True)

# Makers of the keys of a group, with what most of these keys have in common.
logs_key = partial(key, group="logs", spec="observe.*")
wandb_key = partial(key, group="logs", needs=WANDB, spec="observe.wandb_*")
checkpoints_key = partial(key, group="checkpoints", needs=CHECKPOINTS, spec="checkpoint.*")
profiles_key = partial(key, group="profiles", needs=PROFILES, spec="profile.*")


_PROJECT = Valid(
    "a text of at most 128 letters without / \\ # ? % and :, or null",
    lambda value: value is None or (0 < len(value) <= 128 and not set(value) & set("/\\#?%:")),
)
"""The names of projects that Weights & Biases takes."""


def _why_no_name(value: str | None) -> str | None:
    return None if value is None else why_no_name(value)


def _is_folder(value: str) -> bool:
    return bool(value) and value.isprintable()


def _is_own_folder(value: str) -> bool:
    """Whether a path can be that of one run; the root of the file system holds everything else."""
    return _is_folder(value) and os.path.normpath(value).strip("/") != ""


@dataclass
class WandbLogger:
    """Define the keys below `exp_manager.wandb_logger_kwargs`."""

    project: str | None = wandb_key(
        None,
        "Project of the run in Weights & Biases. `null`: as the environment's `WANDB_PROJECT` "
        "says, otherwise `megafp8`.",
        nemo=None,
        valid=_PROJECT,
    )
    name: str | None = wandb_key(
        None,
        "Name of the run in Weights & Biases. `null`: that of the run's directory; in a sweep the "
        "sweep's, with the number of the job.",
        nemo=None,
    )
    entity: str | None = wandb_key(
        None,
        "User or team of the run in Weights & Biases. `null`: the account's own.",
    )
    group: str | None = wandb_key(
        None,
        "Group of runs in Weights & Biases. `null`: none; in a sweep the name of its directory.",
    )
    tags: list[str] = wandb_key(
        [],
        "Tags of the run in Weights & Biases.",
    )
    job_type: str | None = wandb_key(
        None,
        "Type of the run within its group in Weights & Biases.",
    )
    notes: str | None = wandb_key(
        None,
        "A text about the run in Weights & Biases.",
    )
    must_start: bool = wandb_key(
        False,
        "Do not train, nor continue, unless Weights & Biases has begun to record as `mode` says. "
        "False: a lost connection costs a warning, and the run is recorded offline.",
    )
    mode: str | None = wandb_key(
        None,
        "`online`, `offline` (upload later with `wandb sync`), or `disabled`. `null`: as the "
        "environment's `WANDB_MODE` says, otherwise `online`.",
        valid=or_null(one_of("online", "offline", "disabled")),
    )


@dataclass
class CheckpointCallback:
    """Define the keys below `exp_manager.checkpoint_callback_params`."""

    every_n_train_steps: int | None = checkpoints_key(
        200,
        "Steps between two checkpoints. `null`: none are written by step count.",
        valid=or_null(at_least(1)),
    )
    train_time_interval: int | float | str | None = checkpoints_key(
        None,
        'Time between two checkpoints, in seconds or as "HH:MM:SS". `null`: none are written by '
        "time.",
        spec="checkpoint.train_time_interval_seconds",
        valid=Valid('seconds above 0, "HH:MM:SS", "DD:HH:MM:SS", or null', is_interval),
        spelling=parse_interval_seconds,
    )
    save_last: bool = checkpoints_key(
        True,
        "Save a checkpoint at the run's last step.",
    )
    keep: int = checkpoints_key(
        3,
        "Number of newest checkpoints that are kept. An older one is deleted after a newer one is "
        "verified.",
        valid=at_least(1),
        needs=KEEPS_NOT_ALL,
    )
    save_top_k: int = checkpoints_key(
        0,
        "Number of best checkpoints, by `monitor`, that are kept besides the newest ones. 0: none. "
        "-1: all.",
        nemo=10,
        valid=at_least(-1),
    )
    monitor: str = checkpoints_key(
        "val_loss",
        "Metric by which checkpoints are ranked: `val_loss`, or `reduced_train_loss`, the last "
        "training loss logged before the save.",
        nemo="val_loss",
        valid=one_of("val_loss", "reduced_train_loss"),
        needs=KEEPS_BEST,
    )
    mode: str = checkpoints_key(
        "min",
        "Whether the smallest (`min`) or the largest (`max`) value of `monitor` is best.",
        nemo="min",
        valid=one_of("min", "max"),
        needs=KEEPS_BEST,
    )
    async_save: bool = checkpoints_key(
        False,
        "Write periodic checkpoints in the background: training waits only for a copy of the state "
        "in host memory. Training waits for the last checkpoint, and for one on a signal.",
        nemo=False,
    )


@dataclass
class ExpManager:
    """Define the keys below `exp_manager`: the run's directory, its loggers and checkpoints."""

    exp_dir: str | None = logs_key(
        "runs",
        "Directory in which each run makes its own directory. `null`: `runs`.",
        nemo=None,
        valid=or_null(PATH),
        needs=needs("exp_manager.explicit_log_dir", None, hint="Leave one of the two out"),
        spelling=spell_exp_dir,
        spec=None,
    )
    name: str | None = logs_key(
        None,
        "Name of the run. A start with the same name continues the run. `null`: a start with the "
        "same configuration does.",
        nemo="megatron_gpt",
        valid=Valid(
            "a directory's name without / and \\, or null",
            lambda name: _why_no_name(name) is None,
            why=_why_no_name,
        ),
        needs=needs("exp_manager.explicit_log_dir", None, hint="Leave one of the two out"),
    )
    explicit_log_dir: str | None = logs_key(
        None,
        "The run's directory itself, used instead of one in `exp_dir`.",
        nemo=None,
        valid=or_null(
            Valid(
                "a folder for this run alone, and not the root of the file system, without control "
                "characters",
                _is_own_folder,
            )
        ),
    )
    resume_if_exists: bool = logs_key(
        True,
        "Continue from the newest valid checkpoint, if the run has one.",
        nemo=True,
    )
    resume_from_checkpoint: str | None = key(
        "${model.resume_from_checkpoint}",
        "The same as `model.resume_from_checkpoint`; give one of the two.",
        nemo="${model.resume_from_checkpoint}",
        group="start",
        valid=or_null(PATH),
    )
    create_checkpoint_callback: bool = key(
        True,
        "Write checkpoints during training. False: a checkpoint is written only on a signal.",
        nemo=True,
        group="checkpoints",
    )
    create_tensorboard_logger: bool = logs_key(
        True,
        "Write files for TensorBoard.",
    )
    create_wandb_logger: bool = logs_key(
        False,
        "Send metrics to Weights & Biases; its offline mode works too.",
        nemo=False,
    )
    wandb_logger_kwargs: WandbLogger = field(default_factory=WandbLogger)
    checkpoint_callback_params: CheckpointCallback = field(default_factory=CheckpointCallback)


@dataclass
class NsysProfile:
    """Define the keys below `model.nsys_profile`.

    A profile has NVTX ranges for Nsight Systems, or is a Chrome trace on a CPU.
    """

    enabled: bool = key(
        False,
        "Profile the steps from `start_step` to `end_step`.",
        nemo=False,
        group="profiles",
        spec="profile.enabled",
    )
    start_step: int = profiles_key(
        10,
        "First step that is profiled, counted from 0.",
        nemo=10,
        valid=at_least(0),
    )
    end_step: int = profiles_key(
        10,
        "Last step that is profiled, counted from 0.",
        nemo=10,
        valid=at_least(0),
    )
    ranks: list[int] = profiles_key(
        [0],
        "The ranks that are profiled.",
        nemo=[0],
        valid=Valid("a list of ranks, each from 0", lambda v: bool(v) and min(v) >= 0),
    )
    gen_shape: bool = profiles_key(
        False,
        "Record the shapes of the operations' inputs.",
        nemo=False,
    )
