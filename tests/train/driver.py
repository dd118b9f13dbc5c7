"""Run jobs in forked children: what a `pretrain_gpt.py` process does, without its start-up.

If the job is a launcher, its ranks are forks too. Requests come from stdin, one JSON in each line,
and each is answered by a line:

    {"argv": […], "cwd": …, "log": …, "fault": [name, arguments…] or null}  ->  process id
    {"python": [words after `python`], "cwd": …, "stdout": …, "stderr": …, "env": …}  ->  process id
    the same with "stdin": …, which leads a session and has no variables but those of "env"
    {"wait": process id, "seconds": …}  ->  exit code (negative: a signal), or null if it runs

Torch has started no thread in this process, so that children may start some. The settings of most
jobs of tests are composed once before, so that Hydra's parsers and plugins are in each child.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from pathlib import Path

PROMPT_TOKENS, SAMPLE_TOKENS = 30, 4  # together more than 32, the positions of most jobs of tests
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import rich.console  # noqa: E402, F401
import torch._dynamo  # noqa: E402

import megafp8.backends.native  # noqa: E402, F401  # which each job imports, as rich
import megafp8.optim.adamw  # noqa: E402, F401
import megafp8.parallel.pipeline_runner  # noqa: E402, F401  # which imports FSDP too
import megafp8.train.pretrain  # noqa: E402, F401
from megafp8.cli import pretrain  # noqa: E402
from megafp8.cli.job import app_info, parse_options  # noqa: E402
from megafp8.cli.main import run_app  # noqa: E402
from megafp8.config.load import load_all  # noqa: E402
from megafp8.train.report import summary  # noqa: E402
from tests.disks import forget_fsync  # noqa: E402
from tests.train import faults, forked_ranks  # noqa: E402
from tests.train.runs import JOB  # noqa: E402


def start(request: dict) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if "stdin" in request:
            os.setsid()  # before a terminal is opened, which is this session's then
        os.dup2(os.open(request.get("stdin", os.devnull), os.O_RDONLY), 0)
        for target, name in ((1, "stdout"), (2, "stderr")):
            path = request.get("log") or request[name]
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), target)
        os.chdir(request["cwd"])
        if "python" in request:
            if "stdin" in request:
                os.environ.clear()
                sys.stdin = open(0, closefd=False)  # noqa: SIM115  # requests may be in the other
            os.environ.update(request["env"])
            torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
            code = run_python(request["python"])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        name, *arguments = request["fault"] or [None]
        if name in (None, "in_rank"):  # other faults happen in this process, not in its ranks
            forked_ranks.install()
        if name is not None:
            getattr(faults, name)(*arguments)
        sys.argv = ["pretrain_gpt.py", *request["argv"]]
        code = run_app(request["argv"], pretrain.task, gpu_available=pretrain.gpu_available)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def run_python(words: list[str]) -> int:
    """Do what `python WORDS…` does, and return its exit code; ranks that it launches are forks."""
    forked_ranks.install()
    tempfile.tempdir = None  # read from the environment again
    kind, *arguments = words
    sys.argv = [kind, *arguments]
    try:
        if kind == "-c":
            sys.argv = ["-c", *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        elif kind == "-m":
            sys.argv = arguments
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(kind).resolve().parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        return int(leaving.code or 0) if not isinstance(leaving.code, str) else 1
    return 0


def wait(child: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    forget_fsync()
    # Each drawn token is a pass of the model: of 26, a job of tests spends a sixth of its time.
    summary.PROMPT_TOKENS, summary.SAMPLE_TOKENS = PROMPT_TOKENS, SAMPLE_TOKENS
    options = parse_options(JOB)
    app_info(load_all(options.overrides), options)
    gc.collect()
    gc.freeze()  # jobs look for garbage among their own objects, and share the memory of these
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = wait(request["wait"], request["seconds"])
        else:
            answer = start(request)
        print(json.dumps(answer), file=answers, flush=True)
    gc.unfreeze()


if __name__ == "__main__":
    main()
