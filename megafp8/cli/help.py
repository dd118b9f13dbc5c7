"""Make the page about all settings that `--help` prints, from the schema."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase as fnmatch
from typing import Any

from omegaconf import MISSING

from megafp8.config.groups import GROUPS
from megafp8.config.keys import Key
from megafp8.config.layers import DEFAULT_CONFIG, compose_layers, conf_dir, find_source
from megafp8.config.megatron_flags import megatron_flags
from megafp8.config.megatron_names import NAMES as MEGATRON_NAMES
from megafp8.config.megatron_names import REFUSED_PRESETS, meaning
from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import PRESET_GROUPS, preset_names
from megafp8.config.schema import all_keys
from megafp8.config.values import plain

WIDTH = 100
"""Columns of a line that `--help` prints."""
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
  --baseline JOB         with -m: the number of the job to which the others are compared

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
    models, precisions = ("\n".join(wrapped(text, WIDTH, margin, margin)) for text in names)
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
            lines += [f"Presets of conf/{group}:", *wrapped(text, WIDTH, "  ", "      "), ""]
    for name, (reason, hint) in REFUSED_PRESETS.items():
        if _has(name, wanted):
            said = wrapped(f"{reason}. {hint}.", WIDTH, "      ", "      ")
            lines += [f"Refused: precision={name}", *said, ""]
    return lines


def _found_elsewhere(wanted: Sequence[str]) -> list[str]:
    """Return lines about the names of other programs that have a word in them."""
    lines = []
    for key in nemo_keys().values():
        said = re.findall(r"[A-Z]{3,}", key.note)  # MLA or MTP, for which nothing else is named
        if _has(key.path, wanted) or any(word.lower() in wanted for word in said):
            accepted = key.free.text if key.free else ", ".join(map(shown_value, key.accepts))
            text = f"It has no effect: {key.note}. {key.hint}. [accepted: {accepted}]"
            lines += [f"  {key.path}", *wrapped(text, WIDTH, "      ", "      ")]
    for name in MEGATRON_NAMES:
        if _has(name, wanted):
            means = meaning(name, {"model.fp4": "e2m1"}.get(name, True)) or {}
            stands = " ".join(f"{path}={shown_value(value)}" for path, value in means.items())
            text = f"It stands for {stands}." if stands else "It is refused if it is True."
            lines += [f"  {name}", *wrapped(text, WIDTH, "      ", "      ")]
    for name in _names_of_megatron_alone(wanted):
        reason, hint = megatron_flags().in_our_words(name) or ("", "")
        lines += [f"  {name}", *wrapped(f"It {reason}. {hint}.", WIDTH, "      ", "      ")]
    return ["Names of NeMo, Megatron and Megatron Bridge:", *lines, ""] if lines else []


def _names_of_megatron_alone(wanted: Sequence[str]) -> list[str]:
    """Return the names and patterns of Megatron's table that a word is about.

    Left out are the last names of keys that are found themselves, under `model` or elsewhere.
    """
    flags = megatron_flags()
    listed = dict.fromkeys([*flags.passed, *flags.together, *(name for name, _ in flags.groups)])
    known = {path.rpartition(".")[2] for path in [*all_keys(), *nemo_keys(), *MEGATRON_NAMES]}
    lasts = [word.rpartition(".")[2] for word in wanted]
    return [
        name
        for name in listed
        if name not in known
        and (_has(name, lasts) or any(fnmatch(w, name) for w in lasts if w not in known))
    ]


def _has(name: str, wanted: Sequence[str]) -> bool:
    return any(word in name.lower() for word in wanted)


def _help_lines(keys: Sequence[Key], values: dict[str, Any]) -> Iterator[str]:
    for key in keys:
        yield f"  {key.path}={shown_value(values[key.path])}"
        needs = "" if key.needs is None else f"; needs {key.needs.text}"
        refused = f"; refused: {_refused(key)}" if _refused(key) else ""
        text = f"{key.help} [{key.valid_text}{refused}{needs}]"
        yield from wrapped(text, WIDTH, "      ", "      ")


def default_values(job: str = DEFAULT_CONFIG) -> dict[str, Any]:
    """Return every key's value in a job of conf/, with interpolations as they are written."""
    values = {path: key.default for path, key in all_keys().items()}
    for layer in compose_layers(find_source(None, job), []):
        values |= {setting.key: setting.value for setting in layer.settings}
    return values


def wrapped(text: str, width: int, first: str = "", later: str = "") -> list[str]:
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


def shown_value(value: Any) -> str:
    return "???" if value == MISSING else plain(value)
