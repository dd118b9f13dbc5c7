"""Whether a profile that was asked for would happen."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.rules import Finding, Rules, Values

rule = Rules()

_NSYS = "model.nsys_profile"


@rule(f"{_NSYS}.enabled", f"{_NSYS}.start_step", f"{_NSYS}.end_step", "trainer.max_steps")
def _steps_come(v: Values) -> Iterator[Finding]:
    start, end, steps = v[f"{_NSYS}.start_step"], v[f"{_NSYS}.end_step"], v["trainer.max_steps"]
    if v[f"{_NSYS}.enabled"] and start >= steps:
        yield Finding(
            f"{_NSYS}.start_step",
            f"never comes: steps are counted from 0 and trainer.max_steps={steps}",
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
            f"{_NSYS}.ranks", f"the run has {ranks} ranks", f"Give ranks from 0 to {ranks - 1}"
        )
