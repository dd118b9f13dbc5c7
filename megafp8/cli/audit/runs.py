"""Run a framework with and without each flag, in a process of its own, and collect the records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import yaml

from megafp8.cli.audit import verdict
from megafp8.cli.audit.reads import Code, Reading
from megafp8.cli.audit.request import Flag, Request
from megafp8.cli.audit.verdict import AGAIN, BASE, REFUSED, FlagVerdict, Runs
from megafp8.errors import RunError
from megafp8.secrets import one_line

NEEDED = {
    "megatron": {"megatron-core": 2},
    "bridge": {"megatron-core": 1, "megatron-bridge": 1},
    "accelerate": {"accelerate": 1},
}
"""The distributions that each framework needs, and how many of their marked files."""
PACKAGES = {"megatron": ("megatron",), "bridge": ("megatron",), "accelerate": ("accelerate",)}
_LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "dp2": (),
}
_FIELDS = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp2": {"tensor_model_parallel_size": 1, "sequence_parallel": False},
}
_THEIRS = ("NVTE_", "ACCELERATE_", "MEGATRON_", "NVIDIA_", "CUDA_DEVICE_MAX_")
"""Beginnings of variables that change what is computed; a user's own do not reach the runs."""
_NEVER = ("PYTHON", "LD_", "MEGAFP8_", "PATH", "HOME", "XDG_", "RANK", "WORLD_SIZE", "LOCAL_",
          "MASTER_", "OMP_", "TORCHDYNAMO_")  # fmt: skip
"""Beginnings of variables that a script cannot set for the runs: they could make code run, or are
the audit's own."""
_ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "fp8",
    "num_processes": 1, "num_machines": 1, "machine_rank": 0, "use_cpu": False, "debug": False,
}  # fmt: skip
_ALIASES = {
    "fp8_param_gather": ("fp8_param",), "fp8_param": ("fp8_param_gather",),
    "fp4_param_gather": ("fp4_param",), "fp4_param": ("fp4_param_gather",),
    "te_precision_config_file": ("quant_recipe",),
}  # fmt: skip
"""Other names under which a field of Megatron's is read."""


def audit(request: Request, code: Code, te_version: str) -> tuple[Request, list[FlagVerdict]]:
    """Return the verdict on each flag, in the order of the file, and what was run for it.

    Raises:
        RunError: The framework's code cannot be imported.
    """
    flags = [flag for flag in request.flags if not flag.why_not]
    results = _results(request, code, te_version, flags, ())
    if not verdict.is_steady(request, results) and (calmer := without_overlap(request)) != request:
        request = calmer
        results = _results(request, code, te_version, flags, ())
    refused: dict[Flag, str] = {}
    while guilty := verdict.refusing(request, results):
        why = next(results.problem(BASE, x)[1] for x in request.layouts
                   if results.problem(BASE, x)[0] == "refused")  # fmt: skip
        together = " together with " + ", ".join(f.shown for f in guilty[1:]) if guilty[1:] else ""
        refused[guilty[0]] = f"{why}{together}"
        flags.remove(guilty[0])
        results = _results(request, code, te_version, flags, refused)
        request = _without(request, guilty[0])
    pairs = list(verdict.pairs(flags, request, results))
    if pairs:
        more = {verdict.both(*pair): pair for pair in pairs}
        results = Runs({**results.found, **_run(request, code, te_version, flags, more).found})
    verdicts = []
    for flag in (*request.flags, *refused):
        readings = readings_of(flag, request.framework, code)
        if flag in refused:
            places = tuple(reading.place for reading in readings)
            verdicts.append(FlagVerdict(flag, REFUSED, places, refused[flag]))
        else:
            verdicts.append(verdict.decide(flag, request, results, readings))
    return request, verdicts


def _without(request: Request, flag: Flag) -> Request:
    return replace(request, flags=tuple(other for other in request.flags if other != flag))


def readings_of(flag: Flag, framework: str, code: Code) -> list[Reading]:
    """Return the lines of a framework's code that read a flag."""
    if framework == "accelerate":
        key = flag.name.upper().removeprefix("FP8_")
        return code.readings(key, f"ACCELERATE_FP8_{key}", flag.name, in_files='"ACCELERATE_FP8_"')
    names = {flag.name, *_ALIASES.get(flag.name, ())}
    return code.readings(*names)


def _results(
    request: Request,
    code: Code,
    te_version: str,
    flags: Sequence[Flag],
    left_out: Collection[Flag],
) -> Runs:
    """Run with all flags, twice, and without each; `left_out` are those that are refused."""
    kept = [flag for flag in request.flags if flag not in left_out and not flag.why_not]
    less = {BASE: (), AGAIN: (), **{flag.shown: (flag,) for flag in flags}}
    return _run(request, code, te_version, kept, less)


def _run(
    request: Request,
    code: Code,
    te_version: str,
    kept: Sequence[Flag],
    less: Mapping[str, Collection[Flag]],
) -> Runs:
    """Run with the flags `kept`, without those that `less` has for the name of a run."""
    runs = []
    for layout in request.layouts:
        for name, gone in less.items():
            others = [flag for flag in kept if flag not in gone]
            runs.append(_described(request, others, layout, name))
    fields = {name for flag in request.flags for name in (flag.name, *_ALIASES.get(flag.name, ()))}
    work = {
        "framework": request.framework, "te_version": te_version, "packages": list(code.packages),
        "sources": [str(folder) for folder in code.folders], "fields": sorted(fields), "runs": runs,
    }  # fmt: skip
    ranks_of_run = {}
    for result in _host(work, _environment(request, code)):
        if "failed" in result:
            raise RunError(f"{request.framework}: its code cannot be imported here "
                           f"({result['failed']}, at {result['where'] or 'an unknown place'}). "
                           "Give another version with --source, or of --te")  # fmt: skip
        ranks_of_run[result["name"], result["layout"]] = result["ranks"]
    return Runs(ranks_of_run)


def without_overlap(request: Request) -> Request:
    """Return the request without the flags that send messages beside the computation.

    Their order differs from run to run on a CPU, with the results of Megatron-core 0.19.2.
    """
    kept = tuple(word for word in request.kept if not word.startswith("--overlap-"))
    fields = dict(request.tree.get("ddp", {}))
    gone = [name for name, on in fields.items() if name.startswith("overlap_") and on]
    fields = {name: on for name, on in fields.items() if name not in gone}
    tree = {**request.tree, "ddp": fields} if gone else request.tree
    names = [word for word in request.kept if word not in kept] + [f"ddp.{n}" for n in gone]
    features = {**request.features, **dict.fromkeys(names, "distributed/")}
    return replace(request, kept=kept, tree=tree, features=features)


def _described(request: Request, flags: Sequence[Flag], layout: str, name: str) -> dict[str, Any]:
    """Return one run for the host: what its framework is given."""
    run: dict[str, Any] = {"name": name, "layout": layout, "layers": request.layers}
    if request.framework == "megatron":
        words = [word for flag in flags for word in flag.words]
        return run | {"words": [*request.kept, *words, *_LAYOUTS[layout]]}
    dropped = {flag.words for flag in request.flags} - {flag.words for flag in flags}
    if request.framework == "accelerate":
        block = _less(request.tree["fp8_config"], "fp8_config", dropped)
        return run | {"text": yaml.safe_dump({**_ACCELERATE, "fp8_config": block})}
    sections = ("model", "ddp", "optimizer")
    tree = {section: _less(request.tree[section], section, dropped) for section in sections}
    mixed = request.tree["mixed_precision"]
    if isinstance(mixed, Mapping):
        mixed = _less(mixed, "mixed_precision", dropped)
    elif ("mixed_precision", "") in dropped:
        mixed = None
    return run | {"tree": {**tree, "mixed_precision": mixed}, "layout_fields": _FIELDS[layout]}


def _less(
    fields: Mapping[str, Any], section: str, dropped: Collection[tuple[str, ...]]
) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if (section, str(name)) not in dropped}


def _environment(request: Request, code: Code) -> dict[str, str]:
    """Return this process's environment without settings of frameworks, and the script's."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_THEIRS)}
    for name, value in request.environment.items():
        known = name.startswith(_THEIRS) or code.mentions(name)
        if known and not name.startswith(_NEVER):
            environment[name] = value
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return environment | {
        "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


def _host(work: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the results of the process that runs the framework.

    Raises:
        RunError: The process ended before its work.
    """
    command = [sys.executable, "-P", "-m", "megafp8.cli.audit.host"]
    with tempfile.TemporaryFile() as messages, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True,
        env=dict(environment), cwd=tempfile.gettempdir(),
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(work))
        process.stdin.close()
        number = 0
        for line in process.stdout:
            number += 1
            _progress(number, len(work["runs"]))
            yield json.loads(line)
        process.wait()
        if number < len(work["runs"]) and process.returncode != 1:
            raise RunError(f"the process that runs {work['framework']} ended after {number} of "
                           f"{len(work['runs'])} runs: {_last_line(messages)}")  # fmt: skip


def _progress(number: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if number == total else ""
        print(f"\rrun {number} of {total}", end=end, file=sys.stderr, flush=True)


def _last_line(messages: IO[bytes]) -> str:
    messages.seek(0)
    lines = messages.read().decode(errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else "it printed nothing"
