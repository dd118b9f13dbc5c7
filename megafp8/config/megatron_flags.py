"""Read the table of Megatron's training settings: megatron_flags.yaml.

A setting has its name in Megatron's configuration (`num_layers`), which is also that of the field
in Megatron Bridge, and a flag (`--num-layers`). The table says what each is here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("megatron_flags.yaml")
NONE = object()
"""Stands for a default that Megatron's parser does not have."""


@dataclass(frozen=True)
class Passed:
    """Describe a setting whose value a key of ours takes.

    Attributes:
        key: Our key.
        default: The value if a script leaves the setting out; `NONE` if our default means the same.
        is_switch: Whether the setting is True or False, so that its flag has no value.
        inverted: Whether our key says the opposite.
    """

    key: str
    default: Any = NONE
    is_switch: bool = False
    inverted: bool = False

    def ours(self, value: Any) -> Any:
        """Return the value of our key."""
        return (not value) if self.inverted else value


@dataclass(frozen=True)
class Refused:
    """Describe settings that are refused unless they have a value of `accepts`.

    The value of the setting `same_as` passes, too. `changes_model` says that no model of this kind
    can be trained here; else a user can decide to train without the setting.
    """

    reason: str
    hint: str
    accepts: tuple[Any, ...]
    changes_model: bool = False
    same_as: str = ""

    def passes(self, value: Any) -> bool:
        """Whether the value asks for nothing that is not done anyway."""
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        return any(type(one) is type(good) and one == good for good in self.accepts)


@dataclass(frozen=True)
class Inert:
    """Describe settings that change no number here: some, if a model is `without` a setting."""

    note: str
    without: str | None = None


@dataclass(frozen=True)
class Flags:
    """Hold the table: settings by their names, and groups of settings by patterns of names.

    `together` has the key of ours that comes next to a name's meaning.
    """

    version: str
    passed: Mapping[str, Passed]
    together: Mapping[str, str]
    groups: tuple[tuple[str, Inert | Refused], ...]
    names_of_flags: Mapping[str, str]
    _groups_of: dict[str, Inert | Refused | None] = field(default_factory=dict, compare=False)

    def group(self, name: str) -> Inert | Refused | None:
        """Return what the table says of a name that no key takes; None if it is not known."""
        if name not in self._groups_of:  # a script is asked for the same names again and again
            entries = (about for pattern, about in self.groups if fnmatchcase(name, pattern))
            self._groups_of[name] = next(entries, None)
        return self._groups_of[name]

    def is_known(self, name: str) -> bool:
        """Whether the table has a name."""
        return name in self.passed or name in self.together or self.group(name) is not None

    def is_listed(self, name: str) -> bool:
        """Whether the table has a name itself, and not only a pattern that it fits."""
        return name in {*self.passed, *self.together, *(pattern for pattern, _ in self.groups)}

    def in_our_words(self, name: str) -> tuple[str, str] | None:
        """Return what is wrong with a name as a key here, and a hint; None if it is not known."""
        row, group = self.passed.get(name), self.group(name)
        if row is not None:
            other = "the opposite of " if row.inverted else ""
            return f"is a name of Megatron's for {other}{row.key}", f"Give {row.key}"
        if name in self.together:
            key = self.together[name]
            hint = f"megafp8 pretrain --help {key} explains ours, megafp8 migrate translates theirs"
            return f"is a name of Megatron's for what {key} says here", hint
        if isinstance(group, Refused):
            return f"is a name of Megatron's without an equivalent here; {group.reason}", group.hint
        if isinstance(group, Inert):
            return f"is a name of Megatron's without an effect here; {group.note}", "Leave it out"
        return None

    def of_flag(self, flag: str) -> tuple[str, bool]:
        """Return a flag's name, and the value that it stands for if none follows it.

        Args:
            flag: The flag without its dashes, as `no-bias-gelu-fusion`.
        """
        if flag in self.names_of_flags:
            name = self.names_of_flags[flag]
            return name, not re.match("no-|disable-|torch-fsdp2-no-|muon-no-", flag)
        plain = flag.replace("-", "_")
        for prefix in ("no_", "disable_"):
            positive = plain.removeprefix(prefix)
            if positive != plain and not self.is_known(plain) and self.is_known(positive):
                return positive, False
        return plain, True


_OTHER_FLAGS = {
    "fp8-format": "fp8", "fp4-format": "fp4", "persistent-save-interval": "save_interval",
    "no-overlap-p2p-communication": "overlap_p2p_comm",
    "overlap-p2p-communication-warmup-flush": "overlap_p2p_comm_warmup_flush",
    "use-nccl-ub": "nccl_ub", "no-initialization": "perform_initialization",
    "override-opt_param-scheduler": "override_opt_param_scheduler",
    "use-checkpoint-opt_param-scheduler": "use_checkpoint_opt_param_scheduler",
    "disable-gloo-process-groups": "use_gloo_process_groups",
    "no-position-embedding": "add_position_embedding", "no-rope-fusion": "apply_rope_fusion",
    "no-barrier-with-level-1-timing": "barrier_with_L1_time", "no-one-logger": "enable_one_logger",
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "disable-msc": "disable_msc_deprecated", "output-logit-dtype": "logit_dtype",
    "torch-fsdp2-no-reshard-after-forward": "torch_fsdp2_reshard_after_forward",
    "muon-no-split-qkv": "muon_split_qkv",
    "disable-mamba-mem-eff-path": "use_mamba_mem_eff_path", "use-mcore-models": "use_mcore_models",
}  # fmt: skip
"""Flags whose names are not those of their settings, beside those of the table."""


@cache
def megatron_flags() -> Flags:
    """Return the table."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    passed, names = {}, dict(_OTHER_FLAGS)
    for part in ("keys", "switches"):
        for name, row in table[part].items():
            names |= {row["flag"]: name} if "flag" in row else {}
            fields = {key: value for key, value in row.items() if key != "flag"}
            passed[name] = Passed(**{"default": NONE, **fields}, is_switch=part == "switches")
    groups: list[tuple[str, Inert | Refused]] = []
    for row in table["refused"]:
        refused = Refused(
            row["reason"], row["hint"], tuple(row["accepts"]), row.get("changes_model", False),
            row.get("same_as", ""),
        )  # fmt: skip
        groups += [(name, refused) for name in row["names"]]
    for row in table["inert"]:
        groups += [(name, Inert(row["note"], row.get("without"))) for name in row["names"]]
    together = {name: key for key, names in table["together"].items() for name in names}
    return Flags(table["version"], passed, together, tuple(groups), names)
