"""Say in one line how a rank ended, so that this does not depend on who passes its exit code on.

torchrun ends with 1 whatever its ranks ended with, a container turns a signal into a code, and
`srun` returns the largest code of all tasks, those included that it ended itself. The last line of
a rank reaches a job's log through all of them. `examples/slurm/pretrain.sbatch` reads these lines,
and the code of `srun` where a rank has left none.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from megafp8.errors import ExitCode

REQUEUES = "MEGAFP8_REQUEUES"
"""Says that a batch script reads these lines, and starts the job again where they ask for it."""
MAX_RESTARTS = "MEGAFP8_MAX_RESTARTS"
"""`trainer.max_restarts` of this run, for the line of a rank that crashes or hangs."""

LAST_END = "MEGAFP8_LAST_END"
"""What the batch script, or our launcher, says of how the start before this one ended."""

WORDS = {
    int(ExitCode.CRASHED): "crash",
    int(ExitCode.USER_ERROR): "refused",
    int(ExitCode.NONFINITE): "not finite",
    int(ExitCode.HUNG): "hang",
    int(ExitCode.SAVED_ON_SIGNAL): "saved",
}
LOST = "another rank was lost"
_LOST_CONNECTION = (  # gloo, torch's store, NCCL
    "connection closed by peer",
    "connection reset by peer",
    "connection was closed",
    "broken pipe",
    "remote process exited",
    "failed to recv",
    "failed to send",
)


def end_line(
    code: int,
    environment: Mapping[str, str],
    *,
    is_lost: bool = False,
    hanging: Sequence[int] = (),
) -> str:
    """Return the line of a rank that ends with `code`.

    `is_lost` says that the rank ends because its connection to another one broke, and `hanging`
    has the ranks for which it has waited in vain.
    """
    word = LOST if is_lost else WORDS.get(code, "ended")
    if hanging:
        word += f" of rank {', '.join(map(str, hanging))}"
    may_restart = code in (ExitCode.CRASHED, ExitCode.HUNG)
    if may_restart and (restarts := environment.get(MAX_RESTARTS, "0")) != "0":
        word += f"; trainer.max_restarts={restarts}"
    rank, host = environment.get("RANK", "0"), socket.gethostname()
    return f"megafp8: rank {rank} on {host} ends with code {code} ({word})"


def tell_end(code: int, *, is_lost: bool = False, hanging: Sequence[int] = ()) -> None:
    """Print how this rank ends, if a batch script reads it and there is something to say."""
    if REQUEUES in os.environ and code != ExitCode.FINISHED:
        line = end_line(code, os.environ, is_lost=is_lost, hanging=hanging)
        print(line, file=sys.stderr, flush=True)


def lost_connection(error: BaseException) -> str | None:
    """Return what a broken connection to another rank says of itself, or None for other errors."""
    for part in _causes(error):
        lines = str(part).strip().splitlines()
        first = lines[0] if lines else ""
        if any(words in str(part).lower() for words in _LOST_CONNECTION):
            return f"{type(part).__name__}: {first[:200]}"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
