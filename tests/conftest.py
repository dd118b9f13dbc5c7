"""Configure all tests: how much of the machine they use, and which tests a machine can run."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this variable at its first
# import, which torchao may do. The second file is there on Linux inside of Windows.
if not any(map(os.path.exists, ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"))):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests and the processes that they start get one thread each: workers of pytest-xdist share the
# cores, and the bits of a sum can depend on the number of threads, while tests compare the bits of
# processes. The variable must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under `nohup` a process ignores SIGHUP, and in the background of a shell Ctrl-C. A handler ends
# where a process starts another program, so that the runs which tests start hear these signals.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

from tests.asked import asked_for
from tests.disks import forget_fsync
from tests.triton_interpreter import prepare_once

if TYPE_CHECKING:
    from tests.train.runs import Driver

forget_fsync()
# There is no deadline, since a shared machine may pause. CI uses the same examples every time.
settings.register_profile(
    "local", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection() -> None:
    """Look for no garbage while tests are collected: nearly all that is made stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let Python look for garbage again."""
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` without a CUDA device, and fail if they are asked for."""
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        if asked_for("gpu", config.option.markexpr):
            raise pytest.UsageError(
                "the tests that need a CUDA device were asked for, and PyTorch finds none. Use a "
                "CUDA build of PyTorch on a machine with an NVIDIA GPU and its driver"
            )
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


MANY_MODULES = 50
frozen_modules = 0


def pytest_runtest_setup() -> None:
    """Leave modules and tests out of the garbage that Python looks for, once they are there.

    They are nearly a million objects, through which each `gc.collect()` of a dry run would go for
    half a second. A dry run imports more of torch, so that this is done again after many imports.
    """
    global frozen_modules
    if len(sys.modules) >= frozen_modules + MANY_MODULES:
        gc.collect()
        gc.freeze()
        frozen_modules = len(sys.modules)


def pytest_runtest_call() -> None:
    """Let Triton's interpreter prepare its language once a launch, where it has been imported."""
    if "triton.runtime.interpreter" in sys.modules:
        prepare_once()


def pytest_unconfigure() -> None:
    """Let Python free what it left out: libraries report what is still there at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    """Return a process that has imported torch, whose forks run jobs and other programs."""
    from tests.train.runs import Driver

    driver = Driver()
    yield driver
    driver.close()
