"""Run a framework with and without each flag, in a process of its own, and collect the records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

import yaml

from megafp8.errors import RunError
from megafp8.secrets import one_line
from megafp8_migrate.audit import verdict
from megafp8_migrate.audit.host import folders_of_ours
from megafp8_migrate.audit.reads import Code, Reading
from megafp8_migrate.audit.report import LAYOUTS
from megafp8_migrate.audit.request import Flag, Request, is_plain
from megafp8_migrate.audit.verdict import BASE, REFUSED, FlagVerdict, Runs

NEEDED = {
    "megatron": {"megatron-core": 2},
    "bridge": {"megatron-core": 1, "megatron-bridge": 1},
    "accelerate": {"accelerate": 1},
}
"""The distributions that each framework needs, and how many of their marked files."""
PACKAGES = {"megatron": ("megatron",), "bridge": ("megatron",), "accelerate": ("accelerate",)}
_SECONDS_TO_END = 5.0
"""How long killed ranks are waited for, which must write no file when their folder is removed."""
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


def audit(
    request: Request, code: Code, te_version: str, folder: Path
) -> tuple[Request, list[FlagVerdict]]:
    """Return the verdict on each flag, in the order of the file, and what was run for it.

    Args:
        request: What is audited.
        code: The framework's files.
        te_version: The version of Transformer Engine.
        folder: An empty folder of this process's own, in which the runs work.

    Raises:
        RunError: The framework's code cannot be imported.
    """
    request = replace(request, environment=passed_on(request.environment, code))
    with Host(request, code, te_version, folder) as host:
        return request, _audit(request, code, host)


def _audit(request: Request, code: Code, host: Host) -> list[FlagVerdict]:
    """Return a verdict on each flag, from runs without the flags that are refused."""
    flags = [flag for flag in request.flags if not flag.why_not]
    number = (verdict.REPEATS + len(flags)) * len(request.layouts)
    print(f"{number} runs make a configuration of the settings; at most {number} with training "
          "steps follow where these do not decide, and what differs is repeated",
          file=sys.stderr, flush=True)  # fmt: skip
    refused: dict[Flag, str] = {}
    while True:
        settled, runs, guilty = _tried(host, request, flags)
        if not guilty:
            break
        refused |= guilty
        flags = [flag for flag in flags if flag not in guilty]
    verdicts = []
    for flag in request.flags:
        readings = readings_of(flag, request.framework, code)
        if flag in refused:
            places = tuple(reading.place for reading in readings)
            verdicts.append(FlagVerdict(flag, REFUSED, places, refused[flag]))
        else:
            known = settled.get(flag, runs)
            verdicts.append(verdict.decide(flag, flags, request, known, readings))
    return verdicts


def _tried(
    host: Host, request: Request, flags: Sequence[Flag]
) -> tuple[dict[Flag, Runs], Runs, dict[Flag, str]]:
    """Run with all flags and without each: their settings, and steps where these do not decide.

    Returns the runs that settle each flag, those of the others, and the flags for which the job is
    refused: then nothing is settled.
    """
    settled: dict[Flag, Runs] = {}
    runs = Runs()
    for steps in (False, True):
        doubtful = [flag for flag in flags if flag not in settled]
        if not doubtful:
            break
        runs = Runs()
        trial = _Trial(host, request, flags, runs, steps)
        trial.run([(BASE, ())] * verdict.REPEATS + [(flag.shown, (flag,)) for flag in doubtful])
        if verdict.is_any_refused(runs):  # then any flag may be what it is about
            trial.run([(flag.shown, (flag,)) for flag in settled])
            if guilty := verdict.refusing(flags, request, runs):
                return {}, runs, guilty
        trial.confirm({flag.shown: ((flag,), BASE, ()) for flag in doubtful})
        pairs = [pair for pair in verdict.pairs(flags, request, runs) if pair[0] in doubtful]
        trial.run([(verdict.both(*pair), pair) for pair in pairs])
        trial.confirm({verdict.both(*pair): (pair, pair[1].shown, pair[1:]) for pair in pairs})
        settled |= {
            flag: runs for flag in doubtful if verdict.settled(flag, flags, request, runs)[0]
        }
    return settled, runs, {}


@dataclass(frozen=True)
class _Trial:
    """Add runs to those that there are: with all flags, and without some of them."""

    host: Host
    request: Request
    flags: Sequence[Flag]
    runs: Runs
    steps: bool

    def run(self, less: Sequence[tuple[str, Collection[Flag]]]) -> None:
        """Run in each layout; each run has a name and the flags that it leaves out."""
        described = []
        for layout in self.request.layouts:
            for name, gone in less:
                kept = [flag for flag in self.flags if flag not in gone]
                run = _described(self.request, kept, layout, name)
                described.append(run | {"steps": self.steps})
        for result in self.host.results(described):
            key = (result["name"], result["layout"])
            self.runs.found.setdefault(key, []).append(result["ranks"])

    def confirm(
        self, compared: Mapping[str, tuple[Collection[Flag], str, Collection[Flag]]]
    ) -> None:
        """Repeat runs that differ from others, and these, as often as an answer needs.

        `compared` has for the name of a run its flags, the other run's name and its flags.
        """
        again: dict[str, Collection[Flag]] = {}
        for name, (gone, base, gone_there) in compared.items():
            for layout in self.request.layouts:
                if verdict.differs(self.runs, name, layout, base):
                    for one, flags in ((name, gone), (base, gone_there)):
                        if not self.runs.is_repeated(one, layout):
                            again[one] = flags
        self.run([*again.items()] * (verdict.REPEATS - 1))


def readings_of(flag: Flag, framework: str, code: Code) -> list[Reading]:
    """Return the lines of a framework's code that read a flag."""
    if framework == "accelerate":
        key = flag.name.upper().removeprefix("FP8_")
        return code.readings(key, f"ACCELERATE_FP8_{key}", flag.name, in_files='"ACCELERATE_FP8_"')
    names = {flag.name, *_ALIASES.get(flag.name, ())}
    return code.readings(*names)


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
    """Return the variables of a script that its runs get: those that the framework may read.

    Their values are numbers and plain words, which name no code and no file.
    """
    return {
        name: value
        for name, value in given.items()
        if (name.startswith(_THEIRS) or code.mentions(name))
        and not name.startswith(_NEVER)
        and is_plain(value)
    }


def _environment(request: Request) -> dict[str, str]:
    """Return this process's environment without settings of frameworks, and the script's."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_THEIRS)}
    environment |= request.environment
    folders = dict.fromkeys(str(folder.parent) for folder in folders_of_ours())
    path = os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH"))))
    return environment | {
        "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


class Host:
    """Hold the process that imports a framework once, and asks it for one run after the other."""

    def __init__(self, request: Request, code: Code, te_version: str, folder: Path) -> None:
        flags = request.flags
        fields = {name for flag in flags for name in (flag.name, *_ALIASES.get(flag.name, ()))}
        self._job = {
            "framework": request.framework, "te_version": te_version,
            "packages": list(code.packages), "sources": [str(folder) for folder in code.folders],
            "fields": sorted(fields),
        }  # fmt: skip
        self._folder = folder
        self._environment = _environment(request) | {"TMPDIR": str(folder)}

    def __enter__(self) -> Self:
        """Start the process."""
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megafp8_migrate.audit.host"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._messages, text=True,
            env=self._environment, cwd=self._folder, start_new_session=True,
        )  # fmt: skip
        self._write(self._job)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the process; without a further run it has nothing to do, and ends itself."""
        if kind is not None:  # it may be in a run, whose ranks are in its group
            until = time.monotonic() + _SECONDS_TO_END
            with suppress(ProcessLookupError):
                while time.monotonic() < until:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.poll()
                    time.sleep(0.01)
        with suppress(BrokenPipeError), self._process:
            pass
        self._messages.close()

    def results(self, runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the result of each run, and say on stderr which one begins.

        Raises:
            RunError: The framework cannot be imported, or the process has ended.
        """
        name = self._job["framework"]
        layouts = {run["layout"] for run in runs}
        for number, run in enumerate(runs, start=1):
            left_out = "" if run["name"] == BASE else "without "
            what = "two training steps" if run["steps"] else "settings"
            where = f", {LAYOUTS[run['layout']]}" if len(layouts) > 1 else ""
            print(f"{number} of {len(runs)}: {what} {left_out or 'with '}{run['name']}{where}",
                  file=sys.stderr, flush=True)  # fmt: skip
            self._write(run)
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if not line:
                raise RunError(f"the process that runs {name} ended before run {number} of "
                               f"{len(runs)}: {_last_line(self._messages)}")  # fmt: skip
            result = json.loads(line)
            if "failed" in result:
                raise RunError(f"{name}: {result['failed']}")
            yield result

    def _write(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as the missing answer tells
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()


def _last_line(messages: IO[bytes]) -> str:
    messages.seek(0)
    lines = messages.read().decode(errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else "it printed nothing"
