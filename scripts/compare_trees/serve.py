"""Run commands of one tree in forked children: `python serve.py TREE PACKAGE…`, requests on stdin.

A child does what a `python SCRIPT` of that tree does, without the seconds that importing torch
takes. A request is a line of JSON; the answer is a line when the command has ended:

    {"run": "pretrain_gpt.py" or "-m module", "argv": […], "cwd": …, "log": …, "ranks": 2,
     "kill_at": a path or null, "timeout": seconds}  ->  exit code (negative: a signal's number)

The commands are killed as soon as the file `kill_at` exists. This file imports no module of the
tree by name; modules that one command has imported are loaded for the commands after it. A command
that has imported a PACKAGE from elsewhere than the tree fails, whatever the tree contains.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

GRACE_SECONDS = 10.0  # for the other ranks, after one has failed
TIMED_OUT = 124  # the exit code of the program `timeout`
FROM_ELSEWHERE = 70  # the exit code of a command that has imported a package of another tree


def serve(tree: Path, packages: list[str]) -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[0] = str(tree)
    torch = importlib.import_module("torch")  # it starts no thread: children may
    torch.manual_seed(0)  # a run that draws no number saves this initial state
    for line in sys.stdin:
        request = json.loads(line)
        code = run(tree, packages, request)
        print(code, file=answers, flush=True)


def run(tree: Path, packages: list[str], request: dict) -> int:
    """Run a command on its ranks, and return the exit code."""
    size, seen = request["ranks"], Path(request["log"]).with_suffix(".modules")
    port = free_port() if size > 1 else 0
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            be_rank(tree, packages, request, rank, port, seen)
        with contextlib.suppress(OSError):  # parent and child both try, and one is first
            os.setpgid(child, child)
        children.append(child)
    codes: dict[int, int] = {}
    try:
        code = watch(children, codes, request)
    finally:
        kill(children, codes)  # ranks still run if the comparison is interrupted
    if seen.exists():  # the next command's fork then has these modules already
        for name in seen.read_text().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        seen.unlink()
    return code


def be_rank(
    tree: Path, packages: list[str], request: dict, rank: int, port: int, seen: Path
) -> NoReturn:
    """Run one rank of a command in this forked process, and exit."""
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(request["cwd"])
        if request["ranks"] > 1:
            os.environ.update(environment(rank, request["ranks"], port))
        if rank == 0:
            os._exit = noting_modules(tree, packages, seen)  # ranks exit by this function too
        code = command(tree, request["run"], request["argv"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def noting_modules(tree: Path, packages: list[str], path: Path) -> Callable[[int], NoReturn]:
    """Return an `os._exit` that first writes the names of the imported modules of the packages."""
    leave = os._exit

    def noting(code: int) -> NoReturn:
        names = [name for name in sys.modules if name.partition(".")[0] in packages]
        path.write_text("\n".join(names))
        for name in packages:
            file = getattr(sys.modules.get(name), "__file__", None)
            if file and not Path(file).resolve().is_relative_to(tree.resolve()):
                print(f"error: {name} is imported from {file}, not from {tree}", file=sys.stderr)
                sys.stderr.flush()
                leave(FROM_ELSEWHERE)
        leave(code)

    return noting


def command(tree: Path, script: str, argv: list[str]) -> int:
    """Run a script, or the `main` of a module; return the exit code of `python SCRIPT ARGV…`."""
    sys.argv = [script, *argv]
    try:
        if script.startswith("-m "):
            return int(importlib.import_module(script[3:]).main(argv))
        else:
            runpy.run_path(str(tree / script), run_name="__main__")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment that `srun` or another launcher gives to a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def watch(children: list[int], codes: dict[int, int], request: dict) -> int:
    """Wait for all children and fill `codes`; return the code of the first failure, or 0."""
    deadline, timed_out = time.monotonic() + request["timeout"], False
    kill_at = request["kill_at"] and Path(request["cwd"], request["kill_at"])
    while len(codes) < len(children):
        for child in [child for child in children if child not in codes]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if kill_at and kill_at.exists():
            kill(children, codes)
        if time.monotonic() > deadline:
            timed_out = not any(codes.values())
            kill(children, codes)
        time.sleep(0.002)
    failures = [code for code in codes.values() if code]
    return TIMED_OUT if timed_out else failures[0] if failures else 0


def kill(children: list[int], codes: dict[int, int]) -> None:
    """Kill the children that have not ended, with all that they have started."""
    for child in children:
        if child not in codes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(Path(sys.argv[1]), sys.argv[2:])
