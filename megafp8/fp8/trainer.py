"""Train a converted model with the `Trainer` of transformers.

    from megafp8 import fp8
    from megafp8.fp8.trainer import Fp8Callback

    state = fp8.convert(model, recipe="delayed", skip="lm_head")
    Trainer(model, arguments, train_dataset=dataset, callbacks=[Fp8Callback(state)]).train()

This module imports transformers, and `megafp8.fp8` does not import this module.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from megafp8.fp8.converted import Fp8Error
from megafp8.fp8.state import STEP, Fp8State


class Fp8Callback(TrainerCallback):  # type: ignore[misc,unused-ignore]  # has no types everywhere
    """Enclose each microbatch of a `Trainer` in `state.microbatch()`, and save the scales.

    With gradient accumulation the microbatches that follow a step's first one repeat its scales of
    the weights. Validation is outside of microbatches, so it leaves no trace in the
    scales. Each rank writes its scales into the Trainer's checkpoints, and a run that continues
    from one takes them over.
    """

    def __init__(self, state: Fp8State, *, resume_from: str | Path | None = None) -> None:
        """Take over the state that `fp8.convert` returned.

        Args:
            state: The state of the model that the Trainer gets.
            resume_from: The checkpoint's folder that is given to `train(resume_from_checkpoint=…)`;
                None means the one of that step in the arguments' `output_dir`.
        """
        self.fp8 = state
        self._resume_from = resume_from
        self._open: AbstractContextManager[None] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Load the scales of the checkpoint that training continues from.

        Raises:
            Fp8Error: The checkpoint has none, and none were loaded before.
        """
        self._abandon()
        scales = self.fp8.state_dict()
        if state.global_step == 0 or not scales:
            return
        file = _file(self._resume_from or _checkpoint(args, state), args)
        if file.is_file():
            self.fp8.load_state_dict(load_file(file))
        elif not any(bool(row) for key, row in scales.items() if key.endswith(("updates", STEP))):
            raise Fp8Error(
                str(file),
                "is missing, so training would continue with scales of a new run",
                "Give the checkpoint's folder as Fp8Callback(state, resume_from=...), or load the "
                "scales with state.load_state_dict() before trainer.train()",
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Begin the first microbatch of an optimizer step."""
        self._abandon()
        self._begin(first=True)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """End a microbatch and begin the step's next one."""
        self._end()
        if not (control.should_epoch_stop or control.should_training_stop):
            self._begin(first=False)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """End the last microbatch of a step, before the weights change."""
        self._end()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Write this rank's scales into the checkpoint that was just saved."""
        scales = self.fp8.state_dict()
        if scales:
            folder = _checkpoint(args, state)
            folder.mkdir(parents=True, exist_ok=True)
            save_file(scales, _file(folder, args))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Leave a microbatch that training was stopped before."""
        self._abandon()

    def _begin(self, *, first: bool) -> None:
        self._open = self.fp8.microbatch(first=first)
        self._open.__enter__()

    def _end(self) -> None:
        """End the microbatch, which updates the scales."""
        context, self._open = self._open, None
        if context is not None:
            context.__exit__(None, None, None)

    def _abandon(self) -> None:
        """Leave a microbatch that an exception or a stop has cut off; the scales stay."""
        context, self._open = self._open, None
        if context is not None:
            cut_off = RuntimeError("the microbatch was not completed")
            context.__exit__(type(cut_off), cut_off, None)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the Trainer's checkpoint at this step."""
    return Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _file(folder: str | Path, args: TrainingArguments) -> Path:
    return Path(folder, f"fp8_scales_{args.process_index}.safetensors")
