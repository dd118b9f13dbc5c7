"""The commands of megafp8, and the parts of the command line that they have in common.

An import of this package lets Ctrl-C end the process with one line instead of a traceback, from now
on. So that this also holds for the seconds in which torch is imported, scripts import the package
first; `python -m megafp8.cli.NAME` does so by itself.
"""

from __future__ import annotations

import os
import signal
import sys
from types import TracebackType

_former_hook = sys.excepthook


def is_first_rank() -> bool:
    """Whether this process is rank 0, or no rank at all: what all ranks have to say, it says."""
    return os.environ.get("RANK", "0") == "0"


def _report_interrupt(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End the process after a KeyboardInterrupt that nothing has caught; leave others as they are.

    An interactive Python continues. Of several ranks only the first one prints the line.
    """
    if not issubclass(kind, KeyboardInterrupt) or hasattr(sys, "ps1") or sys.flags.interactive:
        _former_hook(kind, error, trace)
        return
    if is_first_rank():
        print("megafp8: interrupted", file=sys.stderr, flush=True)
    raise SystemExit(128 + signal.SIGINT)


sys.excepthook = _report_interrupt
