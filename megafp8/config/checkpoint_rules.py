"""Rules across keys of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.rules import Finding, Rules, Values

rule = Rules()

_PARAMS = "exp_manager.checkpoint_callback_params"
_CREATES = "exp_manager.create_checkpoint_callback"
_STEPS, _TIME = f"{_PARAMS}.every_n_train_steps", f"{_PARAMS}.train_time_interval"


@rule(f"{_PARAMS}.async_save", _CREATES, _STEPS, _TIME)
def _something_is_saved_beside_training(v: Values) -> Iterator[Finding]:
    if v[f"{_PARAMS}.async_save"] and v[_CREATES] and v[_STEPS] is None and v[_TIME] is None:
        yield Finding(
            f"{_PARAMS}.async_save",
            "only periodic checkpoints are written beside training, and there are none",
            f"Set {_STEPS} or {_TIME}, or leave it out",
        )
