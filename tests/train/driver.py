"""Run jobs in forked children: what a `pretrain_gpt.py` process does, without its start-up.

If the job is a launcher, its ranks are forks too. Requests come from stdin, one JSON in each line,
and each is answered by a line:

    {"argv": […], "cwd": …, "log": …, "fault": [name, arguments…] or null}  ->  process id
    {"wait": process id, "seconds": …}  ->  exit code (negative: a signal), or null if it runs

Torch has started no thread in this process, so that children may start some.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import megafp8.parallel.pipeline_runner  # noqa: E402, F401  # which imports FSDP too
import megafp8.train.pretrain  # noqa: E402, F401
from megafp8.cli import pretrain  # noqa: E402
from megafp8.cli.main import run_app  # noqa: E402
from tests.train import faults, forked_ranks  # noqa: E402


def start(request: dict) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(request["cwd"])
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
