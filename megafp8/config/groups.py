"""Name the groups in which the help and docs/reference/configuration.md show the settings.

scripts/configuration_groups.yaml has what the page says of each.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["model", "data", "optim", "length", "logging", "layout", "policy"]
"""Whether a setting may change when a run continues follows from its kind (`keys.FREE_KINDS`)."""


class Group(NamedTuple):
    """Describe settings that belong together; a setting names its group at its field.

    Attributes:
        title: The group's heading.
        kind: The kind of those settings of the group that name no other one.
    """

    title: str
    kind: Kind


GROUPS = {
    "length": Group("Length and validation", "logging"),
    "logs": Group("Run directory and logs", "logging"),
    "checkpoints": Group("Checkpoints", "logging"),
    "start": Group("Starting from other weights", "policy"),
    "failures": Group("Failures and reproducibility", "policy"),
    "batches": Group("Batches", "optim"),
    "ranks": Group("Ranks and parallelism", "layout"),
    "fsdp": Group("FSDP", "layout"),
    "model": Group("The model", "model"),
    "experts": Group("Mixture of experts", "model"),
    "memory": Group("Memory and speed", "layout"),
    "precision": Group("Precision without FP8", "model"),
    "fp8": Group("FP8", "model"),
    "delayed_scaling": Group("Delayed scaling", "model"),
    "health": Group("FP8 health", "logging"),
    "backends": Group("Backends", "layout"),
    "data": Group("Data and tokenizer", "data"),
    "finetuning": Group("Fine-tuning", "data"),
    "optimizer": Group("Optimizer", "optim"),
    "fp8_lm": Group("States in low precision (FP8-LM)", "layout"),
    "schedule": Group("Learning rate", "optim"),
    "profiles": Group("Profiles", "logging"),
}
"""The groups by the names that fields of the schema give, in the order of the pages."""
