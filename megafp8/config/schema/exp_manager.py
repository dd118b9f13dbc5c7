"""`exp_manager`: the directory of a run, its loggers and its checkpoints; `model.nsys_profile`."""

from __future__ import annotations

from dataclasses import dataclass, field

from megafp8.config.keys import PATH, Need, Valid, at_least, key, needs, one_of, or_null
from megafp8.config.values import is_interval, parse_interval_seconds, spell_exp_dir

_BEST = "exp_manager.checkpoint_callback_params.save_top_k"
CHECKPOINTS = needs("exp_manager.create_checkpoint_callback", True)
KEEPS_BEST = Need(_BEST, f"{_BEST} other than 0", lambda v: v[_BEST] != 0)
PROFILES = needs("model.nsys_profile.enabled", True)


def _is_directory_name(value: str | None) -> bool:
    return value is None or (value not in ("", ".", "..") and not set(value) & set("/\\\0"))


@dataclass
class WandbLogger:
    """Where Weights & Biases puts the run."""

    project: str | None = key(None, "Weights & Biases project.", nemo=None, kind="logging")
    name: str | None = key(None, "Weights & Biases name of the run.", nemo=None, kind="logging")


@dataclass
class CheckpointCallback:
    """When checkpoints are written."""

    every_n_train_steps: int | None = key(
        200,
        "Steps between two checkpoints; null for none.",
        kind="logging",
        valid=or_null(at_least(1)),
        needs=CHECKPOINTS,
    )
    train_time_interval: int | float | str | None = key(
        None,
        'Time between two checkpoints, in seconds or as "HH:MM:SS"; null for none.',
        kind="logging",
        valid=Valid('seconds above 0, "HH:MM:SS", "DD:HH:MM:SS", or null', is_interval),
        needs=CHECKPOINTS,
        spelling=parse_interval_seconds,
    )
    save_last: bool = key(True, "Save the last step of the run.", kind="logging")
    keep: int = key(
        3,
        "Newest checkpoints kept; older ones go once a newer one is verified.",
        kind="logging",
        valid=at_least(1),
    )
    save_top_k: int = key(
        0,
        "Best checkpoints kept besides the newest `keep`, by `monitor`; -1 keeps all.",
        nemo=10,
        kind="logging",
        valid=at_least(-1),
        needs=CHECKPOINTS,
    )
    monitor: str = key(
        "val_loss",
        "What ranks checkpoints: `val_loss`, or `reduced_train_loss`, the last one logged before "
        "the save.",
        nemo="val_loss",
        kind="logging",
        valid=one_of("val_loss", "reduced_train_loss"),
        needs=KEEPS_BEST,
    )
    mode: str = key(
        "min",
        "Whether the smallest or the largest `monitor` is best.",
        nemo="min",
        kind="logging",
        valid=one_of("min", "max"),
        needs=KEEPS_BEST,
    )
    async_save: bool = key(
        False,
        "Write periodic checkpoints while training goes on: a step stands still only for a copy of "
        "the state in host memory. The last one and a signal's are waited for.",
        nemo=False,
        kind="logging",
        needs=CHECKPOINTS,
    )


@dataclass
class ExpManager:
    """The directory of a run, its loggers and its checkpoints."""

    exp_dir: str | None = key(
        "runs",
        "Directory in which runs get their own directories; null for `runs`.",
        nemo=None,
        kind="logging",
        valid=or_null(PATH),
        needs=needs("exp_manager.explicit_log_dir", None, hint="Leave one of the two out"),
        spelling=spell_exp_dir,
    )
    name: str | None = key(
        None,
        "Name of the run: the same name continues it. Without one, the same configuration does.",
        nemo="megatron_gpt",
        kind="logging",
        valid=Valid("a directory's name without / and \\, or null", _is_directory_name),
    )
    explicit_log_dir: str | None = key(
        None,
        "Exactly this directory instead of one in `exp_dir`.",
        nemo=None,
        kind="logging",
        valid=or_null(PATH),
    )
    resume_if_exists: bool = key(
        True, "Continue from the newest good checkpoint.", nemo=True, kind="logging"
    )
    resume_from_checkpoint: str | None = key(
        "${model.resume_from_checkpoint}",
        "The same as `model.resume_from_checkpoint`: either is enough.",
        nemo="${model.resume_from_checkpoint}",
        kind="policy",
        valid=or_null(PATH),
    )
    create_checkpoint_callback: bool = key(
        True,
        "Write checkpoints while training; without it only a signal does.",
        nemo=True,
        kind="logging",
    )
    create_tensorboard_logger: bool = key(True, "Write TensorBoard files.", kind="logging")
    create_wandb_logger: bool = key(
        False, "Write to Weights & Biases (offline works).", nemo=False, kind="logging"
    )
    wandb_logger_kwargs: WandbLogger = field(default_factory=WandbLogger)
    checkpoint_callback_params: CheckpointCallback = field(default_factory=CheckpointCallback)


@dataclass
class NsysProfile:
    """A profile of some steps: NVTX ranges for Nsight Systems, a Chrome trace without CUDA."""

    enabled: bool = key(
        False, "Profile the steps from `start_step` to `end_step`.", nemo=False, kind="logging"
    )
    start_step: int = key(
        10,
        "First step that is profiled, counted from 0.",
        nemo=10,
        kind="logging",
        valid=at_least(0),
        needs=PROFILES,
    )
    end_step: int = key(
        10,
        "Last step that is profiled, counted from 0.",
        nemo=10,
        kind="logging",
        valid=at_least(0),
        needs=PROFILES,
    )
    ranks: list[int] = key(
        [0],
        "Ranks that are profiled.",
        nemo=[0],
        kind="logging",
        valid=Valid("a list of ranks, each from 0", lambda v: bool(v) and min(v) >= 0),
        needs=PROFILES,
    )
    gen_shape: bool = key(
        False,
        "Record the shapes of operations' inputs.",
        nemo=False,
        kind="logging",
        needs=PROFILES,
    )
