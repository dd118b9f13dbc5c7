"""`exp_manager`: the directory of a run, its loggers and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from megafp8.config.keys import Valid, at_least, key, one_of, or_null
from megafp8.config.schema.accepted import PATH, is_interval


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
        200, "Steps between two checkpoints; null for none.", kind="logging",
        valid=or_null(at_least(1)),
    )  # fmt: skip
    train_time_interval: int | float | str | None = key(
        None,
        'Time between two checkpoints, in seconds or as "HH:MM:SS"; null for none.',
        kind="logging",
        valid=Valid('seconds above 0, "HH:MM:SS", "DD:HH:MM:SS", or null', is_interval),
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
    )
    monitor: str = key(
        "val_loss",
        "What ranks checkpoints: `val_loss`, or `reduced_train_loss`, the last one logged before "
        "the save.",
        nemo="val_loss",
        kind="logging",
        valid=one_of("val_loss", "reduced_train_loss"),
    )
    mode: str = key(
        "min",
        "Whether the smallest or the largest `monitor` is best.",
        nemo="min",
        kind="logging",
        valid=one_of("min", "max"),
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
