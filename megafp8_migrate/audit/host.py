"""Run a framework's own code over Transformer Engine's Python on two ranks of the CPU.

    python -P -m megafp8_migrate.audit.host < JOB_AND_RUNS

The first line is the job, and each further one a run, in JSON. The process imports the framework
once. It then forks two ranks for each run, so that no run finds what another has left, and answers
each with one line of JSON. A run without steps ends when the framework has made its configuration
and its recipe of the settings. Nothing is pickled.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megafp8.errors import UserError

RANKS = 2
RUN_SECONDS = 240.0
"""The longest time that one run may take."""
_OF_STAND_IN = re.compile(
    r"torch\.cuda\.|megafp8|fp8_numerics|te_cpu|transformer_engine_torch|\bgloo\b"
    r"|(?<![-_])\bcpu\b(?![-_])|\bH100\b"
    r"|compute capability|\bsm_?\d{2}|\b(on|to) (a |the )?(gpu|cuda)\b"
    r"|\b(gpu|cuda) (device|tensor)",
    re.IGNORECASE,
)
"""What an error says that may come from the CPU in place of a GPU: a type, a file, a device."""
_PACKAGES = ("megafp8", "megafp8_migrate", "te_cpu", "fp8_numerics")
_OF_AUDIT = f"{Path(__file__).resolve().parent}/"
NEEDED = {"megatron": ("triton",), "bridge": ("triton",), "accelerate": ()}
"""Packages that a framework imports, and that CPU builds of torch come without."""
RUNNERS = {"megatron": "with_megatron", "bridge": "with_bridge", "accelerate": "with_accelerate"}


def folders_of_ours() -> list[Path]:
    """Return the folders of our packages, each as this process imports it."""
    specs = (importlib.util.find_spec(name) for name in _PACKAGES)
    return [Path(spec.origin).resolve().parent for spec in specs if spec and spec.origin]


def main() -> int:
    """Read a job and its runs, and print their results; return 1 if the import failed."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the framework prints is no result
    job = json.loads(sys.stdin.readline())
    try:
        train = _prepare(job)
    except Exception as error:  # an import of others' code may raise anything
        print(json.dumps({"failed": _why_not_imported(error, job)}), file=out)
        return 1
    for line in sys.stdin:
        run = json.loads(line)
        result = _run(train, job, run)
        print(json.dumps({"name": run["name"], "layout": run["layout"], **result}), file=out)
        out.flush()
    return 0


def _prepare(job: dict[str, Any]) -> Callable[..., Any]:
    """Import Transformer Engine and the framework; return what trains one rank."""
    from te_cpu.loading import NEEDED as OF_TE

    needed = (*OF_TE, *NEEDED[job["framework"]])
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ModuleNotFoundError(name=" ".join(missing))
    warnings.simplefilter("ignore")
    import torch
    import typing_extensions

    from megafp8_migrate.audit.recording import StepRecorder
    from te_cpu import cuda, load

    typing: Any = importlib.import_module("typing")
    if not hasattr(typing, "override"):  # wheels for Python 3.12 import it
        typing.override = typing_extensions.override
    torch.set_num_threads(1)
    # Memory that nothing has written gets one value, so that tensors without use are equal, too.
    torch.use_deterministic_algorithms(True, warn_only=True)
    recorder = StepRecorder()
    recorder.install_messages()
    sys.path[:0] = job["sources"]
    te = load(job["te_version"])
    cuda.answer_also(job["packages"])
    recorder.install_recipes(te)
    runner = importlib.import_module(f"megafp8_migrate.audit.{RUNNERS[job['framework']]}")
    return runner.prepare(job, recorder)  # type: ignore[no-any-return]


def _why_not_imported(error: Exception, job: dict[str, Any]) -> str:
    """Return why the framework cannot be imported, with what helps."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name and name.partition(".")[0] not in job["packages"]:
        return f"its code needs {name}, which this Python does not have. Run: pip install {name}"
    from te_cpu.errors import TeCpuError

    if isinstance(error, UserError | TeCpuError):
        return str(error)
    where = _place(error, job) or "an unknown place"
    return (f"its code cannot be imported here ({_said(error)}, at {where}). Give another version "
            "with --source, or of --te")  # fmt: skip


def _run(train: Callable[..., Any], job: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of one run, and return their results by rank."""
    with tempfile.TemporaryDirectory(prefix="megafp8-audit-") as folder:
        children = [_fork(rank, train, job, run, folder) for rank in range(RANKS)]
        _wait(children)
        results = []
        for rank in range(RANKS):
            file = Path(folder, f"result{rank}")
            done = json.loads(file.read_text()) if file.exists() else {"failed": "it did not end"}
            results.append(done)
    return {"ranks": results}


def _fork(
    rank: int, train: Callable[..., Any], job: dict[str, Any], run: dict[str, Any], folder: str
) -> int:
    child = os.fork()
    if child:
        return child
    try:
        result = _rank(rank, train, job, run, folder)
        draft = Path(folder, f"draft{rank}")
        draft.write_text(json.dumps(result))
        draft.rename(Path(folder, f"result{rank}"))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _rank(
    rank: int, train: Callable[..., Any], job: dict[str, Any], run: dict[str, Any], folder: str
) -> dict[str, Any]:
    """Train as one rank; return the record, and what stopped it if it did not reach the end."""
    import torch
    import torch.distributed as dist

    os.environ.update(
        WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), RANK=str(rank), LOCAL_RANK=str(rank)
    )
    record: dict[str, Any] = {"step": {}}
    messages = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # ends with the process
    sys.stdout = sys.stderr = messages
    torch.manual_seed(1234)
    try:
        store = dist.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        train(run, rank, record)
    except SystemExit as error:
        messages.seek(0)
        said = (messages.read().strip().splitlines() or ["it ended"])[-1][:500]
        if _frames(error)[-1].filename.endswith("/argparse.py"):
            record["refused"] = {"reason": said, "where": "its parser of arguments"}
        else:
            record["failed"] = f"{said} (it ended itself)"
    except Exception as error:
        if _is_ours(error):
            record["lacks"] = f"{_said(error)} ({_place(error, job) or 'outside of its code'})"
        elif place := _refusal(error, job):
            record["refused"] = {"reason": _said(error), "where": place}
        else:
            record["failed"] = f"{_said(error)} ({_place(error, job) or 'outside of its code'})"
    return record


def _wait(children: list[int]) -> None:
    """Wait for the ranks; end those that are still there when the time is over.

    A rank whose partner has ended would wait for its messages.
    """
    until, left = time.monotonic() + RUN_SECONDS, list(children)
    while left:
        ended = [child for child in left if os.waitpid(child, os.WNOHANG)[0]]
        left = [child for child in left if child not in ended]
        if ended and left:
            until = min(until, time.monotonic() + 20)
        if left and time.monotonic() > until:
            for child in left:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return
        time.sleep(0.02)


def _is_ours(error: BaseException) -> bool:
    """Whether an error comes from the CPU in place of a GPU, and not from a setting.

    Our code then has raised it or one that led to it, or it names what our code has answered.
    """
    from te_cpu.errors import TeCpuError

    ours = tuple(f"{folder}/" for folder in folders_of_ours())
    seen: BaseException | None = error
    while seen is not None:
        frames = _frames(seen)
        if isinstance(seen, TeCpuError) or _OF_STAND_IN.search(str(seen)):
            return True
        last = frames[-1].filename if frames else ""
        if last.startswith(ours) and not last.startswith(_OF_AUDIT):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def _place(error: BaseException, job: dict[str, Any]) -> str:
    """Return the last line of the framework's code on the way to an error."""
    places = (shown(frame.filename, frame.lineno or 0, job) for frame in _frames(error)[::-1])
    return next((place for place in places if place), "")


def _refusal(error: BaseException, job: dict[str, Any]) -> str:
    """Return the line that refuses a setting: it raises, in the framework's code or TE's."""
    frames = _frames(error)
    if not frames:
        return ""
    last = frames[-1]
    place = shown(last.filename, last.lineno or 0, job)
    if not place and "/transformer_engine/" in last.filename:
        place = f"transformer_engine/{last.filename.rpartition('/transformer_engine/')[2]}"
        place += f":{last.lineno}"
    return place if _raises(last.filename, last.lineno or 0) else ""


def _raises(file: str, line: int) -> bool:
    """Whether a line belongs to a statement that raises an error."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return False
    return any(
        node.lineno <= line <= (node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise | ast.Assert)
    )


def shown(file: str, line: int, job: dict[str, Any]) -> str:
    """Return a place as `package/file.py:line` if the file is one of the framework's; else ""."""
    for source in job["sources"]:
        if file.startswith(f"{source}/"):
            inner = file.removeprefix(f"{source}/")
            if inner.split("/")[0] in job["packages"]:
                return f"{inner}:{line}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
