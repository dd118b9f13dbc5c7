"""Read the table of NeMo's keys that have no effect in megafp8: nemo_inert.yaml.

Such a key is *inert*: with an accepted value, mostly NeMo's default, it is named at the start of
the run and changes nothing. Any other value is refused with the reason and a hint. The keys that
have an effect are in the schema.

An entry of the table has `keys` of one kind with NeMo's defaults. Its other fields are those of
`NemoKey`, with names for what is computed: `accepts` if NeMo's default is not the only value that
is accepted; `free` a type of `FREE`; `where` a function of `WHERE`; `same_as` a key or a function
of `COMPUTED`. `why` and `hint` are given if there is more to say than that the key has no effect
and can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megafp8.config.errors import Origin, SettingError
from megafp8.config.gelu import can_fuse
from megafp8.config.keys import Values
from megafp8.config.values import plain

TABLE = Path(__file__).with_name("nemo_inert.yaml")


@dataclass(frozen=True, kw_only=True)
class NemoKey:
    """Describe a key of NeMo that has no effect in megafp8.

    Attributes:
        path: The dotted path.
        nemo: The default as NeMo's file has it.
        accepts: The values that are accepted; the first one describes what megafp8 does.
        why: Why any other value is refused; it follows `key=value (origin): ` in the message.
        hint: What to do instead of giving another value.
        note: What megafp8 does.
        same_as: Computes one more value that is accepted from the keys that have an effect.
        free: The values that are accepted besides, by their type; None if there are none.
        where: Whether a further value is accepted with the keys that have an effect.
        in_megatron_gpt_config: Whether NeMo's `megatron_gpt_config.yaml` has the key.
    """

    path: str
    nemo: Any
    accepts: tuple[Any, ...]
    why: str
    hint: str
    note: str
    same_as: Callable[[Values], Any] | None = None
    free: Free | None = None
    where: Callable[[Any, Values], bool] | None = None
    in_megatron_gpt_config: bool = True

    @property
    def ours(self) -> Any:
        """Return the value in the composed tree if no layer gives one."""
        return self.accepts[0]

    @property
    def passes_map(self) -> bool:
        """Whether the key accepts a section of any keys."""
        return self.free is ANY_MAP

    def passes(self, value: Any, values: Values) -> bool:
        """Whether a value is accepted, since megafp8 does what the value asks for anyway."""
        if self.free is not None and self.free.accepts(value):
            return True
        if any(_same(value, good) for good in self.accepts):
            return True
        try:
            if self.where is not None and self.where(value, values):
                return True
            return self.same_as is not None and _same(value, self.same_as(values))
        except (KeyError, ZeroDivisionError):
            return True  # a key that the value is computed from is refused already

    def problem(self, value: Any, origin: str) -> SettingError:
        """Return the error for a value that is not accepted."""
        return SettingError(
            self.path, "null" if value is None else value, self.why, self.hint, origin=origin
        )


class Free(NamedTuple):
    """Name the values of one type, as `any text`."""

    text: str
    accepts: Callable[[Any], bool]


ANY_MAP = Free("null or any section", lambda value: value is None or isinstance(value, dict))
FREE = {
    "text": Free("any text", lambda value: value is None or isinstance(value, str)),
    "text_but_falcon": Free(
        "any text but `megatron_falcon_gpt`",
        lambda value: value is None or (isinstance(value, str) and value != "megatron_falcon_gpt"),
    ),
    "number": Free(
        "any number",
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    ),
    "flag": Free("True or False", lambda value: isinstance(value, bool)),
    "section": ANY_MAP,
    "texts": Free(
        "any list of texts",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
}
"""What `free` of the table may name."""


def _same(value: Any, good: Any) -> bool:
    """Whether two values mean the same: 1.0 and 1 do; 0 and False, or "1" and 1, do not."""
    if isinstance(value, bool) or isinstance(good, bool):
        return value is good
    return bool(value == good)


COMPUTED: dict[str, Callable[[Values], Any]] = {
    "model_ranks": lambda v: (
        v["model.tensor_model_parallel_size"] * v["model.pipeline_model_parallel_size"]
    ),
    "layers_but_one": lambda v: v["model.num_layers"] - 1,
}
WHERE: dict[str, Callable[[Any, Values], bool]] = {
    "can_fuse": can_fuse,
    "without_experts": lambda value, v: (
        v["model.num_moe_experts"] is None and not isinstance(value, (list, dict))
    ),
}
_BY_NAME: dict[str, Mapping[str, Any]] = {"free": FREE, "where": WHERE}


def _key(path: str, nemo: Any, *, note: str, why: str = "", **said: Any) -> NemoKey:
    """Return the description of one key from what the table says of it."""
    said["accepts"] = tuple(said.get("accepts", (nemo,)))
    if "same_as" in said:  # the name of a function, or a key
        said["same_as"] = COMPUTED.get(said["same_as"]) or itemgetter(said["same_as"])
    said |= {name: known[said[name]] for name, known in _BY_NAME.items() if name in said}
    said.setdefault("hint", f"Leave it out, or give {path}={plain(said['accepts'][0])}")
    reason = f"{why}; {note}" if why else f"is not supported: {note}"
    return NemoKey(path=path, nemo=nemo, why=reason, note=note, **said)


def read_table() -> list[dict[str, Any]]:
    """Return the parts of the table, each with its entries."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return list(yaml.load_all(TABLE.read_text(encoding="utf-8"), Loader=loader))


@cache
def nemo_keys() -> Mapping[str, NemoKey]:
    """Return every key of NeMo that has no effect, by its dotted path, in the table's order."""
    keys = {}
    for part in read_table():
        in_file = part["in_megatron_gpt_config"]
        for entry in part["entries"]:
            for path, nemo in entry.pop("keys").items():
                keys[path] = _key(path, nemo, in_megatron_gpt_config=in_file, **entry)
    return keys


def nemos_file(origins: Mapping[str, Origin]) -> Origin | None:
    """Return the weakest layer that is a file of NeMo; None if there is none.

    A file that builds on the default job is ours. So is one without any key that only NeMo has,
    such as the settings that a run has recorded.
    """
    layers = [origin for key, origin in origins.items() if origin.is_nemos and key in nemo_keys()]
    return min(layers, key=lambda origin: origin.strength, default=None)


@cache
def nemo_sections() -> frozenset[str]:
    """Return every section that contains such keys: `model`, `model.nsys_profile`, …"""
    parts = [path.split(".") for path in nemo_keys()]
    return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))
