"""The pages about all settings, made from the schema: `--help` and docs/configuration.md.

python -m megafp8.cli.help > docs/configuration.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from omegaconf import MISSING

from megafp8.config.keys import FREE_KINDS, NOT_IN_NEMO, Key
from megafp8.config.layers import conf_dir, default_job
from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import PRESET_GROUPS, preset_names
from megafp8.config.schema import all_keys
from megafp8.config.together import TOGETHER, condition_text
from megafp8.config.values import plain

_USAGE = """\
Usage: {prog} [KEY=VALUE ...] [options]

Pretrains a GPT. Without any argument it runs the default job, on the GPU if there is one.

Options:
  --help, -h             this page
  --cfg job, -c job      print the configuration and end; --resolve fills in ${{...}}
  --config-name, -cn N   another YAML than pretrain_gpt
  --config-dir, -cd DIR  a directory of your own YAML, which begins with
                         `defaults: [pretrain_gpt, _self_]`, or is NeMo's as it is;
                         --config-path, -cp mean the same
  model=NAME             a preset of conf/model: {models}
  precision=NAME         a preset of conf/precision: {precisions}
  --multirun, -m         one run for each combination of comma-separated values

Examples:
  {prog} model.fp8=True
  {prog} model.fp8=True model.fp8_e4m3=True model.fp8_margin=1 exp_manager.name=e4m3
  {prog} model=gpt3_125m precision=fp8_delayed_hybrid
  {prog} trainer.devices=2 model.tensor_model_parallel_size=2
  {prog} -m model.fp8=True,False model.optim.lr=1e-3,3e-4
  {prog} --config-dir mine --config-name my_gpt trainer.max_steps=1000

Keys, with the default job's values:
"""

_PAGE = """\
<!-- Made by `python -m megafp8.cli.help > docs/configuration.md`; do not edit by hand. -->
# Configuration

Settings have NeMo's names. Files, groups and overrides are [Hydra](https://hydra.cc)'s: first come
the defaults of the schema, then a YAML (`conf/pretrain_gpt.yaml`, the default job, holds its own
choices only), then overrides from the command line.

```
python pretrain_gpt.py model.fp8=True model.hidden_size=512          # overrides
python pretrain_gpt.py --config-dir mine --config-name my_gpt        # a YAML of your own
python pretrain_gpt.py --config-path=mine --config-name=my_gpt       # the same, as with NeMo
python pretrain_gpt.py -m model.fp8=True,False                       # a sweep: one run for each
python pretrain_gpt.py --cfg job --resolve                           # print what would run
python pretrain_gpt.py --help                                        # all keys
```

A YAML of your own begins with `defaults: [pretrain_gpt, _self_]` and states what differs. Without
that line it must give every key marked *required* below. A NeMo YAML is taken as it is, with its
interpolations (`${{multiply:…}}` and `${{sum:…}}` too): it gives a run, or the list of just those
keys that cannot be honoured. `python -m megafp8.cli.migrate FILE` makes a clean YAML out of NeMo's,
or out of Accelerate's with its `fp8_config:`, beside it. It reports what was kept, what changed,
what was dropped as inert, and what must be decided.

What is wrong is reported all at once, before anything starts: the key, its value, where it was
set, and what would be valid. The exit code is then 2. There is no key that is silently ignored:
an unknown one is refused, also behind `+` or `++`. A key that *needs* a setting of another one has
no effect without it. Given on the command line, or in a YAML that begins with
`defaults: [pretrain_gpt, _self_]`, it is then an error by name; given by a preset, by a NeMo YAML
or by a layer that a stronger one overrules, it is named once at the start of the run, as are
NeMo's keys that do nothing here.

Layers are merged in this order, and every value knows the one it came from: the defaults of the
schema, the default job, YAML files in the order of their `defaults:`, presets, the command line.

A new run starts from another one's weights with `restore_from_path`, or from all of its state with
`model.resume_from_checkpoint`.

A sweep puts its runs into `multirun/<time>/<number>`; `hydra.sweep.dir=DIR` chooses another
directory, and the same one again continues its runs. `hydra/launcher=NAME` and
`hydra/sweeper=NAME` choose among those that are installed. A sweeper that searches (Optuna's:
`hydra/sweeper=optuna`) minimizes the validation loss; a job that is refused or fails has an
infinite one, is reported, and the others go on.

## Presets

`model=NAME` and `precision=NAME` come after the YAML and before other overrides, wherever they
stand. The files are in `conf/model` and `conf/precision`; folders `model` and `precision` in a
`--config-dir` add to them. The vocabulary, and with it the number of parameters, is the data's.

| group | names |
|---|---|
{presets}

## Continuing a run

A run with a name (`exp_manager.name`) is continued by the same name. Keys marked *may change* can
then differ: the length of the run, logging, layout and policies. Any other difference is refused by
name. `trainer.max_steps` is part of the cosine schedule: another length changes the learning rates
of the steps to come. A run without a name is continued only by exactly the same configuration.
"""


_TOGETHER_PART = """\
## What does not go together

Each pair is refused by name, with a hint. *Unproven* marks what nobody has shown to be right yet.
Rules of sizes (what divides what) come besides.
"""

_NEMO_PART = """\
## NeMo's keys that do nothing here

These are accepted with NeMo's default, or with the value that says what megafp8 does, and are then
listed at the start of a run as *inert*. Any other value is refused, with the reason and a way out.
`—` marks keys of later versions of NeMo, or of Megatron.
"""


def help_page(prog: str) -> str:
    """What `--help` prints."""
    models, precisions = (", ".join(preset_names(g, [conf_dir()])) for g in PRESET_GROUPS)
    lines = [_USAGE.format(prog=prog, models=models, precisions=precisions)]
    values = default_values()
    for section, keys in _sections():
        if section:
            lines.append(f"{section}.")
        for key in keys:
            name = key.path.removeprefix(section + ".")
            lines.append(f"  {name}={_plain(values[key.path])}")
            needs = "" if key.needs is None else f"; needs {key.needs.text}"
            lines.append(f"      {key.help} [{key.valid_text}{needs}]")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def markdown_page() -> str:
    """The text of docs/configuration.md."""
    values = default_values()
    rows = [
        f"| `{group}` | {', '.join(f'`{name}`' for name in preset_names(group, [conf_dir()]))} |"
        for group in PRESET_GROUPS
    ]
    parts = [_PAGE.format(presets="\n".join(rows))]
    for section, keys in _sections():
        parts.append(f"## `{section}`\n" if section else "## Top level\n")
        parts.append("| key | default job | NeMo | valid | needs | continuing | meaning |")
        parts.append("|---|---|---|---|---|---|---|")
        parts += [_row(key, section, values[key.path]) for key in keys]
        parts.append("")
    parts += _together_part()
    parts += _nemo_part()
    parts.append("## Defaults that differ from NeMo's\n")
    parts.append(
        "NeMo's are those of its `megatron_gpt_config.yaml`; `—` above marks keys that it does not "
        "have.\n"
    )
    parts.append("| key | here | NeMo |\n|---|---|---|")
    for key in differing_keys():
        parts.append(f"| `{key.path}` | {_code(values[key.path])} | {_code(key.nemo)} |")
    return "\n".join(parts) + "\n"


def _together_part() -> list[str]:
    parts = [_TOGETHER_PART, "| refused | beside | because |", "|---|---|---|"]
    for row in TOGETHER:
        excludes, when = (
            ", ".join(f"`{condition_text(key, test)}`" for key, test in tests.items())
            for tests in (row.excludes, row.when)
        )
        reason = re.sub(r"\{([\w.]+)\}", r"`\1`", row.reason)
        mark = " *(unproven)*" if row.unproven else ""
        parts.append(f"| {excludes} | {when} | {reason}{mark} |")
    return [*parts, ""]


def _nemo_part() -> list[str]:
    parts = [_NEMO_PART]
    parts += ["| key | NeMo | passes | other values | here |", "|---|---|---|---|---|"]
    for key in nemo_keys().values():
        nemo = _code(key.nemo) if key.in_megatron_gpt_config else "—"
        other = "pass too" if key.any_text else "refused"
        passes = "any text" if key.any_text else ", ".join(_code(value) for value in key.accepts)
        if key.same_as is not None:
            passes += ", and what follows from other keys"
        here = (
            key.note
            if key.hint.startswith("Leave it out, or give")
            else (f"{key.note}. {key.hint}")
        )
        cells = [f"`{key.path}`", nemo, passes, other, here[0].upper() + here[1:] + "."]
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    parts.append("")
    return parts


def differing_keys() -> list[Key]:
    """Keys whose value in the default job is not NeMo's default."""
    values = default_values()
    nemo = [key for key in all_keys().values() if key.nemo is not NOT_IN_NEMO]
    return [key for key in nemo if values[key.path] != key.nemo]


def default_values() -> dict[str, Any]:
    """Return every key's value in the default job, with interpolations as they are written."""
    return {path: key.default for path, key in all_keys().items()} | dict(default_job())


def _sections() -> Iterator[tuple[str, list[Key]]]:
    parent = {path: path.rpartition(".")[0] for path in all_keys()}
    order = list(dict.fromkeys(parent.values()))
    keys = sorted(all_keys().values(), key=lambda key: order.index(parent[key.path]))
    for section, members in groupby(keys, key=lambda key: parent[key.path]):
        yield section, list(members)


def _row(key: Key, section: str, value: Any) -> str:
    name = key.path.removeprefix(section + ".")
    required = " *required*" if key.required else ""
    nemo = "—" if key.nemo is NOT_IN_NEMO else _code(key.nemo)
    continuing = "may change" if key.kind in FREE_KINDS else "fixed"
    needs = "" if key.needs is None else f"`{key.needs.text}`"
    cells = [f"`{name}`{required}", _code(value), nemo, key.valid_text, needs, continuing, key.help]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(value: Any) -> str:
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    return "???" if value == MISSING else plain(value)


if __name__ == "__main__":
    print(markdown_page(), end="")
