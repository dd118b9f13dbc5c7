"""Turn the epochs that a fine-tuning job asks for into its number of steps."""

from __future__ import annotations

from megafp8.config.base_model import FILES
from megafp8.config.checks import rule_findings
from megafp8.config.errors import SettingError, raise_if_any
from megafp8.config.load import Loaded
from megafp8.config.resolve import data_spec, rampup_of
from megafp8.config.rules import effective
from megafp8.runs.run_data import open_data

EPOCHS, STEPS = "trainer.max_epochs", "trainer.max_steps"


def with_epochs(loaded: Loaded, has_steps: bool) -> tuple[Loaded, list[str]]:
    """Return settings whose `trainer.max_steps` is what `trainer.max_epochs` means, and notes.

    Without epochs they are the given ones. The examples are read and packed for it, which the run
    then does not do again.

    Args:
        loaded: The settings.
        has_steps: Whether `trainer.max_steps` is given too; the job then ends at what comes first.

    Raises:
        UserError: The examples cannot be used, or another setting does not fit the number of steps.
    """
    values = loaded.values
    epochs = values[EPOCHS]
    if epochs is None or epochs < 1 or values[FILES] is None:
        return loaded, []
    data = open_data(data_spec(values), lambda line: None)
    per_epoch = data.train.num_samples_per_epoch
    batch = values["model.global_batch_size"]
    rampup = rampup_of(values["model.rampup_batch_size"])
    steps = samples = 0
    while samples < epochs * per_epoch:
        samples += batch if rampup is None else rampup.batch_size_at(samples, batch)
        steps += 1
    line = (
        f"{EPOCHS}={epochs}: {epochs} x {per_epoch} samples are {steps} steps with "
        f"model.global_batch_size={batch}"
    )
    given = values[STEPS]
    if has_steps and given <= steps:
        return loaded, [f"{line}; {STEPS}={given} ends the run before"] if given < steps else [line]
    settled = loaded.changed_to({STEPS: steps})
    values = effective(settled.values)
    raise_if_any(
        [
            SettingError(found.key, values[found.key], f"{found.reason} ({line})", found.hint)
            for found in rule_findings(values)
        ]
    )
    return settled, [line]
