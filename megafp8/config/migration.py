"""Another framework's configuration file becomes one of ours: what is kept, and what is not."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from omegaconf.errors import OmegaConfBaseException

from megafp8.config.compose import tree_with_nemo_keys
from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import Setting, flatten, put_in, setting_problem
from megafp8.config.problems import SettingError
from megafp8.config.schema import all_keys
from megafp8.config.validate import check_values, read_value, read_values
from megafp8.config.values import plain

_KEPT_AS_THEY_ARE = ("defaults", "hydra")
_NAME = re.compile(r"[\w.]+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


@dataclass
class Migration:
    """What came of a file. `out` is the new file's tree; the lists are lines of the report."""

    out: dict[str, Any] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    inert: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)

    def change(self, old: str, value: Any, new: dict[str, Any], note: str = "") -> None:
        """`old` means `new` here."""
        for path, item in new.items():
            set_in(self.out, path, item)
        text = ", ".join(f"{path}={plain(item)}" for path, item in new.items())
        self.changes.append(f"{old}: {plain(value)} -> {text}" + (f" ({note})" if note else ""))

    def drop(self, key: str, value: Any, reason: str) -> None:
        self.inert.append(f"{key}: {plain(value)}: {reason}")

    def decide(self, key: str, value: Any, reason: str, way_out: str) -> None:
        self.undecided.append(f"{key}: {plain(value)}: {reason}. {way_out}")

    def report(self) -> str:
        """What the command says on stdout."""
        parts = (
            ("must be decided", self.undecided),
            ("changed", self.changes),
            ("dropped as inert", self.inert),
            ("kept", self.kept),
        )
        lines = []
        for title, items in parts:
            lines.append(f"{title}: {len(items) or 'nothing'}")
            lines += [f"  {item}" for item in items]
        return "\n".join(lines) + "\n"

    def text(self, source: str) -> str:
        """The new file. What must be decided is in its head, and is refused until it is."""
        lines = [f"# Made from {source} by `python -m megafp8.cli.migrate`."]
        if self.undecided:
            lines.append("# Must be decided before it runs:")
            lines += [f"#   {_printable(item)}" for item in self.undecided]
        body = yaml.safe_dump(self.out, sort_keys=False, allow_unicode=True, width=96)
        return "\n".join(lines) + "\n\n" + str(body)


def migrate(text: str, source: str) -> Migration:
    """Read a NeMo or Accelerate file; raises `SettingError` if it is no such file."""
    from megafp8.config import accelerate

    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = str(error).replace("\n", " ")[:200]
        raise SettingError(source, None, f"is no YAML: {line}", "Mend the file") from error
    if not isinstance(tree, dict) or not tree:
        raise SettingError(source, None, "holds no settings", "Give a NeMo or Accelerate YAML")
    migration = Migration()
    if any(mark in tree for mark in accelerate.MARKS):
        accelerate.translate(tree, migration)
        _check_written(migration)
    else:
        _from_nemo(tree, migration)
    return migration


def write_beside(file: Path, text: str, output: Path | None) -> Path:
    """Write `text` to `output`, or to `NAME.megafp8.yaml` beside `file`. Never overwrites."""
    target = output or file.with_name(f"{file.stem}.megafp8.yaml")
    try:
        with target.open("x") as stream:
            stream.write(text)
    except FileExistsError:
        raise SettingError(
            str(target), None, "exists already", "Remove it, or name another file with -o"
        ) from None
    except OSError as error:
        raise SettingError(
            str(target), None, f"cannot be written ({error.strerror})", "Name another with -o"
        ) from error
    return target


def _from_nemo(tree: dict[Any, Any], m: Migration) -> None:
    m.out |= {name: tree[name] for name in _KEPT_AS_THEY_ARE if name in tree}
    ours = {str(name): item for name, item in tree.items() if name not in _KEPT_AS_THEY_ARE}
    settings = [_with_number(setting, m) for setting in flatten("", ours, "")]
    whole = tree_with_nemo_keys()
    wrong: dict[str, SettingError] = {}
    for setting in settings:
        problem = setting_problem(setting) or put_in(whole, setting)
        if problem is not None:
            wrong.setdefault(setting.key, problem)
    given = {setting.key for setting in settings}
    values, unreadable = read_values(whole)
    values = {key: value for key, value in values.items() if key in given}
    origins = dict.fromkeys(given, "file")
    problems = [*unreadable, *check_values(values, origins), *_nemo_problems(whole, values, given)]
    for problem in problems:
        if problem.key in given:
            wrong.setdefault(problem.key, problem)
    for setting in settings:
        problem = wrong.get(setting.key)
        if problem is not None:
            set_in(m.out, setting.key, setting.value)
            m.decide(setting.key, setting.value, problem.reason, problem.way_out)
        elif setting.key in nemo_keys():
            if _is_referred_to(setting.key, settings):
                set_in(m.out, setting.key, setting.value)
                m.kept.append(f"{setting.key}: {plain(setting.value)} (others refer to it)")
            else:
                m.drop(setting.key, setting.value, nemo_keys()[setting.key].note)
        else:
            set_in(m.out, setting.key, setting.value)
            m.kept.append(f"{setting.key}: {plain(setting.value)}")
    if "defaults" not in tree:
        for path, key in all_keys().items():
            if key.required and path not in given:
                m.decide(path, "???", "must be given", f"Give {key.valid_text}")


def _nemo_problems(whole: Any, values: dict[str, Any], given: set[str]) -> list[SettingError]:
    found = []
    for path, key in nemo_keys().items():
        if path not in given:
            continue
        try:
            value = read_value(whole, path)
        except (OmegaConfBaseException, ValueError, OverflowError, RecursionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            found.append(SettingError(path, None, reason, key.way_out))
            continue
        if not key.passes(value, values):
            found.append(key.problem(value, ""))
    return found


def _check_written(m: Migration) -> None:
    """What was translated must hold here too: sizes of a history, names of an algorithm."""
    written = {s.key: s for s in flatten("", m.out, "") if s.key in all_keys()}
    problems = [problem for s in written.values() if (problem := setting_problem(s))]
    bad = {problem.key for problem in problems}
    values = {s.key: s.value for s in written.values() if s.key not in bad}
    for problem in [*problems, *check_values(values)]:
        m.decide(problem.key, problem.value, problem.reason, problem.way_out)


def _with_number(setting: Setting, m: Migration) -> Setting:
    """NeMo's files have `1e-5`, which YAML 1.1 reads as a text."""
    key, value = all_keys().get(setting.key), setting.value
    if key is None or key.type_text.removesuffix(", or null") != "a number":
        return setting
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return setting
    return Setting(setting.key, float(value), setting.origin)


def _is_referred_to(path: str, settings: list[Setting]) -> bool:
    """Whether a setting that stays refers to `path`, which then stays too."""
    ending = "." + path.rpartition(".")[2]
    live = (s.value for s in settings if s.key in all_keys())
    names = (name for value in live if "${" in str(value) for name in _NAME.findall(str(value)))
    return any(name == path or (name[0] == "." and name.endswith(ending)) for name in names)


def _printable(text: str) -> str:
    """One line that YAML takes in a comment."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def set_in(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, leaf = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[leaf] = value


def get_in(tree: dict[str, Any], path: str) -> Any:
    node: Any = tree
    for name in path.split("."):
        node = node[name]
    return node
