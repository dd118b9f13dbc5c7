"""Run a program over Transformer Engine's Python, as `python` would run it on a GPU.

    python -m te_cpu run [--te-version VERSION] SCRIPT [ARG …]
    python -m te_cpu run [--te-version VERSION] -m MODULE [ARG …]
    torchrun --nproc-per-node 2 -m te_cpu run SCRIPT [ARG …]

Transformer Engine is loaded first. All code but torch's own is then answered as if there were an
H100. The program is `__main__`, with its own arguments; its errors and exit code are its own.
"""

from __future__ import annotations

import argparse
import builtins
import json
import multiprocessing.spawn
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from te_cpu import cuda, wheel
from te_cpu.errors import VersionError
from te_cpu.loading import load
from te_cpu.versions import DEFAULT_VERSION

MAIN = "TE_CPU_RUN"
"""The environment variable that tells processes which a program spawns what to load."""


def main(argv: Sequence[str]) -> int:
    """Run a script or a module; return 2 if it cannot be started."""
    usage = "%(prog)s [-h] [--te-version VERSION] (SCRIPT | -m MODULE) [ARG …]"
    about = "Run a program over Transformer Engine's own Python, on a CPU in place of a GPU."
    parser = argparse.ArgumentParser("python -m te_cpu run", usage, about, allow_abbrev=False)
    version = f"of Transformer Engine, or the path of its wheel (default {DEFAULT_VERSION})"
    parser.add_argument("--te-version", metavar="VERSION", default=DEFAULT_VERSION, help=version)
    module = "run a module, found as by `python -m`; what follows are its arguments"
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=module)
    script = "a file of Python code, and its arguments"
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help=script)
    given = parser.parse_args(argv)
    words = given.module if given.module is not None else given.script
    if not words:
        parser.error("name a SCRIPT, or a MODULE after -m")
    try:
        text = None if given.module is not None else Path(words[0]).read_bytes()
    except OSError as error:
        hint = "Name a file of Python code, or a module after -m"
        return _refused(f"{words[0]}: {error.strerror}. {hint}")
    if text is not None and not sys.flags.safe_path:
        sys.path[0] = str(Path(words[0]).resolve().parent)
    try:
        load(given.te_version)
    except VersionError as error:
        return _refused(str(error))
    cuda.answer_everyone()
    sys.argv = [*words]
    try:
        if text is not None:
            file = str(Path.cwd() / words[0])
            _execute(file, None, compile(text, file, "exec", dont_inherit=True))
        elif (found := _module(words[0])) is not None:
            sys.argv[0] = str(found[0].origin)
            _execute(sys.argv[0], *found)
        else:
            hint = "-m takes the name of a module, such as package.module, and no path"
            return _refused(f"No module named {words[0]} can be run. {hint}")
    except SystemExit:
        raise
    except BaseException as error:
        _show_the_program_alone(error.__traceback__)
        raise
    return 0


def _refused(reason: str) -> int:
    print(f"te_cpu run: {reason}", file=sys.stderr)
    return 2


def _module(name: str) -> tuple[ModuleSpec, CodeType] | None:
    """Return a module's specification and code, of a package those of its `__main__`."""
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a package of the program lacks something
        return None
    loader: Any = spec and spec.loader
    code = loader.get_code(spec.name) if spec and hasattr(loader, "get_code") else None
    return None if spec is None or code is None else (spec, code)


def _execute(file: str, spec: ModuleSpec | None, code: CodeType) -> None:
    """Run code as the module `__main__`, which stays in its place when the code has ended."""
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = file, spec
    module.__package__ = spec.parent if spec else None
    module.__loader__ = spec.loader if spec else SourceFileLoader("__main__", file)
    module.__dict__.update(__builtins__=builtins, __cached__=spec.cached if spec else None)
    sys.modules["__main__"] = module
    _load_in_spawned_processes(file, spec)
    exec(code, module.__dict__)


def _load_in_spawned_processes(file: str, spec: ModuleSpec | None) -> None:
    """Let processes that the program spawns load Transformer Engine before the program's file.

    `multiprocessing` imports the main module there first; it gets the name of `te_cpu.spawned`.
    """
    loaded = wheel.loaded()
    assert loaded is not None
    module = spec.name if spec else None
    described = {"version": loaded.version, "file": file, "module": module}
    os.environ[MAIN] = json.dumps(described)
    spawn: Any = multiprocessing.spawn
    real = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = real(name)
        if data.pop("init_main_from_path", None) or "init_main_from_name" in data:
            data["init_main_from_name"] = "te_cpu.spawned"
        return data

    spawn.get_preparation_data = get_preparation_data


def _show_the_program_alone(trace: TracebackType | None) -> None:
    """Let an error's text begin where the program does."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    show = sys.excepthook
    sys.excepthook = lambda kind, value, _: show(kind, value.with_traceback(trace), trace)
