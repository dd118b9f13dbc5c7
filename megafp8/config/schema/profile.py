"""`model.nsys_profile`: a profile of some steps."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config.keys import Valid, at_least, key


@dataclass
class NsysProfile:
    """A profile of some steps: NVTX ranges for Nsight Systems, a Chrome trace without CUDA."""

    enabled: bool = key(
        False, "Profile the steps from `start_step` to `end_step`.", nemo=False, kind="logging"
    )
    start_step: int = key(
        10, "First step that is profiled, counted from 0.", nemo=10, kind="logging",
        valid=at_least(0),
    )  # fmt: skip
    end_step: int = key(
        10, "Last step that is profiled, counted from 0.", nemo=10, kind="logging",
        valid=at_least(0),
    )  # fmt: skip
    ranks: list[int] = key(
        [0],
        "Ranks that are profiled.",
        nemo=[0],
        kind="logging",
        valid=Valid("a list of ranks, each from 0", lambda v: bool(v) and min(v) >= 0),
    )
    gen_shape: bool = key(
        False, "Record the shapes of operations' inputs.", nemo=False, kind="logging"
    )
