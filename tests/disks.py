"""Let tests not wait for a disk: no test cuts the power, so that nothing depends on the waiting.

Each save of a training job asks the disk several times to write what it holds (`fsync`), which
takes milliseconds each time. Programs that tests start as processes of their own still wait.
"""

from __future__ import annotations

import os


def forget_fsync() -> None:
    """Let `os.fsync` of this process only check its file descriptor."""

    def checked(descriptor: int) -> None:
        os.fstat(descriptor)

    os.fsync = checked  # type: ignore[assignment]
