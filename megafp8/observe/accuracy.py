"""Say when FP8 costs accuracy, by a criterion with fixed thresholds (`model.fp8_accuracy_check`).

Chmiel et al. 2025 (arXiv 2505.19115) find that training with quantized products gains little once
the norm of the gradient falls below sqrt(3) times that of the quantization's noise. It is applied
to the gradient of each linear's weight, G = sum over tokens k of g_k x_k^T, where x is the linear's
input and g its output's gradient. Casts add errors to both. If errors of different tokens are
independent, then the expected square of G's error is

    noise^2 = sum over k of |e(x_k)|^2 |g_k|^2 + |x_k|^2 |e(g_k)|^2 + |e(x_k)|^2 |e(g_k)|^2

and with each square replaced by its mean over the tokens it follows from four sums of squares.
The linear is beyond the limit if |G|^2 < 3 noise^2. What casts of earlier layers and forward
products change is not in it.

Amaxes and scales alone decide this where a cast loses nearly everything. With an even error of half
a step of the format's smallest numbers at most, whose mean square is step^2 / 12, values of root
mean square r (in units of the scale) are below sqrt(3) times the noise if r < step / 2. The largest
of some ten thousand normally distributed values is four times r, and in most tensors of a network
it is more, so amax < 2 steps is enough. At the other end the largest value has an error of more
than 1 / sqrt(3) of itself if it is more than 1 / (1 - 1 / sqrt(3)) = 2.37 times the largest number.

A linear is named when it was beyond a limit at `LOGGED_STEPS` logged steps, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megafp8.specs import TensorHealth
from megafp8.specs.run import TensorNoise

LEAST_RATIO = math.sqrt(3)
"""The least norm of a weight's gradient over the norm of its noise."""
LEAST_STEPS_OF_AMAX = 2.0
"""The least amax of a tensor in units of its scale and of the format's smallest number."""
MOST_OVER_MAX = 1 / (1 - 1 / LEAST_RATIO)
"""The largest amax of a tensor in units of its scale and of the format's largest number."""
LOGGED_STEPS = 3


def noise_of_gradient(x: TensorNoise, g: TensorNoise) -> float:
    """Return the expected square of the error of a weight's gradient, from those of its operands.

    Ranks that share the tokens of a sequence see fewer rows of one of the two tensors, and have the
    product over all.
    """
    rows = max(x.rows, g.rows)
    of_x, of_g = x.errors / x.rows, g.errors / g.rows
    return rows * (of_x * g.values / g.rows + of_g * x.values / x.rows + of_x * of_g)


def beyond_noise(gradient: float, noise: float) -> str | None:
    """Return what is wrong with a gradient by its square and that of its noise, or None."""
    if not gradient < LEAST_RATIO**2 * noise:  # a NaN is the affair of FP8 health
        return None
    ratio = math.sqrt(gradient / noise)
    return f"the norm of its weight's gradient is {ratio:.2f} times its noise, below √3"


def beyond_range(role: str, health: TensorHealth, largest: float, smallest: float) -> str | None:
    """Return what is wrong with a tensor by its amax and scale, or None.

    Args:
        role: What the tensor is called.
        health: Its amax and scale; a tensor of zeros has nothing to lose.
        largest: The largest number of its format.
        smallest: The smallest number above zero.
    """
    scaled = health.amax * health.quant_scale
    if not 0 < scaled < math.inf:
        return None
    if scaled < LEAST_STEPS_OF_AMAX * smallest:
        return f"amax times scale of its {role} is {scaled:.2g}, where numbers begin at {smallest}"
    if scaled > MOST_OVER_MAX * largest:
        return f"amax times scale of its {role} is {scaled / largest:.1f} times the largest number"
    return None


class Streaks:
    """Count at how many logged steps in a row each linear was beyond a limit."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def after(self, complaints: Mapping[str, str]) -> list[str]:
        """Return the linears of `complaints` that reach the count with this logged step."""
        self._counts = {name: self._counts.get(name, 0) + 1 for name in complaints}
        return [name for name, count in self._counts.items() if count == LOGGED_STEPS]
