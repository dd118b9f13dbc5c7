"""Run torchrun for a batch script: `python -m megafp8.parallel.torchrun --nnodes=2 … FILE …`.

torchrun ends with 1 whatever its ranks ended with, prints some hundred lines about it, and dies of
a signal that its ranks have to handle. This program takes the same arguments, and ends with the
code of the rank that explains the others.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from megafp8.errors import ExitCode
from megafp8.parallel.launch import precedence


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this node, and return the exit code of the node."""
    # As for our own launcher's ranks: messages about lost connections would hide the first error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.CRITICAL)  # of this process alone; the ranks speak for themselves
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    # Slurm signals every process of the step, so that each rank gets the signal by itself.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    try:
        torchrun(list(argv))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        # torchrun itself ends the ranks that are left by SIGTERM.
        codes = {k: v for k, v in codes.items() if v != -signal.SIGTERM} or codes
        rank = min(codes, key=lambda rank: precedence(codes[rank]))
        if codes[rank] >= 0:
            return codes[rank]
        name = signal.Signals(-codes[rank]).name
        print(f"megafp8: torchrun: rank {rank} has ended by signal {name}", file=sys.stderr)
        return 128 - codes[rank]
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousError as error:  # the node that holds the rendezvous has ended before
        text = str(error).strip().splitlines()[:1]
        print(f"megafp8: torchrun: the other nodes are gone: {text}", file=sys.stderr)
        return int(ExitCode.CRASHED)
    return int(ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
