"""Faults of a training process, which are made by patching its own functions."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megafp8 import files
from megafp8.checkpoint import manifest, step_directories, store
from megafp8.models.init import pieces_of
from megafp8.models.router import Router
from megafp8.parallel import watchdog
from megafp8.report.record import read_run
from megafp8.runs import same_data, tokenizer
from megafp8.runs.lock import is_locked
from megafp8.train import (
    background_saver,
    generate,
    loop,
    pretrain,
    saver,
    state_dict,
    step,
    validate,
)
from megafp8.train.background_saver import BackgroundSaver


def killed_in_write(number: int) -> None:
    """Write half of the bytes in the `number`-th write to a checkpoint's tensors, then SIGKILL."""
    write = os.write
    left = number

    def torn(descriptor: int, content: Any) -> int:
        nonlocal left
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if ".staging-" in path and path.endswith(".safetensors"):
            left -= 1
            if left == 0:
                half = len(content) // 2
                assert 0 < write(descriptor, content[:half]) == half
                os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, content)

    os.write = torn


def killed_in_manifest(number: int) -> None:
    """Write half of the bytes of the `number`-th `manifest.json`, then SIGKILL."""
    write = manifest.write_durably
    left = number

    def torn(path: Path, content: bytes) -> None:
        nonlocal left
        left -= path.name == manifest.MANIFEST_NAME
        if left == 0:
            path.write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)

    manifest.write_durably = torn


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_before(module: Any, name: str) -> Callable[[Callable[[], bool]], None]:
    def plant(is_due: Callable[[], bool]) -> None:
        function = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if is_due():
                _dies()
            return function(*args, **kwargs)

        setattr(module, name, wrapped)

    return plant


def _killed_after(module: Any, name: str) -> Callable[[Callable[[], bool]], None]:
    def plant(is_due: Callable[[], bool]) -> None:
        function = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if is_due():
                _dies()
            return result

        setattr(module, name, wrapped)

    return plant


def _killed_in_copy(is_due: Callable[[], bool]) -> None:
    placements = state_dict.placements

    def some(state: Any) -> Any:
        dies = is_due()
        for index, placement in enumerate(placements(state)):
            if dies and index == 7:
                _dies()
            yield placement

    state_dict.placements = some


def _killed_in_durable(file_name: str) -> Callable[[Callable[[], bool]], None]:
    """Return a point at which half of a small file's bytes are written."""

    def plant(is_due: Callable[[], bool]) -> None:
        write = manifest.write_durably

        def torn(path: Path, content: bytes) -> None:
            if path.name == file_name and is_due():
                path.write_bytes(content[: len(content) // 2])
                _dies()
            write(path, content)

        manifest.write_durably = torn

    return plant


def _killed_at_rename(prefix: str, after: bool) -> Callable[[Callable[[], bool]], None]:
    """Return a point before or after a rename to a name with this beginning."""

    def plant(is_due: Callable[[], bool]) -> None:
        rename = os.rename

        def wrapped(source: Any, target: Any, **kwargs: Any) -> None:
            dies = Path(target).name.startswith(prefix) and is_due()
            if dies and not after:
                _dies()
            rename(source, target, **kwargs)
            if dies:
                _dies()

        os.rename = wrapped

    return plant


def _killed_in_removal(is_due: Callable[[], bool]) -> None:
    def half(path: Path) -> None:
        if is_due():
            for file in sorted(path.iterdir())[:1]:  # empty if a kill came at the very start
                file.unlink()
            _dies()
        files.remove_tree(path)

    step_directories.remove_tree = half


POINTS: dict[str, Callable[[Callable[[], bool]], None]] = {
    "in the copy": _killed_in_copy,
    "copied": _killed_before(saver.Saver, "write"),
    "checked for NaN": _killed_after(saver, "first_known"),
    "staging made": _killed_after(store, "begin"),
    "tensors in the file": _killed_after(store, "write_safetensors"),
    "shard on the disk": _killed_after(store, "write_shard"),
    "ranks agree": _killed_before(store, "commit"),
    "manifest half": _killed_in_durable(manifest.MANIFEST_NAME),
    "hash half": _killed_in_durable(manifest.MANIFEST_HASH_NAME),
    "manifest written": _killed_after(store, "write_manifest"),
    "before the rename": _killed_at_rename("step_", after=False),
    "after the rename": _killed_at_rename("step_", after=True),
    "committed": _killed_after(store, "commit"),
    "reading back": _killed_before(store, "verify"),
    "before an old one goes": _killed_at_rename(".trash-", after=False),
    "an old one is trash": _killed_at_rename(".trash-", after=True),
    "an old one half removed": _killed_in_removal,
    "pruned": _killed_after(store, "prune"),
    "written": _killed_after(saver.Saver, "write"),
}
"""Named points of a save, in their order."""
MAIN_RANKS = {name for name in list(POINTS)[6:-1]} | {"staging made"}
"""Only the main rank reaches these points."""
ASYNC_POINTS: dict[str, Callable[[Callable[[], bool]], None]] = {
    "asked for": _killed_before(background_saver.BackgroundSaver, "start"),
    "begun": _killed_after(background_saver.BackgroundSaver, "start"),
    "waited for": _killed_before(background_saver.BackgroundSaver, "wait"),
    "reported": _killed_after(loop, "finish_background_save"),
}


def killed_at(point: str, number: int) -> None:
    """SIGKILL this process when it reaches `point` of a save for the `number`-th time."""
    left = number

    def is_due() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    (POINTS | ASYNC_POINTS)[point](is_due)


def both(*faults: list[Any]) -> None:
    """Install several faults."""
    for name, *arguments in faults:
        globals()[name](*arguments)


def slow_saves(seconds: float) -> None:
    """Make each write of a tensors' file take longer by `seconds`."""
    write = store.write_safetensors

    def slowly(*args: Any) -> Any:
        time.sleep(seconds)
        return write(*args)

    store.write_safetensors = slowly


def saves_last_until_waited_for() -> None:
    """Let each checkpoint in the background be written when training has begun to wait for it."""
    write, wait = store.write_safetensors, BackgroundSaver.wait
    waited_for = threading.Event()

    def held(*args: Any) -> Any:
        if threading.current_thread().name == "checkpoint":
            waited_for.wait()
        return write(*args)

    def begin_to_wait(saver: BackgroundSaver) -> Any:
        waited_for.set()
        try:
            return wait(saver)
        finally:
            waited_for.clear()

    store.write_safetensors, BackgroundSaver.wait = held, begin_to_wait


def save_ends_within(at_step: int) -> None:
    """Let the step `at_step` last until the checkpoint in the background is written or failed."""

    def join(state: Any) -> None:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()

    _after_backward([at_step], join)


def killed_before(name: str) -> None:
    """SIGKILL this process when the end of a run calls `name`, a function of `pretrain`."""

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(pretrain, name, die)


def signalled(number: int, at_step: int, times: int = 1) -> None:
    """Send this process a signal while it computes a step."""

    def send(state: Any) -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    _after_backward([at_step], send)


def nan_gradient(name: str, steps: list[int], times: int | None = None) -> None:
    """Put a NaN into the gradient of the parameter `name` at these steps, `times` times in all."""
    left = 10**9 if times is None else times

    def spoil(state: Any) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            _of(state, state.masters.grads, name).view(-1)[0] = torch.nan

    _after_backward(steps, spoil)


def no_finite_logits() -> None:
    """Let the logits of every sample be NaN; training and validation stay as they are."""
    generate.whole_logits = lambda *args: torch.full((1, 4096, 4096), torch.nan)


def killed_in_microbatch(at_step: int, index: int) -> None:
    """SIGKILL this process before the microbatch `index` (from 0) of a step; a step has two."""
    left = 2 * (at_step - 1) + index + 1

    def is_due() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    _killed_before(step, "local_batch")(is_due)


def infinite_weight(name: str, at_step: int) -> None:
    """Make a weight infinite in an optimizer step whose gradients are finite."""
    train_step = loop.train_step

    def spoiled(state: Any, *args: Any) -> Any:
        result = train_step(state, *args)
        if state.step + 1 == at_step:
            _of(state, state.masters.masters, name).data.view(-1)[0] = torch.inf
            state.masters.write_back()
        return result

    loop.train_step = spoiled


def slow(seconds: float) -> None:
    """Make each step take longer by `seconds`."""
    _after_backward(range(10**6), lambda state: time.sleep(seconds))


def steps_of_seconds(seconds: float) -> None:
    """Let the loop's clock show that each step took so long, and that nothing else took time."""
    passed = time.monotonic()

    def advance(state: Any) -> None:
        nonlocal passed
        passed += seconds

    _after_backward(range(10**6), advance)
    loop.time = SimpleNamespace(  # type: ignore[assignment]
        monotonic=lambda: passed, perf_counter=time.perf_counter
    )


def hang(rank: int, at_step: int, note: str, in_experts: bool = False) -> None:
    """Make one rank hang in a step; then the other ranks' watchdogs find that much time has passed
    as soon as their ranks wait, and its own one after them. All ranks must have this fault.

    The ranks agree by the files `note` and `note`.waits.
    """
    hangs, waits = Path(note), Path(f"{note}.waits")
    is_mine, main = rank == int(os.environ["RANK"]), threading.get_ident()

    def monotonic() -> float:
        is_over = waits.exists() if is_mine else hangs.exists()
        if is_over and not is_mine:
            is_over = watchdog.is_waiting(sys._current_frames().get(main))
            if is_over:
                waits.touch()
        return time.monotonic() + is_over * 10**6

    def act(state: Any) -> None:
        hangs.touch()
        time.sleep(10**6)

    watchdog.time = SimpleNamespace(  # type: ignore[assignment]
        monotonic=monotonic, sleep=time.sleep
    )
    if is_mine:
        (_in_experts if in_experts else _after_backward)([at_step], act)


def fail(at_step: int, in_experts: bool = False) -> None:
    """Raise an error that no part of megafp8 expects."""

    def act(state: Any) -> None:
        raise ValueError("the number is 42")

    (_in_experts if in_experts else _after_backward)([at_step], act)


def killed(at_step: int) -> None:
    """SIGKILL this process from outside."""

    def act(state: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _after_backward([at_step], act)


def _of(state: Any, tensors: Any, name: str) -> torch.Tensor:
    """Return the tensor of the parameter `name`; `tensors` are in the order of the parameters."""
    for param, tensor in zip(state.masters.params, tensors, strict=True):
        if pieces_of(param)[0].name == name:
            return tensor
    raise AssertionError(f"no {name}")


def _after_backward(steps: Any, act: Callable[[Any], None]) -> None:
    forward_backward = step.forward_backward

    def wrapped(state: Any, microbatches: Any) -> Any:
        sums = forward_backward(state, microbatches)
        if state.step + 1 in steps:
            act(state)
        return sums

    step.forward_backward = wrapped


def _in_experts(steps: Any, act: Callable[[Any], None]) -> None:
    """Act in the first layer with experts that a step runs, between its router and its experts."""
    forward_backward, choose = step.forward_backward, Router.forward
    due: list[Any] = []

    def wrapped(state: Any, microbatches: Any) -> Any:
        due[:] = [state] if state.step + 1 in steps else []
        return forward_backward(state, microbatches)

    def acting(router: Router, *args: Any) -> Any:
        if due:
            act(due.pop())
        return choose(router, *args)

    step.forward_backward = wrapped
    Router.forward = acting  # type: ignore[method-assign]


def full_disk_at(number: int) -> None:
    """Make the disk full during the `number`-th save."""
    write_shard = store.write_shard
    write = os.write
    saves = 0

    def full(descriptor: int, content: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save(*args: Any) -> Any:
        nonlocal saves
        saves += 1
        os.write = full if saves == number else write
        try:
            return write_shard(*args)
        finally:
            os.write = write

    store.write_shard = save


def reads_other_data(prefix: str) -> None:
    """Open the dataset `prefix` instead of the run's, as a host with a copy of its own does."""
    open_data = same_data.open_data
    same_data.open_data = lambda spec, notify: open_data(replace(spec, prefix=prefix), notify)


def in_rank(rank: int | None, *fault: Any) -> None:
    """Let the launcher start ranks, in one of which `fault` happens; in all of them with None."""
    from megafp8.cli import pretrain

    launch = pretrain.launch
    os.environ["TEST_FAULT"] = json.dumps([rank, *fault])
    script = str(Path(__file__).with_name("rank.py"))
    pretrain.launch = lambda _, *given, **more: launch([script], *given, **more)


def environment(values: dict[str, str]) -> None:
    """Set environment variables, as the program that starts a job may."""
    os.environ.update(values)


def broken_wandb(error: str) -> None:
    """Put a wandb in place that cannot begin a run, not even offline."""

    def init(**_: object) -> None:
        raise RuntimeError(error)

    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = init  # type: ignore[attr-defined]
    sys.modules["wandb"] = module


def signalled_in_validation(number: int, times: int) -> None:
    """Send this process a signal within its `times`-th validation."""
    evaluate = validate.evaluate
    left = times

    def wrapped(state: Any, batches: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)
        return evaluate(state, batches)

    validate.evaluate = wrapped


def signalled_in_stall(number: int, at_step: int, seconds: float) -> None:
    """Delay the data of a step, and send a signal meanwhile."""
    import threading
    import time

    following = loop.Loader.__next__
    steps = 0

    def late(loader: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == at_step:
            threading.Timer(seconds / 2, os.kill, (os.getpid(), number)).start()
            time.sleep(seconds)
        return following(loader)

    loop.Loader.__next__ = late  # type: ignore[method-assign]


def little_disk_space(num_bytes: int) -> None:
    """Let the file system report little free space."""
    statvfs = os.statvfs

    def small(path: Any) -> os.statvfs_result:
        fields = list(statvfs(path))
        fields[1], fields[4] = 1, num_bytes  # f_frsize, f_bavail
        return os.statvfs_result(fields)

    os.statvfs = small


def watched_jobs(note: str) -> None:
    """After each job of this process, write to `note` what it has left in its directory."""
    run_job = pretrain.pretrain

    def watched(spec: Any, **more: Any) -> int:
        path = Path(spec.observe.explicit_log_dir)
        try:
            return run_job(spec, **more)
        finally:
            links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
            left = {
                "status": read_run(path).status,
                "is_locked": is_locked(path),
                "open": [name for name in map(os.readlink, links) if name.startswith(str(path))],
            }
            with open(note, "a") as file:
                file.write(json.dumps(left) + "\n")

    pretrain.pretrain = watched


def failing_pwrite(number: int) -> None:
    """Let each `pwrite` fail from now on; the lock of a run is written so."""

    def fails(descriptor: int, content: bytes, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    os.pwrite = fails


def failing_tokenizer(number: int) -> None:
    """Let the copy of the tokenizer in the run's directory fail."""

    def fails(draft: Path, path: Path) -> Path:
        raise OSError(number, os.strerror(number))

    tokenizer.put = fails


def failing_fsync(number: int) -> None:
    """Let each `fsync` fail from now on."""

    def fails(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    os.fsync = fails
