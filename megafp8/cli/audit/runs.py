"""Run a framework with and without each flag, in a process of its own, and collect the records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

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
          "MASTER_", "OMP_", "TORCHDYNAMO_", "CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDNN_",
          "GIT_", "NCCL_", "TMP", "TEMP", "TORCH_EXTENSIONS_", "TORCHINDUCTOR_",
          "TRITON_")  # fmt: skip
"""Beginnings of variables that a script cannot set for the runs: they could make code run, as a
compiler or a folder of libraries does, or are the audit's own."""
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
    request = replace(request, environment=passed_on(request.environment, code))
    with Host(request, code, te_version) as host:
        return _audit(request, code, host)


def _audit(request: Request, code: Code, host: Host) -> tuple[Request, list[FlagVerdict]]:
    flags = [flag for flag in request.flags if not flag.why_not]
    results = _results(host, request, flags, ())
    if not verdict.is_steady(request, results) and (calmer := without_overlap(request)) != request:
        request = calmer
        results = _results(host, request, flags, ())
    refused: dict[Flag, str] = {}
    while guilty := verdict.refusing(request, results):
        why = next(results.problem(BASE, x)[1] for x in request.layouts
                   if results.problem(BASE, x)[0] == "refused")  # fmt: skip
        together = " together with " + ", ".join(f.shown for f in guilty[1:]) if guilty[1:] else ""
        refused[guilty[0]] = f"{why}{together}"
        flags.remove(guilty[0])
        results = _results(host, request, flags, refused)
        request = _without(request, guilty[0])
    pairs = list(verdict.pairs(flags, request, results))
    if pairs:
        more = {verdict.both(*pair): pair for pair in pairs}
        results = Runs({**results.found, **_run(host, request, flags, more).found})
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
    host: Host, request: Request, flags: Sequence[Flag], left_out: Collection[Flag]
) -> Runs:
    """Run with all flags, twice, and without each; `left_out` are those that are refused.

    If their parser does not know a flag, the runs with all flags say which one: there are no others
    then.
    """
    kept = [flag for flag in request.flags if flag not in left_out and not flag.why_not]
    base = _run(host, request, kept, {BASE: (), AGAIN: ()})
    if verdict.unrecognized(request, base):
        return base
    others = _run(host, request, kept, {flag.shown: (flag,) for flag in flags})
    return Runs({**base.found, **others.found})


def _run(
    host: Host, request: Request, kept: Sequence[Flag], less: Mapping[str, Collection[Flag]]
) -> Runs:
    """Run with the flags `kept`, without those that `less` has for the name of a run."""
    runs = []
    for layout in request.layouts:
        for name, gone in less.items():
            others = [flag for flag in kept if flag not in gone]
            runs.append(_described(request, others, layout, name))
    return Runs({(r["name"], r["layout"]): r["ranks"] for r in host.results(runs)})


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


def passed_on(given: Mapping[str, str], code: Code) -> dict[str, str]:
    """Return the variables of a script that its runs get: those that the framework may read."""
    return {
        name: value
        for name, value in given.items()
        if (name.startswith(_THEIRS) or code.mentions(name)) and not name.startswith(_NEVER)
    }


def _environment(request: Request) -> dict[str, str]:
    """Return this process's environment without settings of frameworks, and the script's."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_THEIRS)}
    environment |= request.environment
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return environment | {
        "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


class Host:
    """Hold the process that imports a framework once, and asks it for one run after the other."""

    def __init__(self, request: Request, code: Code, te_version: str) -> None:
        flags = request.flags
        fields = {name for flag in flags for name in (flag.name, *_ALIASES.get(flag.name, ()))}
        self._job = {
            "framework": request.framework, "te_version": te_version,
            "packages": list(code.packages), "sources": [str(folder) for folder in code.folders],
            "fields": sorted(fields),
        }  # fmt: skip
        self._environment = _environment(request)

    def __enter__(self) -> Self:
        """Start the process."""
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megafp8.cli.audit.host"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._messages, text=True,
            env=self._environment, cwd=tempfile.gettempdir(),
        )  # fmt: skip
        self._write(self._job)
        return self

    def __exit__(self, *_: object) -> None:
        """End the process: without a further run it has nothing to do."""
        with suppress(BrokenPipeError), self._process:
            pass
        self._messages.close()

    def results(self, runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the result of each run.

        Raises:
            RunError: The framework cannot be imported, or the process has ended.
        """
        name = self._job["framework"]
        for number, run in enumerate(runs, start=1):
            self._write(run)
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if not line:
                raise RunError(f"the process that runs {name} ended before run {number} of "
                               f"{len(runs)}: {_last_line(self._messages)}")  # fmt: skip
            result = json.loads(line)
            if "failed" in result:
                raise RunError(f"{name}: its code cannot be imported here "
                               f"({result['failed']}, at {result['where'] or 'an unknown place'})"
                               ". Give another version with --source, or of --te")  # fmt: skip
            _progress(number, len(runs))
            yield result

    def _write(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as the missing answer tells
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()


def _progress(number: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if number == total else ""
        print(f"\rrun {number} of {total}", end=end, file=sys.stderr, flush=True)


def _last_line(messages: IO[bytes]) -> str:
    messages.seek(0)
    lines = messages.read().decode(errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else "it printed nothing"
