"""Hold and write the result of a migration: the new file, and the report about its keys."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from megafp8.config.api import (
    UNDECIDED,
    SettingError,
    all_keys,
    check_values,
    flatten,
    plain,
    put_in,
    read_value,
    schema_tree,
    unmet_need,
    unused,
)
from megafp8.secrets import redacted


@dataclass
class Migration:
    """Collect the result of a migration.

    Attributes:
        out: The tree of the new file.
        kept: Lines of the report about the keys that are unchanged.
        inert: Lines about the keys that are dropped, since they have no effect.
        changes: Lines about the keys that are translated.
        renamed: Lines about those whose value is the same below another name.
        undecided: Lines about the keys that the user must decide.
        assumed: Lines about what the file leaves out and another program's default says, by the
            name of the setting or of our key.
        slurm_options: What the old script asks of Slurm and the new job's command has too.
    """

    out: dict[str, Any] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    inert: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    assumed: dict[str, str] = field(default_factory=dict)
    slurm_options: list[str] = field(default_factory=list)

    @property
    def translated(self) -> list[str]:
        """Return all lines about settings of the old file that the new one has."""
        return [*self.changes, *self.renamed, *self.kept]

    def change(self, old: str, value: Any, new: dict[str, Any], note: str = "") -> None:
        """Record that `old: value` is translated into the settings `new`."""
        for path, item in new.items():
            set_in(self.out, path, item)
        text = ", ".join(f"{path}={plain(item)}" for path, item in new.items())
        lines = self.changes
        if not note and len(new) == 1 and _is_same(value, *new.values()):
            lines = self.kept if _last_name(old) == _last_name(*new) else self.renamed
        lines.append(f"{old}: {plain(value)} -> {text}" + (f" ({note})" if note else ""))

    def assume(self, key: str, value: Any, source: str) -> None:
        """Record that our key has the default that `source` has for what the file leaves out."""
        set_in(self.out, key, value)
        self.assumed[key] = f"{key}={plain(value)} ({source})"

    def drop(self, key: str, value: Any, reason: str) -> None:
        """Record that a key is dropped, since it has no effect for `reason`."""
        self.inert.append(f"{key}: {_shown(value, key)}: {reason}")

    def decide(self, key: str, value: Any, reason: str, hint: str) -> None:
        """Record that the user must decide about a key, which the new file does not have."""
        self.undecided.append(f"{key}: {_shown(value, key)}: {reason}. {hint}")

    def report(self) -> str:
        """Return the report that the command prints."""
        parts = (
            ("must be decided", self.undecided),
            ("changed", self.changes),
            ("renamed", self.renamed),
            ("assumed", list(self.assumed.values())),
            ("dropped as inert", self.inert),
            ("kept as they are", self.kept),
        )
        lines = []
        for title, items in parts:
            if title in ("renamed", "assumed") and not items:
                continue
            lines.append(f"{title}: {len(items) or 'nothing'}")
            lines += [f"  {item}" for item in items]
        return "\n".join(lines) + "\n"

    def text(self, source: str) -> str:
        """Return the text of the new file; `source` is the old file's name.

        `undecided` at the top lists what must be decided; a run refuses the file until then.
        """
        lines = [f"# Made from {_printable(source)} by `megafp8 migrate`."]
        tree: dict[str, Any] = {}
        if self.undecided:
            lines.append("# The file is refused while `undecided` has lines. Write each decision")
            lines.append("# into the file, and remove its line.")
            tree[UNDECIDED] = [_printable(item) for item in self.undecided]
        body = yaml.safe_dump(tree | self.out, sort_keys=False, allow_unicode=True, width=96)
        return "\n".join(lines) + "\n\n" + str(body)


def write_beside(file: Path, text: str, output: Path | None) -> Path:
    """Write `text` to `output`, or to `NAME.megafp8.yaml` beside `file`, and return the path.

    Raises:
        SettingError: The file exists already or cannot be written.
    """
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


def rewrite(target: Path, text: str) -> None:
    """Replace the content of a file that `write_beside` has written.

    Raises:
        SettingError: The file cannot be written.
    """
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingError(
            str(target), None, f"cannot be written ({error.strerror})", "Name another with -o"
        ) from error


def check_written(m: Migration, *, keeps: bool = False) -> None:
    """Check the translated settings by the rules of megafp8; wrong ones must be decided.

    A setting that refers to another one is checked when the whole file is loaded. `keeps` leaves a
    setting that is wrong only beside others in the file, where the user may change the others.
    """
    for setting in list(flatten("", m.out)):
        if "???" in str(setting.value):  # OmegaConf's mark of a value that is missing
            remove_from(m.out, setting.key)
            m.decide(setting.key, setting.value, "is not a plain value", "Give the value itself")
    written = {
        s.key: s for s in flatten("", m.out) if s.key in all_keys() and "${" not in str(s.value)
    }
    tree = schema_tree()
    problems = [problem for s in written.values() if (problem := put_in(tree, s, merge=False))]
    bad = {problem.key for problem in problems}
    values = {key: read_value(tree, key) for key in written if key not in bad}  # of the keys' types
    for found in list(unused(values)):
        if found.key in values:
            remove_from(m.out, found.key)
            if m.assumed.pop(found.key, None) is not None:
                del values[found.key]
                continue
            m.drop(found.key, values.pop(found.key), f"it has no effect with {found.setting}")
    for key in [key for key in m.assumed if key in values and unmet_need(key, values)]:
        remove_from(m.out, key)
        del m.assumed[key], values[key]
    for problem in [*problems, *check_values(values)]:
        if not keeps or problem in problems:
            remove_from(m.out, problem.key)
        m.decide(problem.key, problem.value, problem.reason, problem.hint)


def leave_out_secrets(m: Migration, known: Collection[str]) -> None:
    """Leave settings that contain a secret out of the new file; the user must decide about them.

    Args:
        m: The migration.
        known: The secrets that the old file names, as a variable that a flag repeats.
    """
    for setting in list(flatten("", m.out)):
        if redacted(setting.value, setting.key, known) != setting.value:
            remove_from(m.out, setting.key)
            reason, hint = "contains a secret", "Write it without, or give it on the command line"
            m.decide(setting.key, setting.value, reason, hint)


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _last_name(key: str) -> str:
    """Return the last name of a key or a flag: `num_layers` of `--num-layers`."""
    return key.lstrip("-").rpartition(".")[2].replace("-", "_")


def _shown(value: Any, key: str) -> str:
    """Return a value in a line of the report; a flag that is on or off is no secret."""
    return plain(value if isinstance(value, bool) else redacted(value, key))


def _printable(text: str) -> str:
    """Return the text as one line of printable characters, without interpolations."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return line.replace("${", "$ {")


def remove_from(tree: dict[str, Any], path: str) -> None:
    """Remove the value at a dotted path from a tree of dicts, if it is there."""
    *sections, leaf = path.split(".")
    for section in sections:
        tree = tree.get(section, {})
    tree.pop(leaf, None)


def set_in(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path in a tree of dicts, and make the sections on its way."""
    *sections, leaf = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[leaf] = value
