"""Single settings: one key and one value, what is wrong with it by itself, and how it is read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from megafp8.config.errors import DEFAULT, SettingError
from megafp8.config.keys import Key
from megafp8.config.nemo import nemo_keys, nemo_sections
from megafp8.config.schema import all_keys, all_sections, schema_tree

SEE_HELP = "--help lists all keys"


@dataclass(frozen=True)
class Setting:
    """One key and its value as somebody wrote them."""

    key: str
    value: Any
    origin: str


def setting_problem(setting: Setting) -> SettingError | None:
    """Return what is wrong with one setting by itself: an unknown key, a value of another type."""
    return put_in(_scratch(), setting, merge=False)


def put_in(tree: DictConfig, setting: Setting, *, merge: bool = True) -> SettingError | None:
    """Set one setting in a tree of the schema, or return what is wrong with it by itself.

    The values of NeMo's keys that do nothing here are checked in the merged tree: they may be
    interpolations. With `merge` a dict adds to one that is there, as with Hydra.
    """
    key, nemo_key = all_keys().get(setting.key), nemo_keys().get(setting.key)
    if key is None and nemo_key is None:
        in_tree = setting.key in known_sections()
        return section_problem(setting) if in_tree else unknown_key(setting)
    if nemo_key is not None and isinstance(setting.value, dict):
        return nemo_key.problem(setting.value, setting.origin)
    try:
        OmegaConf.update(tree, setting.key, setting.value, merge=merge, force_add=key is None)
    except (OmegaConfBaseException, ValueError, OverflowError):
        assert key is not None
        reason = f"{_show(setting.value)} is not {key.type_text}"
        return SettingError(
            setting.key, setting.value, reason, f"Give {key.valid_text}", origin=setting.origin
        )
    return None


def flatten(key: str, value: Any, origin: str) -> Iterator[Setting]:
    """The leaves of a value that may be a dict of dicts. Leaves end where the schema's do."""
    if isinstance(value, dict) and (key in known_sections() or not key):
        for name, item in value.items():
            path = f"{key}.{name}" if key else str(name)
            if "." in str(name):
                path = f"{key}.[{name}]"  # one key with a dot in it, which the tree never has
            yield from flatten(path, item, origin)
    else:
        yield Setting(key, value, origin)


@cache
def known_sections() -> frozenset[str]:
    """Every inner node of the composed tree by its dotted path."""
    return all_sections() | nemo_sections()


@cache
def _scratch() -> Any:
    """A tree whose nodes take values of the right type only; what it holds does not matter."""
    return schema_tree()


# --- a tree's values ------------------------------------------------------------------------------


def read_values(
    cfg: DictConfig, origins: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[SettingError]]:
    """Return every key with its interpolations resolved, and the keys that cannot be read."""
    values: dict[str, Any] = {}
    problems: list[SettingError] = []
    for path, key in all_keys().items():
        try:
            value = read_value(cfg, path)
        except MissingMandatoryValue:
            problems.append(_missing(key, origins))
            continue
        except (OmegaConfBaseException, ValueError, OverflowError, RecursionError) as error:
            problems.append(_unreadable(key, error, origins))
            continue
        # An interpolation may bring another key's type along where the schema allows several.
        problem = None
        if is_interpolation(cfg, path):
            problem = setting_problem(Setting(path, value, _origin(path, origins)))
        if problem is None:
            values[path] = value
        else:
            problems.append(problem)
    return values, problems


def is_interpolation(cfg: DictConfig, path: str) -> bool:
    """Whether a key's value refers to others."""
    section, _, leaf = path.rpartition(".")
    node = OmegaConf.select(cfg, section) if section else cfg
    return bool(OmegaConf.is_interpolation(node, leaf))


def read_value(cfg: DictConfig, path: str) -> Any:
    """One value as plain Python, interpolations resolved; raises where it cannot be read."""
    value = OmegaConf.select(cfg, path, throw_on_missing=True)
    return OmegaConf.to_container(value, resolve=True) if _is_node(value) else value


def _missing(key: Key, origins: Mapping[str, str] | None) -> SettingError:
    hint = f"Give {key.valid_text}, or begin the YAML with `defaults: [pretrain_gpt, _self_]`"
    return SettingError(key.path, "???", "must be given", hint, origin=_origin(key.path, origins))


def _unreadable(key: Key, error: Exception, origins: Mapping[str, str] | None) -> SettingError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    hint = f"Give {key.valid_text}"
    return SettingError(key.path, None, reason, hint, origin=_origin(key.path, origins))


def _origin(key: str, origins: Mapping[str, str] | None) -> str:
    return "" if origins is None else origins.get(key, DEFAULT)


def _is_node(value: Any) -> bool:
    return bool(OmegaConf.is_config(value))


# --- unknown keys and sections --------------------------------------------------------------------


def unknown_key(setting: Setting) -> SettingError:
    """A key that the tree does not have, with those that may have been meant."""
    matches = similar_keys(setting.key)
    hint = f"Did you mean {' or '.join(matches)}?" if matches else SEE_HELP
    return SettingError(
        setting.key, setting.value, "there is no such key", hint, origin=setting.origin
    )


def similar_keys(wrong: str) -> list[str]:
    """Up to three keys that `wrong` may have meant, the likeliest first."""
    return _similar(wrong, list(all_keys())) or _similar(wrong, list(nemo_keys()))


def _similar(wrong: str, keys: list[str]) -> list[str]:
    last = wrong.rpartition(".")[2]
    same_name = [key for key in keys if key.rpartition(".")[2] == last]
    close = difflib.get_close_matches(wrong[:200], keys, n=2, cutoff=0.75)
    names = {key.rpartition(".")[2]: key for key in reversed(keys)}
    close_names = difflib.get_close_matches(last[:200], list(names), n=2, cutoff=0.75)
    close = [key for key in close if _is_close(last, key.rpartition(".")[2])]
    candidates = same_name + close + [names[name] for name in close_names]
    return list(dict.fromkeys(candidates))[:3]


def _is_close(name: str, other: str) -> bool:
    """Sections in common make long paths alike whose keys are not."""
    return difflib.SequenceMatcher(None, name[:200], other).ratio() >= 0.6


def section_problem(setting: Setting) -> SettingError:
    keys = [*all_keys(), *nemo_keys()]
    inside = [key for key in keys if key.startswith(setting.key + ".")]
    return SettingError(
        setting.key,
        setting.value,
        "is a section, not a value",
        f"Set the keys in it, as {inside[0]}=VALUE",
        origin=setting.origin,
    )


def _show(value: Any) -> str:
    text = "null" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
