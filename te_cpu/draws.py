"""Draw the random bytes with which Transformer Engine's kernels round gradients in NVFP4.

On a GPU they come from the default generator of CUDA. Here they are those of a counter (Philox, as
for our own recipe), whose key is that of the cast. Who trains says which run, step and microbatch
it is, and the casts of one microbatch are counted; so a resumed run draws what an undisturbed one
draws. Without that, a key is drawn from torch's default generator of the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import sha256

import torch

from fp8_numerics.philox import Key


class KernelDraws:
    """Return the key of each cast's random bytes."""

    def __init__(self) -> None:
        """Draw keys from torch's default generator until a microbatch begins."""
        self._step: tuple[int, int] | None = None
        self._microbatch = ""
        self._casts: dict[str, int] = defaultdict(int)

    def begin(self, seed: int, step: int, microbatch: str) -> None:
        """Let the casts that follow belong to a microbatch of a step, or to more of its layers.

        `microbatch` names it in the same way in every run, as by its samples.
        """
        if self._step != (seed, step):
            self._casts.clear()
        self._step, self._microbatch = (seed, step), microbatch

    def end(self) -> None:
        """Draw keys from torch's default generator again."""
        self._step = None
        self._casts.clear()

    def next(self, side: str) -> Key:
        """Return the key of the next cast of rows or of columns, as `side` names them."""
        if self._step is None:
            low, high = torch.randint(2**32, (2,), device="cpu").tolist()
            return low, high
        self._casts[self._microbatch] += 1
        text = f"{self._step} {self._microbatch} {self._casts[self._microbatch]} {side}"
        digest = sha256(text.encode()).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


DRAWS = KernelDraws()
"""The draws of this process: the kernels are functions, and so they have no other place."""
