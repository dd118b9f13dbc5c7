"""Try settings and damaged files from a seeded generator, and count how each one ends.

python -m tests.foreign.fuzz [--settings N] [--files N] [--seed N]

Each try ends in a result or in an error that a user can correct. Three other ends are failures: any
other exception, more than `CPU_SECONDS` of work, and an absurd value that is accepted. What is
absurd is written down here by the type of a value; it does not follow from the checks under trial.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

from megafp8.errors import UserError

CPU_SECONDS = 30


@dataclass
class Tally:
    """Count the ends of tries by kind, and describe the failures.

    `ends` counts, for each kind, what was read or accepted, refused, and failed.
    """

    ends: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Return the number of tries."""
        return sum(counter.total() for counter in self.ends.values())

    def add(self, kind: str, end: str, count: int = 1) -> None:
        """Count `count` tries of a kind that ended in the same way."""
        self.ends.setdefault(kind, Counter())[end] += count

    def fail(self, kind: str, what: str) -> None:
        """Count a failure and keep its description."""
        self.add(kind, "failed")
        self.failures.append(f"{kind}: {what}")

    def __str__(self) -> str:
        lines = [f"{'kind':24} {'tried':>6} {'read':>6} {'refused':>8} {'failed':>7}"]
        for kind, ends in self.ends.items():
            counts = f"{ends['read']:6} {ends['refused']:8} {ends['failed']:7}"
            lines.append(f"{kind:24} {ends.total():6} {counts}")
        return "\n".join([*lines, *self.failures])


class HangError(BaseException):
    """Report work that did not end; no handler of `Exception` catches it."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise `HangError` in the block after `CPU_SECONDS` of this process's own work."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError(f"no end after {CPU_SECONDS} s of work")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def attempt(tally: Tally, kind: str, what: str, call: Callable[[], str | None]) -> None:
    """Count how `call` ends; it returns what is absurd in its result, or None."""
    try:
        with limited(), contextlib.redirect_stdout(io.StringIO()):
            with contextlib.redirect_stderr(io.StringIO()):
                absurd = call()
    except UserError as error:
        if str(error).strip():
            tally.add(kind, "refused")
        else:
            tally.fail(kind, f"{what}: an error without a word")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever it is: a PanicException of Rust is no Exception
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        at = "" if place is None else f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
        tally.fail(kind, f"{type(error).__name__}: {str(error)[:200]}{at}: {what}")
    else:
        if absurd is None:
            tally.add(kind, "read")
        else:
            tally.fail(kind, f"accepted: {absurd}: {what}")


def main(argv: Sequence[str]) -> int:
    """Print the tables; return 1 if a try failed."""
    from tests.foreign.fuzz_files import try_files
    from tests.foreign.fuzz_settings import try_settings

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=10_000)
    parser.add_argument("--files", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    tally = Tally()
    try_settings(tally, options.settings, Random(options.seed))
    with tempfile.TemporaryDirectory() as folder:
        try_files(tally, options.files, Random(options.seed), Path(folder))
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
