"""Check where a run starts from, that it has what it validates on, and a profile's steps."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.data_values import parse_data_prefix
from megafp8.config.keys import Values
from megafp8.config.rules import Finding, Rules
from megafp8.config.values import parse_splits
from megafp8.specs.data import MOCK_DATA, SeparateSplits

rule = Rules()

RESTORE, RESUME = "restore_from_path", "model.resume_from_checkpoint"
RESUME_TOO = "exp_manager.resume_from_checkpoint"
_NSYS = "model.nsys_profile"
_SPLITS, _PREFIX = "model.data.splits_string", "model.data.data_prefix"
_FILES, _LIMIT = "model.data.train_ds.file_names", "trainer.limit_val_batches"


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


@rule(_SPLITS, _PREFIX, _FILES, _LIMIT, "trainer.num_sanity_val_steps")
def _validation_has_data(v: Values) -> Iterator[Finding]:
    data = parse_data_prefix(v[_PREFIX])
    validates = v[_LIMIT] != 0 or v["trainer.num_sanity_val_steps"] > 0
    if not validates or v[_FILES] is not None or data == MOCK_DATA:
        return
    hint = f"Set {_LIMIT}=0 and trainer.num_sanity_val_steps=0, or give validation"
    if isinstance(data, SeparateSplits):
        if not data.validation:
            yield Finding(_PREFIX, "names no data to validate on", f"{hint} its data")
    elif (parse_splits(v[_SPLITS]) or (0, 0))[1] == 0:
        yield Finding(_SPLITS, "leaves no document to validate on", f"{hint} a share above 0")


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
