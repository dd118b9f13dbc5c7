"""Check the variables by which a launcher describes a rank, before torch is imported."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from megafp8.errors import RunError

JOIN_SECONDS = 600.0  # for all ranks to connect: imports may come from a slow file system
JOIN_VARIABLE = "MEGAFP8_JOIN_SECONDS"
_HINT = "Start ranks with srun, torchrun, or one command with trainer.devices, which set it"


def is_first_rank() -> bool:
    """Whether this process is rank 0, or no rank at all: what all ranks have to say, it says."""
    return os.environ.get("RANK", "0") == "0"


def check_environment(environment: Mapping[str, str]) -> None:
    """Check the variables of a rank; those that are not set are not checked.

    Raises:
        RunError: A variable is no number or out of its range; the message names it and its value.
    """
    join_seconds(environment)
    for name in ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"):
        _whole(environment, name)
    if not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return  # this process is no rank
    _check_port(environment)
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        rank, size = (_whole(environment, name) for name in (rank_name, size_name))
        if size == 0:
            raise RunError(f"{size_name}=0: there is at least one rank. {_HINT}")
        if rank is not None and size is not None and rank >= size:
            raise RunError(
                f"{rank_name}={rank}: with {size_name}={size} the ranks are 0 to {size - 1}. "
                f"{_HINT}"
            )


def join_seconds(environment: Mapping[str, str]) -> float:
    """Return how many seconds the ranks wait for each other.

    Raises:
        RunError: MEGAFP8_JOIN_SECONDS is no number of seconds above 0.
    """
    text = environment.get(JOIN_VARIABLE, str(JOIN_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 < seconds < math.inf:
        return seconds
    raise RunError(
        f"{JOIN_VARIABLE}={text}: is not a number of seconds above 0. Give the longest time in "
        f"which all ranks start, such as 60, or unset it ({JOIN_SECONDS:.0f})"
    )


def _check_port(environment: Mapping[str, str]) -> None:
    port = _whole(environment, "MASTER_PORT")
    if port is not None and not 0 < port < 2**16:
        raise RunError(
            f"MASTER_PORT={port}: a port is a number from 1 to 65535. Choose one that no other "
            "program uses on rank 0's machine"
        )


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    """Return the whole number of a variable, or None if it is not set or empty."""
    text = environment.get(name)
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise RunError(f"{name}={text}: is not a whole number of 0 or more. {_HINT}")
    return int(text)
