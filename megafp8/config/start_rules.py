"""From where a run may start, and what its best checkpoints are measured by."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.rules import Finding, Rules, Values

rule = Rules()

RESTORE, RESUME = "restore_from_path", "model.resume_from_checkpoint"
RESUME_TOO = "exp_manager.resume_from_checkpoint"


@rule(RESUME, RESUME_TOO)
def _one_checkpoint(v: Values) -> Iterator[Finding]:
    one, other = v[RESUME], v[RESUME_TOO]
    if one and other and one != other:
        yield Finding(RESUME_TOO, f"{RESUME}={one} is another one", "Give one of the two")


@rule(RESTORE, RESUME, RESUME_TOO)
def _one_start(v: Values) -> Iterator[Finding]:
    resumed = v[RESUME] or v[RESUME_TOO]
    if v[RESTORE] and resumed:
        yield Finding(
            RESTORE,
            f"{RESUME}={resumed} brings weights along already",
            "Give one of the two: resume_from_checkpoint for all of a run's state, "
            "restore_from_path for its weights alone",
        )


@rule("trainer.max_restarts", "exp_manager.resume_if_exists")
def _a_restart_continues(v: Values) -> Iterator[Finding]:
    if v["trainer.max_restarts"] and not v["exp_manager.resume_if_exists"]:
        yield Finding(
            "trainer.max_restarts",
            "a restart continues the run, and exp_manager.resume_if_exists=False never does",
            "Leave one of the two out",
        )


_PARAMS = "exp_manager.checkpoint_callback_params"


@rule("trainer.limit_val_batches", f"{_PARAMS}.save_top_k", f"{_PARAMS}.monitor")
def _best_by_validation(v: Values) -> Iterator[Finding]:
    by_validation = v[f"{_PARAMS}.save_top_k"] and v[f"{_PARAMS}.monitor"] == "val_loss"
    if by_validation and not v["trainer.limit_val_batches"]:
        yield Finding(
            "trainer.limit_val_batches",
            f"{_PARAMS}.save_top_k={v[f'{_PARAMS}.save_top_k']} keeps the best by the validation "
            "loss, and there would be none",
            f"Set {_PARAMS}.monitor=reduced_train_loss or save_top_k=0, or validate",
        )
