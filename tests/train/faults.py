"""What can go wrong, brought about in the process that trains: patches of its own functions."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint import manifest, store
from megafp8.models.init import pieces_of
from megafp8.train import loop, pretrain, step


def killed_in_write(number: int) -> None:
    """The `number`-th write to a checkpoint's tensors leaves half its bytes, then SIGKILL."""
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
    """The `number`-th `manifest.json` gets half its bytes, then SIGKILL."""
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


def killed_before(name: str) -> None:
    """SIGKILL where the end of a run calls `name`: one of `pretrain`'s functions."""

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(pretrain, name, die)


def signalled(number: int, at_step: int, times: int = 1) -> None:
    """This process gets a signal while it computes a step."""

    def send(state: Any) -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    _after_backward([at_step], send)


def nan_gradient(name: str, steps: list[int], times: int | None = None) -> None:
    """A NaN in the gradient of the parameter `name` at these steps, `times` times in all."""
    left = 10**9 if times is None else times

    def spoil(state: Any) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            _of(state, state.masters.grads, name).view(-1)[0] = torch.nan

    _after_backward(steps, spoil)


def infinite_weight(name: str, at_step: int) -> None:
    """An optimizer step makes a weight infinite though its gradients are finite."""
    train_step = loop.train_step

    def spoiled(state: Any, microbatches: Any) -> Any:
        result = train_step(state, microbatches)
        if state.step + 1 == at_step:
            _of(state, state.masters.masters, name).data.view(-1)[0] = torch.inf
            state.masters.write_back()
        return result

    loop.train_step = spoiled


def slow(seconds: float) -> None:
    """Each step takes that much longer."""
    _after_backward(range(10**6), lambda state: time.sleep(seconds))


def hang(at_step: int) -> None:
    """This process does not go on with a step."""
    _after_backward([at_step], lambda state: time.sleep(10**6))


def fail(at_step: int, note: str | None = None) -> None:
    """An error of ours; the file `note` gets the time."""

    def act(state: Any) -> None:
        if note is not None:
            Path(note).write_text(repr(time.time()))
        raise ValueError("the number is 42")

    _after_backward([at_step], act)


def killed(at_step: int, note: str) -> None:
    """SIGKILL from outside; the file `note` gets the time."""

    def act(state: Any) -> None:
        Path(note).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    _after_backward([at_step], act)


def _of(state: Any, tensors: Any, name: str) -> torch.Tensor:
    """The one of `tensors`, which are in the order of the parameters, that belongs to `name`."""
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


def full_disk_at(number: int) -> None:
    """The disk is full during the `number`-th save."""
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


def in_rank(rank: int, *fault: Any) -> None:
    """The launcher starts ranks in one of which `fault` happens."""
    import pretrain_gpt

    launch = pretrain_gpt.launch
    os.environ["TEST_FAULT"] = json.dumps([rank, *fault])
    script = str(Path(__file__).with_name("rank.py"))
    pretrain_gpt.launch = lambda _, *given, **more: launch(script, *given, **more)


def environment(values: dict[str, str]) -> None:
    """Variables that whoever starts the job has set."""
    os.environ.update(values)
