"""Make the pages about all settings from the schema: `--help` and docs/reference/configuration.md.

python -m megafp8.cli.help > docs/reference/configuration.md
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from megafp8.config.groups import GROUPS
from megafp8.config.keys import FREE_KINDS, NOT_IN_NEMO, Key
from megafp8.config.layers import DEFAULT_CONFIG, compose_layers, conf_dir, find_source
from megafp8.config.megatron_names import NAMES as MEGATRON_NAMES
from megafp8.config.megatron_names import REFUSED_PRESETS, meaning
from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import PRESET_GROUPS, preset_names
from megafp8.config.rows import condition_text
from megafp8.config.schema import all_keys
from megafp8.config.together import TOGETHER
from megafp8.config.values import plain

WIDTH = 110
"""Columns of a line in docs/reference/configuration.md."""
HELP_WIDTH = 100
"""Columns of a line that `--help` prints."""
TEMPLATE = Path(__file__).with_name("configuration_page.md")
_PURPOSES = {
    "finetune_gpt": "Fine-tune a GPT on questions and answers (docs/guide/finetuning.md).",
    "pretrain_gpt": "Pretrain a GPT. Without arguments this runs the default job.",
}
_EXAMPLES = {
    "finetune_gpt": """\
  {prog} restore_from_path=runs/first model.data.train_ds.file_names=mine.jsonl
  {prog} restore_from_path=runs/first model.data.train_ds.file_names=mine.jsonl model.fp8=True""",
    "pretrain_gpt": """\
  {prog} model.fp8=True
  {prog} model.fp8=True model.fp8_e4m3=True model.fp8_margin=1 exp_manager.name=e4m3
  {prog} model=gpt3_125m precision=fp8_delayed_hybrid
  {prog} trainer.devices=2 model.tensor_model_parallel_size=2
  {prog} -m model.fp8=True,False model.optim.lr=1e-3,3e-4
  {prog} --config-dir mine --config-name my_gpt trainer.max_steps=1000""",
}  # fmt: skip
_USAGE = """\
Usage: {prog} [KEY=VALUE ...] [options]

{purpose}

Options:
  --help, -h [WORD ...]  print this page, or only what has a WORD in its name: keys, values,
                         presets, and names of NeMo and Megatron
  --version              print the versions of megafp8, torch and Python
  --cfg job, -c job      print the configuration and end; --resolve fills in ${{...}}
  --config-name, -cn N   use another YAML than {job}
  --config-dir, -cd DIR  a directory with your own YAML, which begins with
                         `defaults: [{job}, _self_]`, or with a NeMo YAML as it is;
                         --config-path, -cp mean the same
  --trust-recipe         import the recipes of FP8 that a YAML file names as code
  model=NAME             a preset of conf/model:
{models}
  precision=NAME         a preset of conf/precision:
{precisions}
  --multirun, -m         one run for each combination of comma-separated values

Examples:
{examples}

Keys, with the values of {job}.yaml. After each explanation: the values that it takes, and the
setting that it needs to have an effect.
"""


def keys_of_group(name: str) -> list[Key]:
    """Return the keys of a group, in the order of the schema."""
    return [key for key in all_keys().values() if key.group == name]


def help_page(prog: str, words: Sequence[str] = (), job: str = DEFAULT_CONFIG) -> str:
    """Return what `--help` prints: everything, or what has one of `words` in its name.

    Found are keys by their paths, their values and the names that their help quotes, presets, and
    names of other programs. A word may be a setting; only what is before its `=` counts. `job` is
    the command's own YAML, whichever one `--config-name` names.
    """
    wanted = [word.partition("=")[0].lower() for word in words]
    names = (", ".join(preset_names(group, [conf_dir()])) for group in PRESET_GROUPS)
    margin = " " * 25
    models, precisions = ("\n".join(_wrapped(text, HELP_WIDTH, margin, margin)) for text in names)
    purpose, examples = _PURPOSES[job], _EXAMPLES[job].format(prog=prog)
    fields = {"job": job, "purpose": purpose, "examples": examples}
    usage = _USAGE.format(prog=prog, models=models, precisions=precisions, **fields)
    lines = [] if wanted else [usage]
    values = default_values(job)
    for name, group in GROUPS.items():
        keys = [key for key in keys_of_group(name) if not wanted or _is_about(key, wanted)]
        if keys:
            lines += [f"{group.title}:", *_help_lines(keys, values), ""]
    if wanted:
        lines += _found_presets(wanted) + _found_elsewhere(wanted)
    if not lines:
        said = " or ".join(words)
        return f"No key or value has {said} in its name; --help lists all keys.\n"
    return "\n".join(lines).rstrip() + "\n"


def _is_about(key: Key, wanted: Sequence[str]) -> bool:
    """Whether a word is in a key's path, or is one of its values or a name that its help quotes.

    Values are also the refused ones; names are quoted of other programs, and have an underscore.
    """
    values = re.findall(r"[\w-]+", f"{key.valid_text} {_refused(key)}".lower())
    quoted = re.findall(r"`(\w+_\w+)`", key.help)
    return any(word in key.path.lower() or word in (*values, *quoted) for word in wanted)


def _refused(key: Key) -> str:
    """Return the values that NeMo or Megatron has and this version refuses, if they are listed."""
    later = key.valid.later if key.valid is not None else ()
    return ", ".join(map(str, later)) if isinstance(later, Iterable) else ""


def _found_presets(wanted: Sequence[str]) -> list[str]:
    """Return lines about the presets that have a word in their name, also the refused ones."""
    lines = []
    for group in PRESET_GROUPS:
        presets = [n for n in preset_names(group, [conf_dir()]) if _has(n, wanted)]
        if presets:
            text = f"{group}={', '.join(presets)}"
            lines += [f"Presets of conf/{group}:", *_wrapped(text, HELP_WIDTH, "  ", "      "), ""]
    for name, (reason, hint) in REFUSED_PRESETS.items():
        if _has(name, wanted):
            said = _wrapped(f"{reason}. {hint}.", HELP_WIDTH, "      ", "      ")
            lines += [f"Refused: precision={name}", *said, ""]
    return lines


def _found_elsewhere(wanted: Sequence[str]) -> list[str]:
    """Return lines about the names of other programs that have a word in them."""
    lines = []
    for key in nemo_keys().values():
        said = re.findall(r"[A-Z]{3,}", key.note)  # MLA or MTP, for which nothing else is named
        if _has(key.path, wanted) or any(word.lower() in wanted for word in said):
            accepted = key.free.text if key.free else ", ".join(map(_plain, key.accepts))
            text = f"It has no effect: {key.note}. {key.hint}. [accepted: {accepted}]"
            lines += [f"  {key.path}", *_wrapped(text, HELP_WIDTH, "      ", "      ")]
    for name in MEGATRON_NAMES:
        if _has(name, wanted):
            means = meaning(name, {"model.fp4": "e2m1"}.get(name, True)) or {}
            stands = " ".join(f"{path}={_plain(value)}" for path, value in means.items())
            text = f"It stands for {stands}." if stands else "It is refused if it is True."
            lines += [f"  {name}", *_wrapped(text, HELP_WIDTH, "      ", "      ")]
    return ["Names of NeMo, Megatron and Megatron Bridge:", *lines, ""] if lines else []


def _has(name: str, wanted: Sequence[str]) -> bool:
    return any(word in name.lower() for word in wanted)


def _help_lines(keys: Sequence[Key], values: dict[str, Any]) -> Iterator[str]:
    for key in keys:
        yield f"  {key.path}={_plain(values[key.path])}"
        needs = "" if key.needs is None else f"; needs {key.needs.text}"
        refused = f"; refused: {_refused(key)}" if _refused(key) else ""
        text = f"{key.help} [{key.valid_text}{refused}{needs}]"
        yield from _wrapped(text, HELP_WIDTH, "      ", "      ")


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
        yield from (f"## {group.title}\n", *_wrapped(group.about, WIDTH), "")
        yield from ("```console", f"$ python {group.script} {group.example}", "```", "")
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
        yield from _wrapped(", ".join(links), WIDTH, "    ", "    ")


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
    yield from _wrapped(text, WIDTH, "  ", "  ")


def _together() -> Iterator[str]:
    from megafp8.config.te_layers import BACKEND, TABLE  # a run without Transformer Engine has none

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


def default_values(job: str = DEFAULT_CONFIG) -> dict[str, Any]:
    """Return every key's value in a job of conf/, with interpolations as they are written."""
    values = {path: key.default for path, key in all_keys().items()}
    for layer in compose_layers(find_source(None, job), []):
        values |= {setting.key: setting.value for setting in layer.settings}
    return values


def _wrapped(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    """Return lines of at most `width` columns; none begins like an item of a Markdown list."""
    glued = re.sub(r" (?=(?:\d+[.)]|[-+*])(?: |$))", "\0", text)
    lines = textwrap.wrap(
        glued,
        width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def _escaped(text: str) -> str:
    """Escape what Markdown would take for emphasis, outside of code."""
    parts = text.split("`")
    parts[::2] = [part.replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)


def _code(value: Any) -> str:
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    return "???" if value == MISSING else plain(value)


if __name__ == "__main__":
    print(markdown_page(), end="")
