"""Draw the random bytes of stochastic rounding, again the same ones after a resume."""

from __future__ import annotations

from collections import defaultdict
from hashlib import sha256

import torch


class Draws:
    """Draw bytes by a key.

    The key is the seed, the step, the microbatch, the tensor and product, and how often the tensor
    was cast in this step.
    Nothing is kept from one step to the next, so a resumed run draws what an undisturbed one draws.
    The ranks that hold parts of a tensor draw the same bytes for their parts.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.at = (0, 0)  # the step, and the number of the microbatch; both of the whole run
        self._step = 0  # the step of the counts
        self._counts: dict[str, int] = defaultdict(int)

    def bytes_of(self, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return random bytes (uint8) on the CPU for the next cast of a tensor for one product."""
        step, sample = self.at
        counts = self._counts_of_step()
        counts[tensor] += 1
        key = f"{self.seed} {step} {sample} {tensor} {counts[tensor]}"
        seed = int.from_bytes(sha256(key.encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def _counts_of_step(self) -> dict[str, int]:
        if self._step != self.at[0]:
            self._step, self._counts = self.at[0], defaultdict(int)
        return self._counts

    def snapshot(self) -> dict[str, int]:
        """Return how often each tensor was cast in this step."""
        return dict(self._counts_of_step())

    def restore(self, counts: dict[str, int]) -> None:
        """Go back to a snapshot: the casts that follow draw what those after it drew."""
        self._step, self._counts = self.at[0], defaultdict(int, counts)
