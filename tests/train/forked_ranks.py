"""Start the ranks of `megafp8.parallel.launch` as forks of the launcher, which has imported torch.

A rank that is a process of its own would first import torch and megafp8, which takes seconds.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from megafp8.parallel import launch

FIRST_FREE = 3  # file descriptors after stdin, stdout and stderr


class ForkedRank:
    """Imitate what `launch` uses of `subprocess.Popen`, for `python -u SCRIPT ARGUMENTS…`."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool
    ) -> None:
        assert start_new_session and command[:2] == [sys.executable, "-u"]
        sys.stdout.flush()
        sys.stderr.flush()
        ready, leads_session = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _be_rank(list(command[2:]), env)
        os.close(leads_session)
        os.read(ready, 1)  # until the child leads its own session
        os.close(ready)
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _reap(self, options: int) -> int | None:
        if self._code is None:
            done, status = os.waitpid(self.pid, options)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


def _be_rank(argv: list[str], environment: Mapping[str, str]) -> None:
    code = 1
    try:
        os.setsid()
        os.closerange(FIRST_FREE, 1024)  # the launcher's connections, and the pipe that it waits on
        for number in launch.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # as `-u` does
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def install() -> None:
    """Let `launch` in this process fork its ranks from now on."""
    launch.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedRank})  # type: ignore[assignment]
