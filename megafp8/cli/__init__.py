"""The commands of megafp8, and the parts of the command line that they have in common.

An import of this package lets Ctrl-C end the process with one line instead of a traceback, from now
on, and a Python that lacks a needed package too. So that this also holds for the seconds in which
torch is imported, scripts import the package first, and the command `megafp8` does so too.
"""

from __future__ import annotations

import signal
import sys
from types import TracebackType

from megafp8.parallel.environment import is_first_rank  # which imports no package

USER_ERROR = 2  # ExitCode.USER_ERROR; this module is imported before all others
NEEDED = (
    "fp8_numerics",
    "omegaconf",
    "hydra",
    "yaml",
    "numpy",
    "torch",
    "safetensors",
    "tokenizers",
    "rich",
)
_former_hook = sys.excepthook


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the process with one line after a KeyboardInterrupt or the lack of a needed package.

    Other exceptions are left as they are, and an interactive Python continues. Of several ranks
    only the first one prints the line.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in NEEDED:
        print(
            f"error: {sys.executable} has no package {error.name}, which megafp8 needs. Use the "
            "Python that has it (after `make setup`: source .venv/bin/activate), or install "
            "megafp8 with its packages: pip install -e ./fp8_numerics -e ./fp8_coverage -e .",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(USER_ERROR)
    if not issubclass(kind, KeyboardInterrupt) or hasattr(sys, "ps1") or sys.flags.interactive:
        _former_hook(kind, error, trace)
        return
    if is_first_rank():
        print("megafp8: interrupted", file=sys.stderr, flush=True)
    raise SystemExit(128 + signal.SIGINT)


sys.excepthook = _report
