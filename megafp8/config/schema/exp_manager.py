"""Define the keys below `exp_manager` and `model.nsys_profile`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

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

    project: str | None = key(
        None,
        "Project of the run in Weights & Biases. `null`: as the environment's `WANDB_PROJECT` "
        "says, otherwise `megafp8`.",
        nemo=None,
        group="logs",
        spec="observe.wandb_project",
        valid=_PROJECT,
        needs=WANDB,
    )
    name: str | None = key(
        None,
        "Name of the run in Weights & Biases. `null`: that of the run's directory; in a sweep the "
        "sweep's, with the number of the job.",
        nemo=None,
        group="logs",
        spec="observe.wandb_name",
        needs=WANDB,
    )
    entity: str | None = key(
        None,
        "User or team of the run in Weights & Biases. `null`: the account's own.",
        group="logs",
        spec="observe.wandb_entity",
        needs=WANDB,
    )
    group: str | None = key(
        None,
        "Group of runs in Weights & Biases. `null`: none; in a sweep the name of its directory.",
        group="logs",
        spec="observe.wandb_group",
        needs=WANDB,
    )
    tags: list[str] = key(
        [],
        "Tags of the run in Weights & Biases.",
        group="logs",
        spec="observe.wandb_tags",
        needs=WANDB,
    )
    job_type: str | None = key(
        None,
        "Type of the run within its group in Weights & Biases.",
        group="logs",
        spec="observe.wandb_job_type",
        needs=WANDB,
    )
    notes: str | None = key(
        None,
        "A text about the run in Weights & Biases.",
        group="logs",
        spec="observe.wandb_notes",
        needs=WANDB,
    )
    must_start: bool = key(
        False,
        "Do not train, nor continue, unless Weights & Biases has begun to record as `mode` says. "
        "False: a lost connection costs a warning, and the run is recorded offline.",
        group="logs",
        spec="observe.wandb_must_start",
        needs=WANDB,
    )
    mode: str | None = key(
        None,
        "`online`, `offline` (upload later with `wandb sync`), or `disabled`. `null`: as the "
        "environment's `WANDB_MODE` says, otherwise `online`.",
        group="logs",
        spec="observe.wandb_mode",
        valid=or_null(one_of("online", "offline", "disabled")),
        needs=WANDB,
    )


@dataclass
class CheckpointCallback:
    """Define the keys below `exp_manager.checkpoint_callback_params`."""

    every_n_train_steps: int | None = key(
        200,
        "Steps between two checkpoints. `null`: none are written by step count.",
        group="checkpoints",
        spec="checkpoint.every_n_train_steps",
        valid=or_null(at_least(1)),
        needs=CHECKPOINTS,
    )
    train_time_interval: int | float | str | None = key(
        None,
        'Time between two checkpoints, in seconds or as "HH:MM:SS". `null`: none are written by '
        "time.",
        group="checkpoints",
        spec="checkpoint.train_time_interval_seconds",
        valid=Valid('seconds above 0, "HH:MM:SS", "DD:HH:MM:SS", or null', is_interval),
        needs=CHECKPOINTS,
        spelling=parse_interval_seconds,
    )
    save_last: bool = key(
        True,
        "Save a checkpoint at the run's last step.",
        group="checkpoints",
        spec="checkpoint.save_last",
        needs=CHECKPOINTS,
    )
    keep: int = key(
        3,
        "Number of newest checkpoints that are kept. An older one is deleted after a newer one is "
        "verified.",
        group="checkpoints",
        spec="checkpoint.keep",
        valid=at_least(1),
        needs=KEEPS_NOT_ALL,
    )
    save_top_k: int = key(
        0,
        "Number of best checkpoints, by `monitor`, that are kept besides the newest ones. 0: none. "
        "-1: all.",
        nemo=10,
        group="checkpoints",
        spec="checkpoint.save_top_k",
        valid=at_least(-1),
        needs=CHECKPOINTS,
    )
    monitor: str = key(
        "val_loss",
        "Metric by which checkpoints are ranked: `val_loss`, or `reduced_train_loss`, the last "
        "training loss logged before the save.",
        nemo="val_loss",
        group="checkpoints",
        spec="checkpoint.monitor",
        valid=one_of("val_loss", "reduced_train_loss"),
        needs=KEEPS_BEST,
    )
    mode: str = key(
        "min",
        "Whether the smallest (`min`) or the largest (`max`) value of `monitor` is best.",
        nemo="min",
        group="checkpoints",
        spec="checkpoint.mode",
        valid=one_of("min", "max"),
        needs=KEEPS_BEST,
    )
    async_save: bool = key(
        False,
        "Write periodic checkpoints in the background: training waits only for a copy of the state "
        "in host memory. Training waits for the last checkpoint, and for one on a signal.",
        nemo=False,
        group="checkpoints",
        spec="checkpoint.async_save",
        needs=CHECKPOINTS,
    )


@dataclass
class ExpManager:
    """Define the keys below `exp_manager`: the run's directory, its loggers and checkpoints."""

    exp_dir: str | None = key(
        "runs",
        "Directory in which each run makes its own directory. `null`: `runs`.",
        nemo=None,
        group="logs",
        valid=or_null(PATH),
        needs=needs("exp_manager.explicit_log_dir", None, hint="Leave one of the two out"),
        spelling=spell_exp_dir,
    )
    name: str | None = key(
        None,
        "Name of the run. A start with the same name continues the run. `null`: a start with the "
        "same configuration does.",
        nemo="megatron_gpt",
        group="logs",
        spec="observe.name",
        valid=Valid(
            "a directory's name without / and \\, or null",
            lambda name: _why_no_name(name) is None,
            why=_why_no_name,
        ),
        needs=needs("exp_manager.explicit_log_dir", None, hint="Leave one of the two out"),
    )
    explicit_log_dir: str | None = key(
        None,
        "The run's directory itself, used instead of one in `exp_dir`.",
        nemo=None,
        group="logs",
        spec="observe.explicit_log_dir",
        valid=or_null(
            Valid(
                "a folder for this run alone, and not the root of the file system, without control "
                "characters",
                _is_own_folder,
            )
        ),
    )
    resume_if_exists: bool = key(
        True,
        "Continue from the newest valid checkpoint, if the run has one.",
        nemo=True,
        group="logs",
        spec="observe.resume_if_exists",
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
    create_tensorboard_logger: bool = key(
        True,
        "Write files for TensorBoard.",
        group="logs",
        spec="observe.create_tensorboard_logger",
    )
    create_wandb_logger: bool = key(
        False,
        "Send metrics to Weights & Biases; its offline mode works too.",
        nemo=False,
        group="logs",
        spec="observe.create_wandb_logger",
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
    start_step: int = key(
        10,
        "First step that is profiled, counted from 0.",
        nemo=10,
        group="profiles",
        spec="profile.start_step",
        valid=at_least(0),
        needs=PROFILES,
    )
    end_step: int = key(
        10,
        "Last step that is profiled, counted from 0.",
        nemo=10,
        group="profiles",
        spec="profile.end_step",
        valid=at_least(0),
        needs=PROFILES,
    )
    ranks: list[int] = key(
        [0],
        "The ranks that are profiled.",
        nemo=[0],
        group="profiles",
        spec="profile.ranks",
        valid=Valid("a list of ranks, each from 0", lambda v: bool(v) and min(v) >= 0),
        needs=PROFILES,
    )
    gen_shape: bool = key(
        False,
        "Record the shapes of the operations' inputs.",
        nemo=False,
        group="profiles",
        spec="profile.gen_shape",
        needs=PROFILES,
    )
