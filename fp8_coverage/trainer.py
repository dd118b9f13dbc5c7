"""Record one step of Hugging Face's Trainer."""

from __future__ import annotations

import logging
from typing import Any

from fp8_coverage.record import coverage
from fp8_coverage.table import Coverage

_LOGGER = logging.getLogger(__name__)


def trainer_callback(*, at_least: float | None = None, step: int = 0, **words: Any) -> Any:
    """Return a `TrainerCallback` that records one step, logs its table and keeps it as `coverage`.

    `step` is the number of steps before it. With `at_least`, training ends with a `CoverageError`
    after that step if a smaller share ran in FP8. `words` are those of `coverage`.
    """
    from transformers import TrainerCallback

    class Fp8CoverageCallback(TrainerCallback):
        """Record one step."""

        coverage: Coverage | None = None

        def __init__(self) -> None:
            self._running: coverage | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if self.coverage is None and state.global_step >= step:
                self._running = coverage(rest.get("model"), **words)
                self.coverage = self._running.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if self._stop() and self.coverage is not None:
                _LOGGER.warning("the products of a step:\n%s", self.coverage.table())
                if at_least is not None:
                    self.coverage.assert_at_least(at_least)

        def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            self._stop()

        def _stop(self) -> bool:
            running, self._running = self._running, None
            if running is not None:
                running.__exit__(None, None, None)
            return running is not None

    return Fp8CoverageCallback()
