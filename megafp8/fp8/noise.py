"""Measure how much of the tensors of each weight's gradient is the error of their casts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8_numerics.cast import Fp8Tensor
from megafp8.fp8.scaling import ScalingState
from megafp8.specs.run import TensorNoise


@dataclass
class _SquareSums:
    """Running sums of squares of one tensor over a step's microbatches, 0-d FP64 on its device."""

    values: torch.Tensor
    errors: torch.Tensor
    rows: int


class NoiseProbe:
    """Measure inputs and output gradients while it is attached, with two passes over each.

    A tensor that is rotated for the weight's gradient is measured where it is cast for its other
    product, whose errors are as large in the mean. Without such a cast it is left out.
    """

    def __init__(self, state: ScalingState) -> None:
        self._state = state
        self._sums: dict[str, _SquareSums] = {}

    def attach(self) -> None:
        """Start to measure."""
        self._sums.clear()
        self._state.observers.append(self._see)

    def detach(self) -> dict[str, TensorNoise]:
        """Stop measuring, and return what each tensor had since `attach`.

        This waits for the device, once.
        """
        self._state.observers.remove(self._see)
        sums, self._sums = self._sums, {}
        if not sums:
            return {}
        table = torch.stack([torch.stack((each.values, each.errors)) for each in sums.values()])
        rows = zip(sums.items(), table.tolist(), strict=True)
        return {
            name: TensorNoise(values, errors, each.rows) for (name, each), (values, errors) in rows
        }

    @torch.no_grad()
    def _see(
        self, name: str, x: torch.Tensor, last: Fp8Tensor | None, first: Fp8Tensor | None
    ) -> None:
        """Add the squares of a cast tensor and of its rounding errors to the sums of `name`."""
        x_fp8 = last if last is not None else first
        if x_fp8 is None or x_fp8.rotation is not None or name.endswith(".weight"):
            return
        if x.numel() == 0 or not self._state.recording:
            return
        wide = x.double()
        errors = wide - x_fp8.numbers(torch.float32).double() * x_fp8.scale_over(x.shape)
        new = _SquareSums(wide.square().sum(), errors.square().sum(), x.numel() // x.shape[-1])
        if (old := self._sums.get(name)) is not None:
            new = _SquareSums(old.values + new.values, old.errors + new.errors, old.rows + new.rows)
        self._sums[name] = new
