"""Print docs/reference/configuration.md, made from the schema of the settings.

python -m scripts.configuration > docs/reference/configuration.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megafp8.cli.help import default_values, keys_of_group, shown_value, wrapped
from megafp8.config.groups import GROUPS
from megafp8.config.keys import FREE_KINDS, NOT_IN_NEMO, Key
from megafp8.config.layers import conf_dir
from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import PRESET_GROUPS, preset_names
from megafp8.config.rows import condition_text
from megafp8.config.schema import all_keys
from megafp8.config.te_layers import BACKEND, TABLE
from megafp8.config.together import TOGETHER

COLUMNS = 110
"""Columns of a line of the page."""
TEMPLATE = Path(__file__).with_name("configuration_page.md")


class GroupText(NamedTuple):
    """Hold what the page says of a group, with an example for the command line of a script."""

    about: str
    example: str
    script: str = "pretrain_gpt.py"


_GROUPS_FILE = Path(__file__).with_name("configuration_groups.yaml")
TEXTS = {
    name: GroupText(**entry)
    for name, entry in yaml.safe_load(_GROUPS_FILE.read_text("utf-8")).items()
}
"""The texts by the names of `GROUPS`."""


def markdown_page() -> str:
    """Return the text of docs/reference/configuration.md: the template, its tables and lists."""
    values = default_values()
    made = {
        "contents": _contents(),
        "presets": (
            f"| `{group}` | {', '.join(map(_code, preset_names(group, [conf_dir()])))} |"
            for group in PRESET_GROUPS
        ),
        "groups": _groups(values),
        "together": _together(),
        "nemo": _nemo(),
        "differences": (
            f"| `{key.path}` | {_code(values[key.path])} | {_code(key.nemo)} |"
            for key in differing_keys()
        ),
    }
    text = TEMPLATE.read_text("utf-8")
    return re.sub(r"(?m)^\{(\w+)\}$", lambda place: "\n".join(made[place[1]]), text)


def _groups(values: dict[str, Any]) -> Iterator[str]:
    for name, group in GROUPS.items():
        text = TEXTS[name]
        yield from (f"## {group.title}\n", *wrapped(text.about, COLUMNS), "")
        yield from ("```console", f"$ python {text.script} {text.example}", "```", "")
        for key in keys_of_group(name):
            yield from _item(key, values[key.path])
        yield ""


def _contents() -> Iterator[str]:
    """Yield an entry for each group, with a link to each of its keys."""
    for name, group in GROUPS.items():
        paths = [key.path for key in keys_of_group(name)]
        short = [_short(path, paths) for path in paths]
        yield f"  - [{group.title}](#{anchor(group.title)}):"
        links = (f"[`{text}`](#{path})" for text, path in zip(short, paths, strict=True))
        yield from wrapped(", ".join(links), COLUMNS, "    ", "    ")


def _short(path: str, others: Sequence[str]) -> str:
    """Return the end of a path, with as many sections before it as tell it from `others`."""
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        text = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{text}") for other in others) == 1:
            return text
    return path


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _item(key: Key, value: Any) -> Iterator[str]:
    """Yield the lines about one key."""
    facts = [f"*Values:* {_escaped(key.valid_text)}."]
    if key.needs is not None:
        facts.append(f"*Needs* {_condition(key.needs.text)}.")
    if key.nemo is NOT_IN_NEMO:
        facts.append("*Not in NeMo's file.*")
    elif key.nemo != value:
        facts.append(f"*NeMo's default:* {_code(key.nemo)}.")
    if key.required:
        facts.append("*Required.*")
    if key.kind in FREE_KINDS:
        facts.append("*May change.*")
    text = f"**`{key.path}`** = {_code(value)}: {_escaped(key.help)} {' '.join(facts)}"
    yield f'- <a id="{key.path}"></a>'
    yield from wrapped(text, COLUMNS, "  ", "  ")


def _together() -> Iterator[str]:
    of_te = [row._replace(when={BACKEND: "te", **row.when}) for row in TABLE]
    for row in (*TOGETHER, *of_te):
        excludes, when = (
            ", ".join(_condition(condition_text(key, test)) for key, test in tests.items())
            for tests in (row.excludes, row.when)
        )
        reason = re.sub(r"; this run has \{[\w.]+\}", "", row.reason)
        reason = re.sub(r"\{([\w.]+)\}", r"`\1`", reason)
        mark = " *(unproven)*" if row.unproven else ""
        yield f"| {excludes} | {when} | {reason}{mark} |"


def _condition(text: str) -> str:
    """Return a condition such as `a=1 or 2 for some linear` with only its settings as code."""
    return " and ".join(map(_term, text.replace("None", "null").split(" and ")))


def _term(text: str) -> str:
    match = re.fullmatch(r"([\w.]+)=(\S+(?:(?:, | or )\S+)*)( for .*)?", text)
    if match is None:  # words, in which settings stand
        return re.sub(r"\b[a-z_]+(?:\.\w+)+(?:=\w+)?", lambda setting: f"`{setting[0]}`", text)
    first, *others = re.split(r"(, | or )", match[2])
    pairs = zip(others[::2], others[1::2], strict=True)
    listed = "".join(f"{joint}`{other}`" for joint, other in pairs)
    return f"`{match[1]}={first}`{listed}{match[3] or ''}"


def _nemo() -> Iterator[str]:
    for key in nemo_keys().values():
        nemo = _code(key.nemo) if key.in_megatron_gpt_config else "—"
        accepted = [_code(value) for value in key.accepts]
        passes = key.free.text if key.free is not None else ", ".join(accepted)
        if key.same_as is not None or key.where is not None:
            passes += ", and what follows from other keys"
        here = key.note
        if not key.hint.startswith("Leave it out, or give"):
            here += f". {key.hint}"
        cells = [f"`{key.path}`", nemo, passes, here[0].upper() + here[1:] + "."]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def differing_keys() -> list[Key]:
    """Return the keys whose value in the default job is not NeMo's default."""
    values = default_values()
    nemo = [key for key in all_keys().values() if key.nemo is not NOT_IN_NEMO]
    return [key for key in nemo if values[key.path] != key.nemo]


def _escaped(text: str) -> str:
    """Escape what Markdown would take for emphasis, outside of code."""
    parts = text.split("`")
    parts[::2] = [part.replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)


def _code(value: Any) -> str:
    return f"`{shown_value(value)}`"


if __name__ == "__main__":
    print(markdown_page(), end="")
