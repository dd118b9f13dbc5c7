"""Check where a run starts from, and that a profile's steps and ranks exist."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.keys import Values
from megafp8.config.rules import Finding, Rules

rule = Rules()

RESTORE, RESUME = "restore_from_path", "model.resume_from_checkpoint"
RESUME_TOO = "exp_manager.resume_from_checkpoint"
_NSYS = "model.nsys_profile"


@rule(RESUME, RESUME_TOO)
def _one_checkpoint(v: Values) -> Iterator[Finding]:
    one, other = v[RESUME], v[RESUME_TOO]
    if one and other and one != other:
        yield Finding(RESUME_TOO, f"{RESUME}={one} is another checkpoint", "Give one of the two")


@rule(RESTORE, RESUME, RESUME_TOO)
def _one_start(v: Values) -> Iterator[Finding]:
    resumed = v[RESUME] or v[RESUME_TOO]
    if v[RESTORE] and resumed:
        yield Finding(
            RESTORE,
            f"{RESUME}={resumed} loads weights too",
            "Give one of the two: resume_from_checkpoint for all of a run's state, "
            "restore_from_path for its weights only",
        )


@rule(f"{_NSYS}.enabled", f"{_NSYS}.start_step", f"{_NSYS}.end_step", "trainer.max_steps")
def _steps_come(v: Values) -> Iterator[Finding]:
    start, end, steps = v[f"{_NSYS}.start_step"], v[f"{_NSYS}.end_step"], v["trainer.max_steps"]
    if v[f"{_NSYS}.enabled"] and start >= steps:
        yield Finding(
            f"{_NSYS}.start_step",
            f"is never reached, since steps are counted from 0 and trainer.max_steps={steps}",
            f"Give at most {steps - 1}",
        )
    elif v[f"{_NSYS}.enabled"] and end < start:
        yield Finding(
            f"{_NSYS}.end_step", f"is before {_NSYS}.start_step={start}", f"Give at least {start}"
        )


@rule(f"{_NSYS}.enabled", f"{_NSYS}.ranks", "trainer.devices", "trainer.num_nodes")
def _ranks_exist(v: Values) -> Iterator[Finding]:
    ranks = v["trainer.devices"] * v["trainer.num_nodes"]
    if v[f"{_NSYS}.enabled"] and max(v[f"{_NSYS}.ranks"]) >= ranks:
        yield Finding(
            f"{_NSYS}.ranks",
            f"names a rank that does not exist: the run has {ranks}",
            f"Give ranks from 0 to {ranks - 1}",
        )
